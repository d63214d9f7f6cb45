"""Faces of errors, and the watchdog."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka import KafkaError

from headrace.connectors.transaction import Face, Watchdog, face_of


@pytest.mark.parametrize(
    ("error", "face"),
    [
        (KafkaError(KafkaError._TIMED_OUT, "", False, True), Face.AGAIN),
        (KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, "", False, True), Face.AGAIN),
        (KafkaError(KafkaError._INCONSISTENT, "", False, False, True), Face.ABORT),
        (KafkaError(KafkaError.ILLEGAL_GENERATION, "", False, False, True), Face.ABORT),
        (KafkaError(KafkaError._FENCED, "", True), Face.LOST),
        (KafkaError(KafkaError._FENCED), Face.LOST),
        (KafkaError(KafkaError.INVALID_TXN_STATE, "", True), Face.LOST),
        (KafkaError(KafkaError._STATE), Face.LOST),
    ],
)
def test_every_error_of_a_transactional_call_has_a_face(error: KafkaError, face: Face) -> None:
    assert face_of(error) is face


def test_the_watchdog_names_a_call_that_hangs_while_the_broker_answers() -> None:
    watchdog = Watchdog(lambda: True, limit_seconds=60)
    with watchdog.watch("commit_transaction"):
        assert watchdog.overdue() is None
        watchdog._limit = 0.05
        time.sleep(0.1)
        hung = watchdog.overdue()
    assert hung is not None
    assert "commit_transaction" in hung
    assert watchdog.overdue() is None


def test_time_without_a_broker_does_not_count() -> None:
    answers = [False]
    watchdog = Watchdog(lambda: answers[0], limit_seconds=0.3)
    done = threading.Event()

    def hang() -> None:
        with watchdog.watch("commit_transaction"):
            done.wait(5)

    watchdog._thread = threading.current_thread()
    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.4)
    assert watchdog.overdue() is None
    answers[0] = True
    assert watchdog.overdue() is None, "the outage has just ended"
    time.sleep(0.4)
    assert watchdog.overdue() is not None
    done.set()
    thread.join()
