"""One transaction under faults that no broker makes on demand: repeat, abort, or declare the producer lost.

The producer here is a script of what the client would raise; the rules above it are the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace.connectors.transaction import (
    PATIENT_CALLS,
    SWEEP_KEY,
    ProducerLost,
    Transaction,
    TransactionAborted,
    Watchdog,
)
from headrace.schemas.errors import ConfigurationError

AGAIN = KafkaError(KafkaError._TIMED_OUT, "slow", False, True)
ABORT = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "no", False, False, True)
MEMBER = KafkaError(KafkaError.ILLEGAL_GENERATION, "rebalanced", False, False, True)
FENCED = KafkaError(KafkaError._FENCED, "fenced", True)
STATE = KafkaError(KafkaError._STATE, "wrong state")


class Script:
    """A producer whose calls raise, in order, what they are told to; `calls` has their names."""

    def __init__(self, **faults: list[Exception | KafkaError]) -> None:
        self.faults = {name: deque(errors) for name, errors in faults.items()}
        self.calls: list[str] = []
        self.sent: list[tuple[str, bytes | None, bytes | None, int]] = []
        self.left = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        queue = self.faults.get(name)
        if queue:
            error = queue.popleft()
            raise KafkaException(error) if isinstance(error, KafkaError) else error

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self._call(name)

    def produce(self, topic: str, value: bytes | None, key: bytes | None, partition: int, headers: Any) -> None:
        self._call("produce")
        self.sent.append((topic, value, key, partition))

    def flush(self, timeout: float) -> int:
        self._call("flush")
        return self.left


def _transaction(script: Script, reachable: bool = True, stopping: bool = False) -> Transaction:
    watchdog = Watchdog(lambda: reachable, limit_seconds=600)
    return Transaction(script, watchdog, lambda: stopping)  # type: ignore[arg-type]


POSITION = [TopicPartition("in", 0, 7)]


def test_it_begins_with_the_first_record_and_ends_with_the_commit() -> None:
    script = Script()
    transaction = _transaction(script)
    assert not transaction.open
    transaction.produce("out", b"12345", 3, b"k")
    transaction.produce("out", None, 4)
    assert (transaction.open, transaction.records, transaction.bytes) == (True, 2, 5)
    transaction.commit(POSITION, "metadata")
    assert not transaction.open
    assert script.calls == [
        "begin_transaction", "produce", "produce", "send_offsets_to_transaction", "commit_transaction",
    ]  # fmt: skip
    assert script.sent == [("out", b"12345", b"k", 3), ("out", None, None, 4)]
    transaction.begin()
    assert (transaction.records, transaction.bytes) == (0, 0), "counted for each transaction"


def test_a_commit_of_offsets_alone_is_a_transaction_and_of_nothing_sends_no_offsets() -> None:
    script = Script()
    _transaction(script).commit(POSITION, "metadata")
    _transaction(script).commit([], None)
    assert script.calls.count("send_offsets_to_transaction") == 1
    assert script.calls.count("begin_transaction") == script.calls.count("commit_transaction") == 2


@pytest.mark.parametrize("call", ["send_offsets_to_transaction", "commit_transaction"])
def test_a_retriable_error_is_answered_by_the_same_call(call: str) -> None:
    script = Script(**{call: [AGAIN, AGAIN]})
    transaction = _transaction(script, reachable=False)
    transaction.commit(POSITION, "metadata")
    assert script.calls.count(call) == 3
    assert "abort_transaction" not in script.calls
    assert not transaction.open


def test_while_no_broker_answers_patience_has_no_end() -> None:
    script = Script(commit_transaction=[AGAIN] * 50)
    _transaction(script, reachable=False).commit([], None)
    assert script.calls.count("commit_transaction") == 51


def test_a_call_that_gets_nowhere_although_the_broker_answers_loses_the_producer() -> None:
    script = Script(commit_transaction=[AGAIN] * 50)
    transaction = _transaction(script, reachable=True)
    with pytest.raises(ProducerLost, match=f"commit_transaction failed {PATIENT_CALLS} times: slow"):
        transaction.commit([], None)
    assert script.calls.count("commit_transaction") == PATIENT_CALLS


def test_a_process_that_must_stop_waits_for_no_broker() -> None:
    script = Script(commit_transaction=[AGAIN] * 50)
    with pytest.raises(ProducerLost, match="stopped while waiting for commit_transaction"):
        _transaction(script, reachable=False, stopping=True).commit([], None)
    assert script.calls.count("commit_transaction") == 1


@pytest.mark.parametrize(("error", "membership"), [(ABORT, False), (MEMBER, True)])
@pytest.mark.parametrize("call", ["produce", "send_offsets_to_transaction", "commit_transaction"])
def test_an_abortable_error_is_undone_and_says_whether_the_member_is_out(
    call: str, error: KafkaError, membership: bool
) -> None:
    script = Script(**{call: [error]})
    transaction = _transaction(script)
    with pytest.raises(TransactionAborted, match=call) as caught:
        transaction.produce("out", b"x", 0)
        transaction.commit(POSITION, "metadata")
    assert caught.value.membership is membership
    assert script.calls[-1] == "abort_transaction"
    assert not transaction.open


@pytest.mark.parametrize("call", ["produce", "commit_transaction"])
def test_a_record_that_the_topic_does_not_take_is_for_a_person_and_not_for_another_try(call: str) -> None:
    script = Script(**{call: [KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large", False, False, True)]})
    transaction = _transaction(script)
    with pytest.raises(ConfigurationError, match=r"MSG_SIZE_TOO_LARGE: too large.*max\.message\.bytes"):
        transaction.produce("out", b"1", 0)
        transaction.commit(POSITION, "metadata")
    assert (script.calls[-1], transaction.open) == ("abort_transaction", False)


@pytest.mark.parametrize("error", [FENCED, STATE])
@pytest.mark.parametrize("call", ["begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction"])
def test_a_lost_producer_is_told_at_every_call_and_nothing_is_aborted(call: str, error: KafkaError) -> None:
    script = Script(**{call: [error]})
    transaction = _transaction(script)
    with pytest.raises(ProducerLost, match=call):
        transaction.produce("out", b"x", 0)
        transaction.commit(POSITION, "metadata")
    assert "abort_transaction" not in script.calls


@pytest.mark.parametrize("error", [ABORT, FENCED])
def test_an_abort_that_fails_loses_the_producer(error: KafkaError) -> None:
    script = Script(abort_transaction=[error])
    transaction = _transaction(script)
    transaction.begin()
    with pytest.raises(ProducerLost):
        transaction.abort()
    transaction.abort()
    assert script.calls.count("abort_transaction") == 1, "nothing is open any more"


@pytest.mark.parametrize("error", [ABORT, FENCED])
def test_a_producer_that_cannot_be_initialised_is_lost(error: KafkaError) -> None:
    script = Script(init_transactions=[AGAIN, error])
    with pytest.raises(ProducerLost, match="init_transactions"):
        _transaction(script).initialise()
    assert script.calls.count("init_transactions") == 2


def test_a_full_queue_is_waited_for_and_the_record_counted_once() -> None:
    script = Script(produce=[BufferError("full"), BufferError("full")])
    transaction = _transaction(script)
    transaction.produce("out", b"abc", 0)
    assert script.calls == ["begin_transaction", "produce", "poll", "produce", "poll", "produce"]
    assert (transaction.records, transaction.bytes, len(script.sent)) == (1, 3, 1)


def test_deliveries_are_served_every_256_records() -> None:
    script = Script()
    transaction = _transaction(script)
    for _ in range(600):
        transaction.produce("out", b"", 0)
    assert script.calls.count("poll") == 2


def test_a_sweep_touches_every_output_once_and_aborts() -> None:
    script = Script()
    transaction = _transaction(script)
    transaction.sweep([("a", 0), ("a", 1), ("b", 0)], POSITION[0], "metadata")
    assert script.sent == [("a", b"", SWEEP_KEY, 0), ("a", b"", SWEEP_KEY, 1), ("b", b"", SWEEP_KEY, 0)]
    assert script.calls[-3:] == ["send_offsets_to_transaction", "flush", "abort_transaction"]
    assert "commit_transaction" not in script.calls
    assert not transaction.open


def test_a_sweep_that_is_not_acknowledged_has_to_be_made_again() -> None:
    script = Script()
    script.left = 2
    transaction = _transaction(script)
    with pytest.raises(TransactionAborted, match="not acknowledged"):
        transaction.sweep([("a", 0)], POSITION[0], "metadata")
    assert script.calls[-1] == "abort_transaction"
    assert not transaction.open


def test_a_sweep_that_outlives_the_transaction_timeout_loses_the_producer() -> None:
    """On a slow broker its own coordinator fences it; the client says so at the flush."""
    script = Script(flush=[FENCED])
    transaction = _transaction(script)
    with pytest.raises(ProducerLost, match="flush of the sweep: _FENCED"):
        transaction.sweep([("a", 0)], POSITION[0], "metadata")
    assert "abort_transaction" not in script.calls


def test_a_discarded_producer_is_purged_and_not_waited_for() -> None:
    script = Script()
    transaction = _transaction(script)
    transaction.produce("out", b"x", 0)
    transaction.discard()
    assert script.calls[-1] == "purge"
    assert not transaction.open


def test_what_is_no_kafka_error_is_nobodys_to_sort() -> None:
    script = Script(commit_transaction=[ValueError("a bug")])
    with pytest.raises(ValueError, match="a bug"):
        _transaction(script).commit([], None)
