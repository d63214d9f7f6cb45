"""Waiting for the store."""

import threading

import pytest

from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import NoSuchKey, StoreUnavailable
from headrace.trainers.lanes import Stopped
from headrace.trainers.patience import patiently


def test_a_call_is_repeated_until_the_store_answers(capsys: pytest.CaptureFixture[str]) -> None:
    left = [2]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise StoreUnavailable("time-out")
        return "bytes"

    assert patiently(call, StopSignal()) == "bytes"
    assert capsys.readouterr().err.count("waiting for the object store: time-out") == 2


def test_other_errors_come_through_at_once() -> None:
    def call() -> None:
        raise NoSuchKey("gone")

    with pytest.raises(NoSuchKey):
        patiently(call, StopSignal())


def test_a_stop_ends_the_wait() -> None:
    stop = StopSignal()

    def call() -> None:
        raise StoreUnavailable("down")

    threading.Timer(0.2, lambda: stop.set("SIGTERM")).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        patiently(call, stop)
