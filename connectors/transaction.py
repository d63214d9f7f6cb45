"""One transactional producer and its rules: begin lazily, repeat what is retriable, abort, or declare it lost.

Every error of the client ends as one of three: the same call again, ``TransactionAborted`` (the transaction is undone,
the producer lives) or ``ProducerLost`` (it has many faces; the worker then makes a new producer); but a record that its
topic does not take is a ConfigurationError. A watchdog ends the process when a single call hangs (protocol 7).
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import count
from typing import Any, NoReturn

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace.connectors.kafka import MAX_MESSAGE_BYTES, Producer
from headrace.connectors.kafka_errors import error_of
from headrace.schemas.errors import ConfigurationError

__all__ = ("CALL_SECONDS", "Face", "ProducerLost", "Transaction", "TransactionAborted", "Watchdog", "face_of")

log = logging.getLogger(__name__)

TRANSACTION_TIMEOUT_MS = 10_000
"""After so long a broker aborts an open transaction by itself."""
SLOW_SECONDS = 2.0
"""A transactional call that took longer is worth a line in the log."""
PATIENT_CALLS = 3
"""A call is repeated so often before the producer is given up, as long as the broker answers others."""
CALL_SECONDS = 10.0
"""Time that one transactional call may take before it is repeated."""


class TransactionAborted(Exception):
    """The transaction was undone; inputs are to be read again from the committed positions."""

    def __init__(self, reason: str, *, membership: bool = False, topics: bool = False) -> None:
        super().__init__(reason)
        self.membership = membership
        """True when the group does not know this member (any more): its tasks may belong to another."""
        self.topics = topics
        """True when the cluster does not know a topic: it starts, or somebody has deleted one."""


class ProducerLost(Exception):
    """The producer is of no use: fenced, fatal, or in a state that only a new one cures."""


class Face(Enum):
    """What an error of a transactional call asks for."""

    AGAIN = "again"
    ABORT = "abort"
    LOST = "lost"


_LOST = frozenset(
    {
        KafkaError._FENCED,
        KafkaError._FATAL,
        KafkaError._STATE,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
    }
)
_MEMBERSHIP = frozenset(
    {
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.FENCED_INSTANCE_ID,
    }
)
_TOPICS = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})


def face_of(error: KafkaError) -> Face:
    """Sort an error of a transactional call (protocol 7)."""
    if error.fatal() or error.code() in _LOST:
        return Face.LOST
    if error.txn_requires_abort():
        return Face.ABORT
    if error.retriable() or error.code() == KafkaError._TIMED_OUT:
        return Face.AGAIN
    return Face.ABORT


class Watchdog:
    """Ends the process when one call of any worker lasts longer than the limit although the broker answers.

    One thread for all workers. While ``reachable`` says that there is no broker, the time of a call starts anew: an
    outage ends nobody.
    """

    def __init__(self, reachable: Callable[[], bool], limit_seconds: float = 3 * TRANSACTION_TIMEOUT_MS / 1000) -> None:
        self.reachable = reachable
        """Asks whether a broker answers."""
        self._limit = limit_seconds
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[float, str]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Time the calls inside the block."""
        me, began = threading.get_ident(), time.monotonic()
        with self._lock:
            self._calls[me] = (began, what)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop(me, None)
            if time.monotonic() - began > SLOW_SECONDS:
                log.warning("%s took %.1f s", what, time.monotonic() - began)

    def overdue(self) -> str | None:
        """A call that has hung for longer than the limit, in words; asks for the broker when one is slow."""
        now = time.monotonic()
        with self._lock:
            slow = [(since, what) for since, what in self._calls.values() if now - since > self._limit / 3]
        if not slow:
            return None
        if not self.reachable():
            with self._lock:
                self._calls = {thread: (time.monotonic(), what) for thread, (_, what) in self._calls.items()}
            return None
        since, what = min(slow)
        return f"{what} has hung for {now - since:.0f} s" if now - since > self._limit else None

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, self._limit / 4))
            hung = self.overdue()
            if hung is not None:
                sys.stderr.write(f"watchdog: {hung}; ending the process, a restart goes on from the last commit\n")
                sys.stderr.flush()
                os._exit(1)


