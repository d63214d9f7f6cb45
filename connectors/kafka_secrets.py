"""Secrets of a secure cluster on this machine: a certificate for 127.0.0.1, and a password for each user.

In: a folder. Out: files that only their owner can read, made once and kept. No password appears on a command line: Java
reads the key store's from a file, and Kafka gets users as salted digests (RFC 5802).
"""

import base64
import hashlib
import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

from headrace.connectors.kafka_properties import ADMIN, MECHANISM, NODE_NAME, Security
from headrace.schemas.errors import ConfigurationError

__all__ = ("ensure_secrets", "password_file", "salted_users", "write_secret")

_ITERATIONS = 4096
_VALID_DAYS = 3650


def password_file(folder: Path, user: str) -> Path:
    """Where the password of a user of the cluster with these secrets is kept."""
    return folder / f"{user}.password"


def write_secret(path: Path, text: str) -> None:
    """Create a file that only its owner can read. Raises FileExistsError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def ensure_secrets(folder: Path, users: tuple[str, ...], keytool: str) -> tuple[Security, Mapping[str, str]]:
    """What a secure cluster needs, made where it is missing: (files of the nodes, password of each user and the admin).

    ``keytool`` comes with Java. Raises ConfigurationError when it fails.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    passwords = {}
    for user in (ADMIN, *users):
        file = password_file(folder, user)
        if not file.exists():
            write_secret(file, secrets.token_urlsafe(24))
        passwords[user] = file.read_text("utf-8").strip()
    lock = folder / "keystore.password"
    if not lock.exists():
        write_secret(lock, secrets.token_urlsafe(24))
    security = Security(
        keystore=folder / "node.p12",
        certificate=folder / "ca.pem",
        keystore_password=lock.read_text("utf-8"),
        admin_password=passwords[ADMIN],
    )
    if not security.certificate.exists():
        _make_certificate(security, lock, keytool)
    return security, passwords


def _make_certificate(security: Security, lock: Path, keytool: str) -> None:
    """One self-signed certificate for all nodes; clients trust it by name (``kafka.ssl_ca_location``)."""
    security.keystore.unlink(missing_ok=True)
    store = ["-keystore", str(security.keystore), "-storetype", "PKCS12", "-storepass:file", str(lock)]
    _keytool(
        keytool, "-genkeypair", "-alias", "node", "-keyalg", "EC", "-groupname", "secp256r1",
        "-dname", f"CN={NODE_NAME}", "-ext", "san=ip:127.0.0.1,dns:localhost", "-ext", "bc:c",
        "-validity", str(_VALID_DAYS), *store,
    )  # fmt: skip
    security.keystore.chmod(0o600)
    unfinished = security.certificate.with_suffix(".unfinished")
    _keytool(keytool, "-exportcert", "-rfc", "-alias", "node", "-file", str(unfinished), *store)
    unfinished.replace(security.certificate)


def _keytool(keytool: str, *arguments: str) -> None:
    try:
        done = subprocess.run([keytool, *arguments], capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise ConfigurationError(f"{keytool} (part of Java) cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise ConfigurationError(f"{keytool} {arguments[0]} failed: {(done.stdout + done.stderr).strip()[-500:]}")


def salted_users(passwords: Mapping[str, str]) -> list[str]:
    """What Kafka's format tool takes by ``--add-scram`` for each user: salt and salted password, never the password."""
    out = []
    for user, password in passwords.items():
        salt = secrets.token_bytes(16)
        salted = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
        parts = f'salt="{base64.b64encode(salt).decode()}",saltedpassword="{base64.b64encode(salted).decode()}"'
        out.append(f"{MECHANISM}=[name={user},iterations={_ITERATIONS},{parts}]")
    return out
