"""The broker without sockets: topics, groups, offsets and transactions put together, and the work that time brings.

Everything is a state machine driven from outside: requests come through `api`, time through `tick`. Two clocks are
passed in, monotonic seconds for sessions and timeouts and wall-clock milliseconds for record timestamps, so the same
object runs under a server or in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from headrace.connectors.broker.compaction import Compaction, urgency
from headrace.connectors.broker.fetching import WaitingFetches
from headrace.connectors.broker.group_journal import GroupJournal
from headrace.connectors.broker.groups import GroupCoordinator
from headrace.connectors.broker.kept_index import KeptLog
from headrace.connectors.broker.offsets import OffsetStore, Position
from headrace.connectors.broker.storage import Storage, StorageError
from headrace.connectors.broker.topics import Topics
from headrace.connectors.broker.transactions import TransactionCoordinator

RETENTION_INTERVAL = 1.0
"""Seconds between two looks at retention and journal sizes."""


@dataclass(frozen=True, slots=True)
class Times:
    """The two clocks at one moment: monotonic seconds and wall-clock milliseconds."""

    now: float
    wall_ms: int


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What the operator may choose; `host` and `port` are what clients are told to connect to."""

    host: str = "127.0.0.1"
    port: int = 9092
    auto_create: bool = True
    default_partitions: int = 4
    first_join_delay: float = 0.1


class Broker:
    """One node. `kept` is what a clean stop has left of its logs (`kept_index`), None after any other end.

    `log_error` gets a line for each thing that housekeeping could not do.
    """

    def __init__(
        self,
        storage: Storage,
        options: BrokerOptions,
        times: Times,
        kept: Mapping[str, KeptLog] | None = None,
        log_error: Callable[[str], None] = print,
    ) -> None:
        self.options = options
        self.topics = Topics(storage, kept is None, options.default_partitions, kept)
        self.offsets = OffsetStore(storage)
        self._group_journal = GroupJournal(storage, times.now)
        self.groups = GroupCoordinator(options.first_join_delay, self._group_journal.groups, self._group_journal)
        self.waiting = WaitingFetches()
        self.times = times
        self._log_error = log_error
        self.transactions = TransactionCoordinator(storage, self, self.offsets, times.now)
        self.transactions.finish_decided(times.now)
        self._abort_orphans()
        self._next_retention = times.now
        self._pass: Iterator[None] | None = None

    def _abort_orphans(self) -> None:
        """End open transactions in logs that the coordinator does not know, or the last stable offset would stay."""
        known = self.transactions.open_producers()
        for _, _, log in self.topics.logs():
            for producer_id in [p for p in log.open_transactions if p not in known]:
                log.append_marker(producer_id, 32767, False, self.times.wall_ms)

    def write_marker(self, position: Position, producer_id: int, epoch: int, commit: bool) -> None:
        """See `transactions.Markers`."""
        log = self.topics.log(*position)
        if log is not None:
            log.append_marker(producer_id, epoch, commit, self.times.wall_ms)

    def tick(self, times: Times) -> None:
        """Let time pass: sessions, transaction timeouts, waiting fetches, retention, journals."""
        self.times = times
        self.groups.tick(times.now)
        self.transactions.tick(times.now)
        if times.now >= self._next_retention:
            self._next_retention = times.now + RETENTION_INTERVAL
            self._retain(times.wall_ms)

    def housekeep(self) -> bool:
        """Do one small step of compaction if a pass is under way; returns whether there is more to do."""
        if self._pass is None:
            return False
        try:
            next(self._pass)
        except StopIteration:
            self._pass = None
        except StorageError as error:
            self._log_error(f"compaction waits for disk space: {error}")
            self._pass = None
        return self._pass is not None

    def _next_pass(self, wall_ms: int) -> Iterator[None] | None:
        """The pass that is most due, None when none is."""
        due = [(urgency(log, wall_ms), topic, partition, log) for topic, partition, log in self.topics.logs()]
        most = max(due, key=lambda entry: entry[0], default=None)
        if most is None or most[0] == 0.0:
            return None
        _, topic, partition, log = most

        def compact() -> Iterator[None]:
            compaction = Compaction(log, topic.cleanings.get(partition, []), wall_ms)
            passed = compaction.passed()
            yield from compaction.steps()
            if not log.deleted:
                self.topics.note_cleaning(topic, partition, passed)

        return compact()

    def _retain(self, wall_ms: int) -> None:
        if self._pass is None:
            self._pass = self._next_pass(wall_ms)
        try:
            for _, _, log in self.topics.logs():
                log.enforce_retention(wall_ms)
            self._group_journal.compact()
            self.offsets.compact_journal()
            self.transactions.compact_journal()
            self.topics.compact_journal()
        except StorageError as error:
            self._log_error(f"housekeeping waits for disk space: {error}")
