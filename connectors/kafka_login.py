"""How a client logs in: the secret part of its settings, read from files and the environment when a client is made.

In: the ``[kafka]`` section and the role of the process. Out: librdkafka settings. No secret is part of the section, a
message or a repr; what is missing is named by the key or variable that should have led to it.
"""

import os
from pathlib import Path

from headrace.schemas.access import ROLES
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("login_settings",)


def login_settings(config: KafkaConfig, role: str) -> dict[str, str]:
    """``sasl.*`` and the key's password for one client. Raises ConfigurationError when a secret cannot be read."""
    out = {}
    if config.security_protocol.startswith("SASL"):
        out["sasl.mechanism"] = config.sasl_mechanism or "PLAIN"
        out["sasl.username"] = _filled(config.sasl_username, role) or _variable(config.sasl_username_env)
        file = _filled(config.sasl_password_file, role)
        out["sasl.password"] = _content(file, role) if file else _variable(config.sasl_password_env)
    if config.ssl_key_password_env:
        out["ssl.key.password"] = _variable(config.ssl_key_password_env)
    return out


def _filled(text: str, role: str) -> str:
    return text.replace("{role}", role)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ConfigurationError(
            f"the environment variable {name} is not set; [kafka] takes the login from it "
            "(or from kafka.sasl_username and kafka.sasl_password_file)"
        )
    return value


def _content(file: str, role: str) -> str:
    try:
        return Path(file).read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        hint = f"; roles are {', '.join(ROLES)}" if role not in ROLES else ""
        raise ConfigurationError(f"kafka.sasl_password_file: cannot read {file} as {role}: {error}{hint}") from error
