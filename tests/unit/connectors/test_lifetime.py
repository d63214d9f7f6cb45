"""When a process stops: asked in order, and at once while it starts."""

from __future__ import annotations

import signal
import subprocess
import sys

from headrace.connectors.lifetime import StopSignal

STARTS = """
import time
from headrace.connectors.lifetime import StopSignal
stop = StopSignal().listen(with_parent=%s)
with stop.at_once():
    print("loading", flush=True)
    time.sleep(60)
"""


def starting(*, with_parent: bool) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS % with_parent],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    return process


def test_a_process_that_is_loading_ends_at_once() -> None:
    process = starting(with_parent=False)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0 and errors == "stopping while it starts: SIGTERM\n"


def test_a_process_that_is_loading_ends_with_its_launcher() -> None:
    process = starting(with_parent=True)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0


def test_a_process_that_waits_for_something_outlives_its_launcher_by_five_seconds_at_most() -> None:
    code = (
        "import time; from headrace.connectors.lifetime import StopSignal\n"
        "StopSignal().listen(with_parent=True); print('waiting', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.stdin.close()
    process.stdin = None
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 1 and "after the launcher" in errors


def test_afterwards_a_request_is_only_noted() -> None:
    stop = StopSignal()
    with stop.at_once():
        pass
    stop.set("first")
    stop.set("second")
    assert stop.is_set() and stop.reason == "first"