class Transaction:
    """The current transaction of a worker; ``stopping`` lets endless repeats end when the process must stop."""

    def __init__(self, producer: Producer, watchdog: Watchdog, stopping: Callable[[], bool]) -> None:
        self._producer = producer
        self._watchdog = watchdog
        self._stopping = stopping
        self.open = False
        self.records = 0
        self.bytes = 0
        self.began = 0.0
        """When the transaction began, by the monotonic clock."""
        self.last_commit_seconds = 0.0

    def initialise(self) -> None:
        """``init_transactions``: fences a predecessor and ends what it left open. Raises ProducerLost."""
        try:
            self._repeat("init_transactions", self._producer.init_transactions, CALL_SECONDS)
        except TransactionAborted as error:
            raise ProducerLost(str(error)) from error

    def begin(self) -> None:
        """Begin unless one is open. Raises ProducerLost."""
        if not self.open:
            self._once("begin_transaction", self._producer.begin_transaction)
            self.open = True
            self.records = self.bytes = 0
            self.began = time.monotonic()

    def produce(
        self,
        topic: str,
        value: bytes | None,
        partition: int,
        key: bytes | None = None,
        headers: list[tuple[str, bytes | None]] | None = None,
    ) -> None:
        """Add one record (topic with the run's prefix), beginning the transaction if need be.

        Raises TransactionAborted, ProducerLost.
        """
        if not self.open:
            self.begin()
        while True:
            try:
                self._producer.produce(topic, value, key, partition, headers=headers)  # type: ignore[arg-type]
                break
            except BufferError:
                self._producer.poll(0.05)
            except KafkaException as error:
                self._raise(f"produce to {topic}[{partition}]", error)
        self.records += 1
        self.bytes += len(value or b"")
        if self.records % 256 == 0:
            self._producer.poll(0)

    def commit(self, offsets: Sequence[TopicPartition], group: Any) -> None:
        """Send the offsets with the group's metadata and commit. Raises TransactionAborted, ProducerLost."""
        start = time.monotonic()
        self.begin()
        if offsets:
            self._send_offsets(offsets, group)
        self._repeat("commit_transaction", self._producer.commit_transaction, CALL_SECONDS)
        self.open = False
        self.last_commit_seconds = time.monotonic() - start

    def abort(self) -> None:
        """Undo the open transaction, if any. Raises ProducerLost when even that fails."""
        if not self.open:
            return
        self.open = False
        try:
            self._repeat("abort_transaction", self._producer.abort_transaction, CALL_SECONDS)
        except TransactionAborted as error:
            raise ProducerLost(f"the abort failed: {error}") from error

    def discard(self) -> None:
        """Let the producer go without waiting for what it still holds."""
        self.open = False
        self._producer.purge()

    def sweep(self, places: Sequence[tuple[str, int]], offset: TopicPartition, group: Any) -> None:
        """One record to each output partition and one offset, then abort.

        Ends what a broker killed with -9 forgot to abort for this id. Raises TransactionAborted when the sweep has to
        be made again, ProducerLost.
        """
        for topic, partition in places:
            self.produce(topic, b"", partition, SWEEP_KEY, [("hr-record", SWEEP_RECORD)])
        self._send_offsets([offset], group)
        try:
            left = self._producer.flush(CALL_SECONDS)
        except KafkaException as error:  # a sweep that took longer than the transaction timeout is fenced by it
            self._raise("flush of the sweep", error)
        if left:
            self.abort()
            raise TransactionAborted("the sweep's records are not acknowledged")
        self.abort()

    def _send_offsets(self, offsets: Sequence[TopicPartition], group: Any) -> None:
        send = self._producer.send_offsets_to_transaction
        self._repeat("send_offsets_to_transaction", send, list(offsets), group, CALL_SECONDS)

    def _once(self, what: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            with self._watchdog.watch(what):
                call(*arguments)
        except KafkaException as error:
            self._raise(what, error)

    def _repeat(self, what: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Call until it succeeds; a retriable error is answered by the same call, never by another.

        A call that gets nowhere although the broker answers ends as ProducerLost: its outcome is read from the log.
        """
        for attempt in count(1):
            try:
                with self._watchdog.watch(what):
                    call(*arguments)
                return
            except KafkaException as error:
                inner = error_of(error)
                if face_of(inner) is not Face.AGAIN:
                    self._raise(what, error)
                log.info("%s: %s; again", what, inner.str())
                if self._stopping():
                    raise ProducerLost(f"stopped while waiting for {what}: {inner.str()}") from error
                if attempt >= PATIENT_CALLS and self._watchdog.reachable():
                    raise ProducerLost(f"{what} failed {attempt} times: {inner.str()}") from error

    def _raise(self, what: str, error: KafkaException) -> NoReturn:
        inner = error_of(error)
        reason = f"{what}: {inner.name()}: {inner.str()}"
        if face_of(inner) is Face.LOST:
            raise ProducerLost(reason) from error
        self.abort()
        if inner.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            raise ConfigurationError(
                f"{reason}. Trying again would not help: raise max.message.bytes of the topic (a run's topics need "
                f"{MAX_MESSAGE_BYTES}), or let what is large go to the object store (rollout.offload_bytes)"
            ) from error
        known = {"membership": inner.code() in _MEMBERSHIP, "topics": inner.code() in _TOPICS}
        raise TransactionAborted(reason, **known) from error


SWEEP_KEY = b"\x00sweep"
"""Key of the records that a sweep writes and aborts; no store entry has it."""
SWEEP_RECORD = b"sweep"
"""Their ``hr-record`` header, by which a reader would skip one."""
