"""Secrets on disk: made once, for their owner alone, and never as words of a command."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import ssl
import stat
from pathlib import Path

import pytest

from headrace.connectors import kafka_secrets
from headrace.connectors.kafka_secrets import ensure_secrets, password_file, salted_users, write_secret
from headrace.schemas.errors import ConfigurationError

KEYTOOL = shutil.which("keytool")
needs_keytool = pytest.mark.skipif(KEYTOOL is None, reason="keytool (part of Java) makes the certificate")


@pytest.fixture
def fake_keytool(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for Java's tool where only files and arguments are of interest."""
    calls: list[list[str]] = []

    def run(keytool: str, *arguments: str) -> None:
        calls.append(list(arguments))
        target = arguments[arguments.index("-keystore" if arguments[0] == "-genkeypair" else "-file") + 1]
        Path(target).write_text("made")

    monkeypatch.setattr(kafka_secrets, "_keytool", run)
    return calls


def test_passwords_are_made_once_differ_and_are_for_the_owner_alone(
    tmp_path: Path, fake_keytool: list[list[str]]
) -> None:
    folder = tmp_path / "secrets"
    security, passwords = ensure_secrets(folder, ("source", "trainer"), "keytool")
    again, same = ensure_secrets(folder, ("source", "trainer"), "keytool")
    assert passwords == same and again == security
    assert set(passwords) == {"admin", "source", "trainer"} and len(set(passwords.values())) == 3
    assert min(map(len, passwords.values())) >= 32
    assert len(fake_keytool) == 2, "the certificate was made twice"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in (*folder.glob("*.password"), security.keystore):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_no_secret_is_a_word_of_a_command(tmp_path: Path, fake_keytool: list[list[str]]) -> None:
    security, passwords = ensure_secrets(tmp_path, ("source",), "keytool")
    words = [word for call in fake_keytool for word in call] + salted_users(passwords)
    for secret in (*passwords.values(), security.keystore_password):
        assert not any(secret in word for word in words)


def test_a_users_digest_is_that_of_rfc_5802() -> None:
    """SaltedPassword := Hi(password, salt, i), which is PBKDF2 with HMAC."""
    (text,) = salted_users({"trainer": "correct horse"})
    found = re.fullmatch(r'SCRAM-SHA-512=\[name=trainer,iterations=(\d+),salt="(.*)",saltedpassword="(.*)"\]', text)
    assert found is not None
    rounds, salt, salted = int(found[1]), base64.b64decode(found[2]), base64.b64decode(found[3])
    assert rounds >= 4096 and len(salt) == 16
    assert salted == hashlib.pbkdf2_hmac("sha512", b"correct horse", salt, rounds)
    assert salted_users({"trainer": "correct horse"}) != [text], "the salt does not change"


def test_a_secret_is_never_written_over_another(tmp_path: Path) -> None:
    write_secret(tmp_path / "a", "first")
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"
    assert password_file(tmp_path, "a") == tmp_path / "a.password"


@needs_keytool
def test_the_certificate_is_one_that_clients_can_trust_by_address(tmp_path: Path) -> None:
    security, _ = ensure_secrets(tmp_path, (), KEYTOOL or "")
    context = ssl.create_default_context(cafile=str(security.certificate))
    (about,) = context.get_ca_certs()
    assert dict(pair[0] for pair in about["subject"])["commonName"] == "headrace-node"
    assert security.keystore.stat().st_size > 500


def test_a_keytool_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="gone \\(part of Java\\) cannot be run"):
        ensure_secrets(tmp_path, (), str(tmp_path / "gone"))
