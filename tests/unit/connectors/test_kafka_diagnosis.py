"""What speaks at an address: TLS, plain text, nothing, silence; each in words that name the setting to change."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.connectors import kafka_diagnosis
from headrace.connectors.kafka_diagnosis import diagnose, refuse_plain_on_tls
from headrace.connectors.kafka_errors import LoginRefused
from headrace.connectors.kafka_node import free_port


def serve(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that handles each connection by `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    answer(connection)
                except OSError:
                    continue

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key(), serial_number=1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.write_bytes(key.private_bytes(*form))
    return cert_file, key_file


@pytest.fixture(params=["server alone", "client certificate wanted"])
def tls(certificate: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    if request.param != "server alone":
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate[0])

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as inner:
            inner.recv(1)

    yield from serve(answer)


@pytest.fixture
def plain() -> Iterator[str]:
    """Answers as a server does that takes a TLS hello for a wrong request: it closes."""

    def answer(connection: socket.socket) -> None:
        connection.recv(16)

    yield from serve(answer)


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
def test_a_plain_client_at_a_tls_port_is_refused_at_once(tls: str, protocol: str) -> None:
    with pytest.raises(LoginRefused, match=f"{tls} speaks TLS and kafka.security_protocol is {protocol}: set it to"):
        refuse_plain_on_tls(tls, protocol)
    assert "set it to SASL_SSL" in diagnose(tls, protocol)


def test_a_tls_client_at_a_tls_port_is_not_refused(tls: str) -> None:
    refuse_plain_on_tls(tls, "SASL_SSL")
    assert "set kafka.security_protocol to SASL_SSL" in diagnose(tls, "SSL")
    assert "does not answer as Kafka SASL_SSL does" in diagnose(tls, "SASL_SSL")


def test_a_tls_client_at_a_plain_port_is_told(plain: str) -> None:
    refuse_plain_on_tls(plain, "PLAINTEXT")
    assert "does not speak TLS, and kafka.security_protocol is SASL_SSL: set it to PLAINTEXT" in diagnose(
        plain, "SASL_SSL"
    )
    assert "set kafka.security_protocol to SASL_PLAINTEXT" in diagnose(plain, "PLAINTEXT")


def test_a_port_that_says_nothing_is_not_taken_for_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen broker takes connections and stays silent; that is no reason to give up on it."""
    monkeypatch.setattr(kafka_diagnosis, "_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refuse_plain_on_tls(f"127.0.0.1:{listener.getsockname()[1]}", "PLAINTEXT")


def test_nothing_there_is_said_with_the_systems_reason(plain: str) -> None:
    closed = f"127.0.0.1:{free_port()}"
    assert "Connection refused); is it started" in diagnose(closed, "PLAINTEXT")
    refuse_plain_on_tls(closed, "PLAINTEXT")
    assert plain in diagnose(f"{closed},{plain}", "SASL_SSL"), "the second address was not tried"


@pytest.mark.parametrize("address", ["nowhere", "a:b", "127.0.0.1:", "127.0.0.1:99999999", "[::1]:1", ""])
def test_odd_addresses_are_said_and_raise_nothing_else(address: str) -> None:
    refuse_plain_on_tls(address, "PLAINTEXT")
    assert "is kafka.bootstrap right?" in diagnose(address, "SSL")
