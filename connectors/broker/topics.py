"""Topics of the broker: names, partition counts, settings and the logs behind them.

One journal holds what cannot be rebuilt from the logs: the list of topics, their settings, start offsets set by
`delete_records`, and when compaction first passed an offset. A topic's folder is removed after the journal says that it
is gone; folders of unknown topics are removed at start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from headrace.connectors.broker import settings
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.journal import Fact, Journal
from headrace.connectors.broker.kept_index import KeptLog
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.offsets import Position
from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import Storage, StorageError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_MOST_PARTITIONS = 10_000
FOLDER = "topics"
Cleanings = list[tuple[int, int]]
"""(offset, wall-clock ms): compaction had passed `offset` for the first time then; ascending."""


@dataclass(slots=True)
class Topic:
    """One topic; `given` are the settings that differ from the defaults."""

    name: str
    given: dict[str, str]
    logs: list[PartitionLog] = field(default_factory=list)
    cleanings: dict[int, Cleanings] = field(default_factory=dict)


class Topics:
    """All topics; changes are in the journal when a method returns.

    Methods raise `BrokerError` with the code for the client. `verify_tail` checks last batches after an unclean stop;
    `kept` is what a clean one has left, by folder of the partition.
    """

    def __init__(
        self,
        storage: Storage,
        verify_tail: bool = True,
        default_partitions: int = 4,
        kept: Mapping[str, KeptLog] | None = None,
    ) -> None:
        self._storage = storage
        self._topics: dict[str, Topic] = {}
        self.default_partitions = default_partitions
        self._journal = Journal(storage, "topics.jsonl", self._snapshot, minimum=2_000)
        counts: dict[str, int] = {}
        starts: dict[Position, int] = {}
        for fact in self._journal.replay():
            self._replay(fact, counts, starts)
        for name in storage.names(FOLDER):
            if name not in self._topics:
                storage.remove_folder(f"{FOLDER}/{name}")
        for topic in self._topics.values():
            for partition in range(counts[topic.name]):
                start = starts.get((topic.name, partition), 0)
                known = (kept or {}).get(_folder(topic.name, partition))
                self._open(topic, partition, start, verify_tail, known)

    def _replay(self, fact: Fact, counts: dict[str, int], starts: dict[Position, int]) -> None:
        kind, name, *rest = fact
        if kind == "create":
            counts[name], given = rest
            self._topics[name] = Topic(name, given)
            for position in [position for position in starts if position[0] == name]:
                del starts[position]
        elif name not in self._topics:
            return
        elif kind == "delete":
            del self._topics[name]
        elif kind == "partitions":
            counts[name] = rest[0]
        elif kind == "settings":
            self._topics[name].given = rest[0]
        elif kind == "start":
            starts[name, rest[0]] = rest[1]
        elif kind == "cleaned":
            self._topics[name].cleanings[rest[0]] = [(offset, at) for offset, at in rest[1]]

    def _snapshot(self) -> Iterable[Fact]:
        for topic in self._topics.values():
            yield ["create", topic.name, len(topic.logs), topic.given]
            for partition, log in enumerate(topic.logs):
                if log.start:
                    yield ["start", topic.name, partition, log.start]
            for partition, cleanings in topic.cleanings.items():
                yield ["cleaned", topic.name, partition, cleanings]

    def _open(self, topic: Topic, partition: int, start: int, verify_tail: bool, kept: KeptLog | None = None) -> None:
        folder, given = _folder(topic.name, partition), TopicSettings.of(topic.given)
        topic.logs.append(PartitionLog(self._storage, folder, given, start, verify_tail, kept))

    def _record(self, fact: Fact) -> None:
        try:
            self._journal.write(fact)
        except StorageError as error:
            raise BrokerError(Code.KAFKA_STORAGE_ERROR, str(error)) from error

    # ---- looking up

    def __contains__(self, name: str) -> bool:
        return name in self._topics

    def names(self) -> list[str]:
        """All topics."""
        return list(self._topics)

    def get(self, name: str) -> Topic | None:
        """A topic, None when there is none of this name."""
        return self._topics.get(name)

    def log(self, name: str, partition: int) -> PartitionLog | None:
        """The log of a partition, None when there is no such partition."""
        topic = self._topics.get(name)
        if topic is None or not 0 <= partition < len(topic.logs):
            return None
        return topic.logs[partition]

    def logs(self) -> Iterator[tuple[Topic, int, PartitionLog]]:
        """Every partition."""
        for topic in list(self._topics.values()):
            for partition, log in enumerate(topic.logs):
                yield topic, partition, log

    # ---- changing

    def check_new(self, name: str, partitions: int, given: Mapping[str, str | None]) -> None:
        """Raise `BrokerError` when this topic cannot be created."""
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise BrokerError(Code.INVALID_TOPIC_EXCEPTION, f"{name!r}: letters, digits, '.', '_', '-', at most 249")
        if name in self._topics:
            raise BrokerError(Code.TOPIC_ALREADY_EXISTS, f"topic {name} exists")
        if not 1 <= partitions <= _MOST_PARTITIONS:
            raise BrokerError(Code.INVALID_PARTITIONS, f"{partitions} partitions, at most {_MOST_PARTITIONS}")
        for key, value in given.items():
            settings.check(key, value)

    def create(self, name: str, partitions: int, given: Mapping[str, str]) -> Topic:
        """Create a topic."""
        self.check_new(name, partitions, given)
        self._record(["create", name, partitions, dict(given)])
        topic = self._topics[name] = Topic(name, dict(given))
        for partition in range(partitions):
            self._open(topic, partition, 0, False)
        return topic

    def delete(self, name: str) -> None:
        """Delete a topic and its data."""
        if name not in self._topics:
            raise BrokerError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {name}")
        self._record(["delete", name])
        topic = self._topics.pop(name)
        self._storage.remove_folder(f"{FOLDER}/{name}")
        for log in topic.logs:
            log.deleted = True
            for watcher in tuple(log.watchers):
                watcher.changed(log)

    def add_partitions(self, name: str, count: int, dry_run: bool) -> None:
        """Raise the number of partitions to `count`."""
        topic = self._topics.get(name)
        if topic is None:
            raise BrokerError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {name}")
        if not len(topic.logs) < count <= _MOST_PARTITIONS:
            raise BrokerError(Code.INVALID_PARTITIONS, f"{name} has {len(topic.logs)} partitions, asked for {count}")
        if dry_run:
            return
        self._record(["partitions", name, count])
        for partition in range(len(topic.logs), count):
            self._open(topic, partition, 0, False)

    def alter(self, name: str, given: dict[str, str]) -> None:
        """Replace the settings of a topic (checked by the caller)."""
        topic = self._topics[name]
        self._record(["settings", name, given])
        topic.given = given
        for log in topic.logs:
            log.settings = TopicSettings.of(given)

    def delete_records(self, name: str, partition: int, offset: int) -> int:
        """Forget records below `offset` (-1: all); returns the new start."""
        log = self.log(name, partition)
        if log is None:
            raise BrokerError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"no partition {name}[{partition}]")
        if not log.settings.deletes:
            raise BrokerError(Code.POLICY_VIOLATION, f"{name} is compacted, its records cannot be deleted")
        offset = log.end if offset == -1 else offset
        if not 0 <= offset <= log.end:
            raise BrokerError(Code.OFFSET_OUT_OF_RANGE, f"{name}[{partition}] has {log.start} to {log.end}")
        if offset > log.start:
            self._record(["start", name, partition, offset])
            try:
                log.advance_start(offset)
            except StorageError as error:
                raise BrokerError(Code.KAFKA_STORAGE_ERROR, str(error)) from error
        return log.start

    def note_cleaning(self, topic: Topic, partition: int, cleanings: Cleanings) -> None:
        """Remember when compaction passed which offset."""
        self._record(["cleaned", topic.name, partition, [list(entry) for entry in cleanings]])
        topic.cleanings[partition] = cleanings

    def compact_journal(self) -> None:
        """Rewrite the journal when it has grown out of proportion."""
        self._journal.rewrite_if_grown()


def _folder(topic: str, partition: int) -> str:
    return f"{FOLDER}/{topic}/{partition}"
