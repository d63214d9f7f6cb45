"""The real schema registry for tests: Apicurio from a folder of jars, started once for whoever asks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from headrace.connectors.kafka_node import free_port

FOLDER = "HEADRACE_APICURIO_DIR"


class Apicurio:
    """One running server, in memory; `url` is the root of Confluent's API in it."""

    def __init__(self, folder: Path, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
        (jar,) = folder.glob("apicurio-registry-app-*-runner.jar")
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                ["java", "-Xmx256m", "-XX:+UseSerialGC", "-Dquarkus.http.host=127.0.0.1",
                 f"-Dquarkus.http.port={port}", "-jar", jar.name],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._log = log

    def wait_ready(self, seconds: float = 200.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/subjects", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"Apicurio did not start: {self._log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """End it with its children, in order or by force."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                try:
                    self._process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
