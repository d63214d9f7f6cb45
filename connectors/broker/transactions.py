"""The transaction coordinator: ids, epochs, open transactions, and their atomic end.

A state machine with the states of KIP-98. Every step that a client may rely on is in the journal before it is
answered, so a killed broker goes on where it stood: open transactions stay open and their producers continue, and a
transaction whose end was decided (`prepare` in the journal) is completed at start: markers first, then offsets, then
`done`. Both are idempotent, so a kill between any two writes leaves all of a transaction or nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.journal import Fact, Journal
from headrace.connectors.broker.offsets import Committed, OffsetStore, Position
from headrace.connectors.broker.storage import Storage, StorageError

LONGEST_TIMEOUT_MS = 900_000
"""Largest transaction timeout a client may ask for (Kafka's transaction.max.timeout.ms)."""
_LAST_EPOCH = 32_766


class State(Enum):
    """Where a transactional id stands."""

    EMPTY = "empty"
    ONGOING = "ongoing"
    PREPARE_COMMIT = "prepare-commit"
    PREPARE_ABORT = "prepare-abort"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Markers(Protocol):
    """Writes transaction markers into partitions."""

    def write_marker(self, position: Position, producer_id: int, epoch: int, commit: bool) -> None:
        """End the producer's transaction in one partition, at most once; unknown partitions are ignored."""


@dataclass(slots=True)
class Transaction:
    """One transactional id with its current transaction."""

    producer_id: int
    epoch: int
    timeout_ms: int
    state: State = State.EMPTY
    started: float = 0.0
    partitions: set[Position] = field(default_factory=set)
    offsets: dict[str, dict[Position, Committed]] = field(default_factory=dict)


class TransactionCoordinator:
    """All transactional ids; times are seconds of one monotonic clock, passed in.

    Methods raise `BrokerError` with the code for the client; a refused journal write becomes COORDINATOR_NOT_AVAILABLE
    (the client repeats the call) and changes nothing.
    """

    def __init__(self, storage: Storage, markers: Markers, offsets: OffsetStore, now: float) -> None:
        self._markers = markers
        self._offsets = offsets
        self._ids: dict[str, Transaction] = {}
        self._by_producer: dict[int, Transaction] = {}
        self._next_producer = 1000
        self._journal = Journal(storage, "transactions.jsonl", self._snapshot)
        for fact in self._journal.replay():
            self._apply(fact, now)
        for transaction in self._ids.values():
            for group, entries in transaction.offsets.items():
                self._offsets.hold(group, entries, transaction.producer_id)

    # ---- journal

    def _snapshot(self) -> Iterable[Fact]:
        yield ["next", self._next_producer]
        for name, entry in self._ids.items():
            yield ["init", name, entry.producer_id, entry.epoch, entry.timeout_ms]
            if entry.state is State.EMPTY:
                continue
            if entry.partitions:
                yield ["parts", name, [list(position) for position in entry.partitions]]
            for group, rows in entry.offsets.items():
                yield ["offsets", name, group, [[*position, *row] for position, row in rows.items()]]
            if entry.state is not State.ONGOING:
                commit = entry.state in (State.PREPARE_COMMIT, State.COMMITTED)
                yield ["prepare", name, entry.epoch, commit]
            if entry.state in (State.COMMITTED, State.ABORTED):
                yield ["done", name]

    def _record(self, fact: Fact, now: float) -> None:
        try:
            self._journal.write(fact)
        except StorageError as error:
            raise BrokerError(Code.COORDINATOR_NOT_AVAILABLE, str(error)) from error
        self._apply(fact, now)

    def _apply(self, fact: Fact, now: float) -> None:
        kind, name, *rest = fact
        if kind == "next":
            self._next_producer = name
            return
        if kind == "init":
            producer_id, epoch, timeout_ms = rest
            old = self._ids.get(name)
            if old is not None:
                self._by_producer.pop(old.producer_id, None)
            entry = self._ids[name] = Transaction(producer_id, epoch, timeout_ms)
            self._by_producer[producer_id] = entry
            self._next_producer = max(self._next_producer, producer_id)
            return
        entry = self._ids[name]
        if kind == "parts":
            self._open(entry, now)
            entry.partitions.update((topic, partition) for topic, partition in rest[0])
        elif kind == "offsets":
            self._open(entry, now)
            group, rows = rest
            entries = entry.offsets.setdefault(group, {})
            for topic, partition, offset, epoch, metadata in rows:
                entries[topic, partition] = Committed(offset, epoch, metadata)
        elif kind == "prepare":
            entry.epoch, commit = rest
            entry.state = State.PREPARE_COMMIT if commit else State.PREPARE_ABORT
        elif kind == "done":
            entry.state = State.COMMITTED if entry.state is State.PREPARE_COMMIT else State.ABORTED
            entry.partitions = set()
            entry.offsets = {}

    @staticmethod
    def _open(entry: Transaction, now: float) -> None:
        if entry.state is not State.ONGOING:
            entry.state = State.ONGOING
            entry.started = now

    def compact_journal(self) -> None:
        """Rewrite the journal when it has grown out of proportion."""
        self._journal.rewrite_if_grown()

    # ---- requests

    def new_producer(self, now: float) -> tuple[int, int]:
        """(producer id, epoch 0) for a producer that is idempotent only."""
        self._record(["next", self._next_producer + 1], now)
        return self._next_producer, 0

    def init(self, name: str, timeout_ms: int, known: tuple[int, int] | None, now: float) -> tuple[int, int]:
        """InitProducerId: end what an earlier instance left open, fence it, and return (producer id, new epoch).

        `known` is the (producer id, epoch) of a producer that asks for a new epoch of its own (KIP-360).
        """
        if not name:
            raise BrokerError(Code.INVALID_REQUEST, "the transactional id is empty")
        if not 0 < timeout_ms <= LONGEST_TIMEOUT_MS:
            raise BrokerError(Code.INVALID_TRANSACTION_TIMEOUT, f"{timeout_ms} ms, at most {LONGEST_TIMEOUT_MS}")
        entry = self._ids.get(name)
        if entry is None:
            self._record(["init", name, self._next_producer + 1, 0, timeout_ms], now)
            return self._next_producer, 0
        if known is not None and known != (entry.producer_id, entry.epoch):
            raise BrokerError(Code.PRODUCER_FENCED, f"{name} belongs to epoch {entry.epoch}")
        if entry.state in (State.PREPARE_COMMIT, State.PREPARE_ABORT) and not self._complete(name, entry, now):
            raise BrokerError(Code.CONCURRENT_TRANSACTIONS, f"{name}: its last transaction is being completed")
        epoch = entry.epoch + 1
        if entry.state is State.ONGOING and not self._end(name, entry, epoch, False, now):
            raise BrokerError(Code.CONCURRENT_TRANSACTIONS, f"{name}: its last transaction is being aborted")
        producer_id = entry.producer_id
        if epoch > _LAST_EPOCH:
            producer_id, epoch = self._next_producer + 1, 0
        self._record(["init", name, producer_id, epoch, timeout_ms], now)
        return producer_id, epoch

    def _current(self, name: str, producer_id: int, epoch: int) -> Transaction:
        """The id's entry, if the caller is its current producer."""
        entry = self._ids.get(name)
        if entry is None or entry.producer_id != producer_id:
            raise BrokerError(Code.INVALID_PRODUCER_ID_MAPPING, f"{name} is not producer {producer_id}")
        if entry.epoch != epoch:
            raise BrokerError(Code.PRODUCER_FENCED, f"{name} has epoch {entry.epoch}, the request {epoch}")
        return entry

    def _usable(self, name: str, producer_id: int, epoch: int) -> Transaction:
        entry = self._current(name, producer_id, epoch)
        if entry.state in (State.PREPARE_COMMIT, State.PREPARE_ABORT):
            raise BrokerError(Code.CONCURRENT_TRANSACTIONS, f"{name}: its last transaction is being completed")
        return entry

    def add_partitions(
        self, name: str, producer_id: int, epoch: int, positions: Iterable[Position], now: float
    ) -> None:
        """Make partitions part of the transaction, opening it with the first."""
        entry = self._usable(name, producer_id, epoch)
        fresh = [position for position in positions if position not in entry.partitions]
        if fresh or entry.state is not State.ONGOING:
            self._record(["parts", name, [list(position) for position in fresh]], now)

    def add_group(self, name: str, producer_id: int, epoch: int, group: str, now: float) -> None:
        """Announce that offsets of `group` will be part of the transaction."""
        entry = self._usable(name, producer_id, epoch)
        if group not in entry.offsets:
            self._record(["offsets", name, group, []], now)

    def add_offsets(
        self,
        name: str,
        producer_id: int,
        epoch: int,
        group: str,
        entries: Mapping[Position, Committed],
        now: float,
    ) -> None:
        """Put offsets of a group into the transaction; they count when it commits."""
        self._usable(name, producer_id, epoch)
        rows = [[*position, *entry] for position, entry in entries.items()]
        self._record(["offsets", name, group, rows], now)
        self._offsets.hold(group, entries, producer_id)

    def check_produce(self, name: str | None, producer_id: int, epoch: int, position: Position) -> None:
        """Whether a transactional batch may be written: current producer, partition added, transaction open."""
        entry = self._by_producer.get(producer_id)
        if entry is None or (name is not None and self._ids.get(name) is not entry):
            raise BrokerError(Code.INVALID_PRODUCER_ID_MAPPING, f"no transactional id has producer {producer_id}")
        if entry.epoch != epoch:
            raise BrokerError(Code.INVALID_PRODUCER_EPOCH, f"producer {producer_id} has epoch {entry.epoch}")
        if entry.state is not State.ONGOING or position not in entry.partitions:
            raise BrokerError(Code.INVALID_TXN_STATE, f"{position[0]}[{position[1]}] is not part of a transaction")

    def end(self, name: str, producer_id: int, epoch: int, commit: bool, now: float) -> None:
        """EndTxn: decide, then write markers and offsets. A repeat of the last end is answered as before."""
        entry = self._usable(name, producer_id, epoch)
        if entry.state is (State.COMMITTED if commit else State.ABORTED):
            return
        if entry.state is not State.ONGOING:
            raise BrokerError(Code.INVALID_TXN_STATE, f"{name} has no open transaction ({entry.state.value})")
        self._end(name, entry, epoch, commit, now)

    def _end(self, name: str, entry: Transaction, epoch: int, commit: bool, now: float) -> bool:
        self._record(["prepare", name, epoch, commit], now)
        return self._complete(name, entry, now)

    def _complete(self, name: str, entry: Transaction, now: float) -> bool:
        """Carry out a decision; false when the disk refused a part of it (`tick` tries again)."""
        commit = entry.state is State.PREPARE_COMMIT
        try:
            for position in sorted(entry.partitions):
                self._markers.write_marker(position, entry.producer_id, entry.epoch, commit)
            if commit:
                for group, rows in entry.offsets.items():
                    if rows:
                        self._offsets.commit(group, rows)
            held = entry.offsets
            self._record(["done", name], now)
        except (StorageError, BrokerError):
            return False
        for group, rows in held.items():
            self._offsets.release(group, rows, entry.producer_id)
        return True

    # ---- time

    def finish_decided(self, now: float) -> None:
        """Complete every transaction whose end was decided but not carried out."""
        for name, entry in self._ids.items():
            if entry.state in (State.PREPARE_COMMIT, State.PREPARE_ABORT):
                self._complete(name, entry, now)

    def tick(self, now: float) -> list[str]:
        """Abort transactions older than their timeout, with a new epoch so that their producers are told.

        Returns the ids aborted.
        """
        expired = []
        for name, entry in self._ids.items():
            if entry.state is State.ONGOING and now - entry.started > entry.timeout_ms / 1000:
                try:
                    self._end(name, entry, entry.epoch + 1, False, now)
                except BrokerError:
                    continue
                expired.append(name)
        self.finish_decided(now)
        return expired

    def open_producers(self) -> set[int]:
        """Producer ids with an open or undecided transaction."""
        ended = (State.EMPTY, State.COMMITTED, State.ABORTED)
        return {entry.producer_id for entry in self._ids.values() if entry.state not in ended}
