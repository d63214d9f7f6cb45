"""Why no client gets through: what really speaks at a broker's address, told apart from what ``[kafka]`` asks for.

librdkafka only reports that connections close when a plain client meets a TLS port. This module opens one connection
itself and looks; it is called once, when a client has waited in vain.
"""

import socket
import ssl

from headrace.connectors.kafka_errors import LoginRefused

__all__ = ("diagnose", "refuse_plain_on_tls")

_SECONDS = 3.0
_ENCRYPTED = ("SSL", "SASL_SSL")


def diagnose(bootstrap: str, security_protocol: str) -> str:
    """What is at the first address that can be reached, in words that name what to change."""
    last = ""
    for address in bootstrap.split(","):
        host, port = _parts(address)
        try:
            socket.create_connection((host, port), _SECONDS).close()
        except OSError as error:
            last = f"{address.strip()}: {error}"
            continue
        return _of_open_port(host, port, security_protocol)
    return f"nothing can be reached there ({last}); is it started, and is kafka.bootstrap right?"


def refuse_plain_on_tls(bootstrap: str, security_protocol: str) -> None:
    """Raise LoginRefused when a client without TLS talks to a port that speaks it."""
    if security_protocol in _ENCRYPTED:
        return
    for host, port in map(_parts, bootstrap.split(",")):
        if _speaks_tls(host, port):
            raise LoginRefused(_of_open_port(host, port, security_protocol))


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.strip().rpartition(":")
    number = int(port) if port.isdigit() else 0
    return host.strip("[]"), min(number, 65_535)


def _of_open_port(host: str, port: int, security_protocol: str) -> str:
    encrypted, wants = _speaks_tls(host, port), security_protocol in _ENCRYPTED
    if encrypted and not wants:
        return (
            f"{host}:{port} speaks TLS and kafka.security_protocol is {security_protocol}: set it to SASL_SSL (with a "
            "login) or SSL, and kafka.ssl_ca_location to the certificate to trust"
        )
    if not encrypted and wants:
        return (
            f"{host}:{port} takes connections but does not speak TLS, and kafka.security_protocol is "
            f"{security_protocol}: set it to PLAINTEXT or SASL_PLAINTEXT, or take the port of the TLS listener"
        )
    if security_protocol in ("SSL", "PLAINTEXT"):
        return (
            f"{host}:{port} takes connections and closes them: if it wants a login, set kafka.security_protocol to "
            f"SASL_{security_protocol}; else it may be no Kafka"
        )
    return f"{host}:{port} takes connections but does not answer as Kafka {security_protocol} does"


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only to learn whether it is TLS; nothing is sent
    try:
        with (
            socket.create_connection((host, port), _SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except ssl.SSLError as error:
        return "alert" in str(error).lower()  # it answered in TLS, if only to refuse this client
    except OSError:
        return False
