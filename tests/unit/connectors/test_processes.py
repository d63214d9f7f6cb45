"""Processes and ports: alive, dead, zombie, somebody else's; ended in order or by force."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from headrace.connectors.kafka_node import free_port
from headrace.connectors.processes import await_command, command_of, end_processes, holder_of, is_free


def child(code: str) -> subprocess.Popen[str]:
    """A Python process in a group of its own that has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time, signal, os\n{code}\nprint('ready', flush=True)\ntime.sleep(60)"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_command_line_is_that_of_the_living() -> None:
    process = child("")
    assert "time.sleep(60)" in command_of(process.pid)
    process.kill()
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is None:
        time.sleep(0.01)
    assert command_of(process.pid) == "", "a zombie has none"
    process.wait()
    assert command_of(process.pid) == ""


def test_a_process_just_started_shows_its_command_or_its_end() -> None:
    for code in ("import time; time.sleep(60)", "pass"):
        for _ in range(5):
            process = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
            await_command(process)
            assert code in command_of(process.pid) or process.poll() is not None
            process.kill()
            process.wait()


def test_a_port_is_free_until_somebody_listens_and_the_holder_is_named() -> None:
    port = free_port()
    assert is_free(port) and holder_of(port) == ""
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        if sys.platform == "linux":
            assert holder_of(port).startswith(f"pid {os.getpid()} (")
    assert is_free(port)


def test_processes_end_by_sigterm_and_only_stubborn_ones_by_force() -> None:
    polite, stubborn = child(""), child("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert end_processes([polite.pid, stubborn.pid], 0.5) == [stubborn.pid]
    assert polite.wait(10) == -signal.SIGTERM
    assert stubborn.wait(10) == -signal.SIGKILL


def test_a_groups_children_end_with_it() -> None:
    parent = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    inner = int(parent.stdout.readline())
    end_processes([parent.pid], 5)
    parent.wait()
    end = time.monotonic() + 10
    while command_of(inner) and time.monotonic() < end:
        time.sleep(0.01)
    assert command_of(inner) == ""


def test_ending_what_is_gone_is_no_error() -> None:
    process = child("")
    process.kill()
    process.wait()
    assert end_processes([process.pid], 1) == []
    assert end_processes([], 1) == []


@pytest.mark.parametrize("pid", [2**22 + 1, 0])
def test_a_pid_that_nobody_has_is_no_command(pid: int) -> None:
    assert command_of(pid) == ""
