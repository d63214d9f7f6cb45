"""The scripts of the compose profile `secure`, run with jars in the place of an image: what they start is closed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_errors import LoginRefused
from headrace.connectors.kafka_jars import LIBS_VARIABLE
from headrace.connectors.kafka_node import free_port
from headrace.schemas.access import ROLES
from headrace.schemas.config import KafkaConfig

if not os.environ.get(LIBS_VARIABLE):
    pytest.skip(f"the scripts of the secure profile with jars: set {LIBS_VARIABLE} (Java 17)", allow_module_level=True)

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).resolve().parents[2] / "infra" / "kafka"
RUN = "first"


class Secured:
    """One node started by secure.sh; `access` gives a run its logins and rights by access.sh."""

    def __init__(self, folder: Path) -> None:
        self.admin, self.given = folder / "admin", folder / "given"
        self.port, self.inner = free_port(), free_port()
        self._log = folder / "server.out"
        java = 'exec java -Xmx384m -XX:+UseSerialGC -Dorg.slf4j.simpleLogger.defaultLogLevel=warn -cp "$LIBS/*"'
        for name, main in (("kafka-storage.sh", "kafka.tools.StorageTool"), ("kafka-server-start.sh", "kafka.Kafka")):
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/sh\n{java} {main} "$@"\n')
            program.chmod(0o755)
        self._environment = {
            **os.environ, "LIBS": os.environ[LIBS_VARIABLE], "KAFKA_BIN": str(folder / "bin"),
            "SECRETS": str(self.admin), "DATA": str(folder / "data"), "PORT": str(self.port),
            "CONTROLLER_PORT": str(free_port()), "ADVERTISED": f"127.0.0.1:{self.port}",
            "INTERNAL": f"localhost:{self.inner}",
        }  # fmt: skip
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [SCRIPTS / "secure.sh"], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    continue

    def access(self) -> str:
        done = subprocess.run(
            [SCRIPTS / "access.sh"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
            check=False,
            env={
                **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RUN": RUN,
                "BOOTSTRAP": f"localhost:{self.inner}", "ADMIN": str(self.admin), "SECRETS": str(self.given),
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + self._log.read_text(errors="replace")[-2000:]
        return done.stdout

    def connect(self, role: str, **keys: str) -> Connection:
        login = {
            "bootstrap": f"127.0.0.1:{self.port}", "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_username": "{role}", "sasl_password_file": str(self.given / "{role}.password"),
            "ssl_ca_location": str(self.given / "ca.pem"),
        }  # fmt: skip
        return Connection.of(KafkaConfig.model_validate({**login, **keys}), RUN, role=role)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("compose"))
    try:
        _wait_for_files(made)
        admin = made.connect(
            "admin", sasl_password_file=str(made.admin / "admin.password"), ssl_ca_location=str(made.admin / "ca.pem")
        )
        admin.wait_for_broker(240)
        yield made
    finally:
        made.stop()


def _wait_for_files(made: Secured) -> None:
    end = time.monotonic() + 120
    while not (made.admin / "ca.pem").exists():
        assert time.monotonic() < end and made.process.poll() is None, "secure.sh made no certificate"
        time.sleep(0.1)


def test_roles_get_logins_and_rights_and_keep_their_passwords(secured: Secured) -> None:
    said = secured.access()
    assert f"gave {len(ROLES)} logins" in said and f"rights of run {RUN}" in said
    before = {file.name: file.read_text() for file in secured.given.iterdir()}
    secured.access()
    assert {file.name: file.read_text() for file in secured.given.iterdir()} == before
    assert set(before) == {"ca.pem", *(f"{role}.password" for role in ROLES)}
    launcher, rollout = secured.connect("launcher"), secured.connect("rollout")
    assert launcher.ensure_topics({"tasks": 1, "ledger": 1}) == ["tasks", "ledger"]
    assert set(rollout.list_run_topics()) == {"tasks"}
    with pytest.raises(LoginRefused, match="is refused"):
        rollout.ensure_topics({"evals": 1})


def test_secrets_are_their_owners_alone(secured: Secured) -> None:
    for folder in (secured.admin, secured.given):
        for file in folder.iterdir():
            wanted = 0o644 if file.name == "ca.pem" and folder == secured.admin else 0o600
            assert stat.S_IMODE(file.stat().st_mode) == wanted, file


def test_the_scripts_are_sound_for_the_shell() -> None:
    for script in ("secure.sh", "access.sh"):
        subprocess.run(["sh", "-n", SCRIPTS / script], check=True)
