"""The broker as a process: lock, port, clean stop, death of the parent."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.schemas.errors import EXIT_CONFIGURATION

COMMAND = [sys.executable, "-m", "headrace.connectors.broker"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts brokers on a data folder; kills those that still run at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, data: str = "data") -> subprocess.Popen[str]:
        command = [*COMMAND, "--data", str(tmp_path / data), "--port", "0", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def _ready(process: subprocess.Popen[str]) -> tuple[str, int]:
    """(what it said before, port)."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        if line.startswith("ready "):
            return said, int(line.split()[1])
        said += line
    raise AssertionError(f"ended without being ready: {said}")


def test_it_says_its_limits_listens_on_loopback_and_stops_at_once(start: Start, tmp_path: Path) -> None:
    process = start()
    said, port = _ready(process)
    for limit in ("single node", "loopback", "plaintext", "no fsync", "classic groups"):
        assert limit in said
    with socket.create_connection(("127.0.0.1", port)):
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert time.monotonic() - began < 1
    assert (tmp_path / "data" / "clean-stop").exists()


def test_a_second_broker_on_the_same_folder_is_refused(start: Start) -> None:
    first = start()
    _ready(first)
    second = start()
    _, errors = second.communicate(timeout=10)
    assert second.returncode == EXIT_CONFIGURATION
    assert f"process {first.pid}" in errors and "another folder" in errors
    assert "Traceback" not in errors


def test_a_broker_waits_for_one_that_is_about_to_end(start: Start) -> None:
    first = start()
    _ready(first)
    second = start()
    time.sleep(1.0)
    first.kill()
    _ready(second)


def test_a_killed_broker_leaves_no_lock(start: Start) -> None:
    first = start()
    _ready(first)
    first.kill()
    first.wait()
    _ready(start())


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, "--data", str(tmp_path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == EXIT_CONFIGURATION
    assert f"port {port}" in done.stderr and "Traceback" not in done.stderr


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "next(line for line in child.stdout if line.startswith('ready'))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [*COMMAND, "--data", str(tmp_path), "--port", "0", "--exit-with-parent"]
    parent = subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {child} outlived its parent")


def test_it_ends_when_its_pipe_closed_before_it_could_ask_for_its_parent(start: Start, tmp_path: Path) -> None:
    command = [*COMMAND, "--data", str(tmp_path), "--port", "0", "--exit-with-parent"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0


def test_garbage_ends_the_connection_and_not_the_broker(start: Start) -> None:
    process = start()
    _, port = _ready(process)
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        b"\0\0\0\x0a\0\x63\0\0\0\0\0\1\xff\xff",
        b"\0\0\0\x08" + b"\0" * 8,
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(garbage)
            assert client.recv(100) == b""
    assert process.poll() is None
