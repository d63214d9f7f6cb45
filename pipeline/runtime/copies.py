"""Stores that are read from their changelogs: of tasks that are being restored, and of tasks that others run.

One consumer of its own, without a group, read in slices of the worker's loop, so that tasks that are ready never wait
for one that restores. A copy knows up to which offset it holds everything; whoever takes it over reads the rest only.
A compacted topic forgets a deletion after ``delete.retention.ms``: a copy that took longer is read a second time, and
what the second reading does not find is removed.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, Message, TopicPartition

from headrace.connectors.kafka import Connection
from headrace.pipeline.runtime.frontier import Place
from headrace.pipeline.runtime.metrics import StageMetrics
from headrace.pipeline.runtime.store import OverlayStore
from headrace.schemas.ids import unprefixed

__all__ = ("Copies", "Copy", "Stores")

log = logging.getLogger(__name__)

Stores = Mapping[str, OverlayStore]
"""Stores of one task by the name of their changelog topic, without the run's prefix."""

FORGET_SECONDS = 45.0
"""Deletions stay readable for longer (``delete.retention.ms`` is 60 s)."""
FOLLOW_EVERY_SECONDS = 10.0
"""How often followed copies are compared with the ends of their changelogs."""
_BATCH = 64
"""Records between two looks at the clock."""
_WAIT_SECONDS = 0.005
_MOST_BYTES = 8 << 20
"""Records that wait to be folded."""


@dataclass(slots=True)
class Copy:
    """Stores and how far they were read.

    at: next offset by changelog topic. whole: monotonic time at which nothing below ``at`` was missing. ends: where a
    restoration is complete; empty for a copy that is followed. seen: keys found in a second reading. target: ends that
    the topics had at the monotonic time ``asked``.
    """

    stores: Stores
    at: dict[str, int]
    whole: float
    ends: dict[str, int] = field(default_factory=dict)
    seen: dict[str, set[bytes]] | None = None
    nbytes: int = 0
    target: dict[str, int] = field(default_factory=dict)
    asked: float = 0.0
    unfolded: dict[str, list[tuple[bytes | None, bytes | None]]] = field(default_factory=dict)
    """Records that were read and not folded yet, by changelog topic; empty but while ``read`` runs."""


class Copies:
    """All copies of one worker by task number. ``starts`` gives a changelog partition's first offset."""

    def __init__(
        self, connection: Connection, name: str, starts: Callable[[Place], int], metrics: StageMetrics, limit: int
    ) -> None:
        self._connection = connection
        self._name = name
        self._starts = starts
        self._metrics = metrics
        self._limit = limit
        """Bytes of all followed copies."""
        self._copies: dict[int, Copy] = {}
        self._consumer = connection.consumer(f"{name}.restore", enable_partition_eof=True, fetch_wait_max_ms=50)
        self._assigned = True
        """False when the consumer does not read what it should."""
        self._compared = 0.0
        self._counts: Counter[str] = Counter()
        self._unfolded = 0
        self.full = False
        """True once followed copies were over the limit: nothing is followed any more."""

    # what is held

    def restore(self, number: int, stores: Stores, ends: Mapping[str, int]) -> None:
        """Bring the stores of a task to these ends of their changelogs; goes on from what is held of it."""
        copy = self._copies.get(number)
        if copy is None:
            copy = self._copies[number] = self._new(number, stores)
        copy.ends = dict(ends)
        self._assigned = False

    def restored(self, number: int) -> bool:
        """True when a copy holds everything up to the ends wanted, and nothing that was deleted."""
        copy = self._copies[number]
        if any(copy.at[topic] < end for topic, end in copy.ends.items()):
            return False
        if copy.seen is None and time.monotonic() - copy.whole > FORGET_SECONDS:
            log.info("%s: restoring task %d took long; looking again for what was deleted since", self._name, number)
            copy.seen = {topic: set() for topic in copy.stores}
            copy.at = {topic: self._starts((topic, number)) for topic in copy.stores}
            self._assigned = False
            return False
        for topic, seen in (copy.seen or {}).items():
            gone = copy.stores[topic].retain(seen)
            log.info("%s: %d deleted entries of task %d removed", self._name, gone, number)
        return True

    def keep(self, number: int, stores: Stores, at: Mapping[str, int], whole: float) -> None:
        """Hold the stores of a task that was given up, complete up to these offsets at the monotonic time ``whole``.

        When that is long ago, deletions since may be forgotten already, and the changelog is read a second time.
        """
        nbytes = sum(store.nbytes() for store in stores.values())
        self._copies[number] = Copy(stores, dict(at), whole, nbytes=nbytes)

    def take(self, number: int) -> Copy | None:
        """Give out a copy; from now on it is somebody else's."""
        copy = self._copies.pop(number, None)
        self._assigned = False
        return copy

    def stores_of(self, number: int) -> Stores | None:
        """Stores that are held of a task, to be taken over by it."""
        copy = self._copies.get(number)
        return None if copy is None else copy.stores

    def follow(self, numbers: Collection[int], own: Collection[int], make: Callable[[int], Stores]) -> None:
        """Follow these tasks and forget others but for a worker's ``own``; ``make`` gives empty stores."""
        for number in [n for n in self._copies if n not in numbers and n not in own]:
            self.drop(number)
        for number in numbers if not self.full else ():
            if number not in self._copies:
                self._copies[number] = self._new(number, make(number))
        self._assigned = False

    def release(self, number: int) -> None:
        """A restoration was called off: what was read so far is followed, until ``follow`` says otherwise."""
        if number in self._copies:
            self._copies[number].ends = {}
            self._copies[number].seen = None

    def drop(self, number: int) -> None:
        """Forget a copy."""
        copy = self._copies.pop(number, None)
        for store in copy.stores.values() if copy is not None else ():
            store.close()
        self._assigned = False

    def __len__(self) -> int:
        """Copies held."""
        return len(self._copies)

    # reading

    def read(self, seconds: float, *, wait: bool) -> None:
        """Fold what comes within the time given; without ``wait`` only what is there already."""
        if not self._copies:
            return
        try:
            self._read(time.monotonic() + seconds, wait)
        finally:
            self._flush()

    def _read(self, until: float, wait: bool) -> None:
        for count in range(1, 1 << 30):
            self._assign()
            if self._unfolded > _MOST_BYTES:
                self._flush()
            message = self._consumer.poll(_WAIT_SECONDS if wait else 0.0)
            if message is not None and self._take(message) and not self._left():
                return
            if message is None and not wait:
                return
            if (message is None or count % _BATCH == 0) and time.monotonic() >= until:
                return

    def compare(self, ends: Callable[[list[Place]], dict[Place, int] | None]) -> None:
        """From time to time: see that followed copies keep up. ``ends`` gives last stable ends of places."""
        now = time.monotonic()
        followed = {n: copy for n, copy in self._copies.items() if not copy.ends}
        if not followed or now - self._compared < FOLLOW_EVERY_SECONDS:
            return
        self._compared = now
        for number, copy in followed.items():
            if copy.target and all(copy.at[topic] >= end for topic, end in copy.target.items()):
                if now - copy.whole > FORGET_SECONDS:
                    self._start_over(number, copy)
                copy.whole = max(copy.whole, copy.asked)
        found = ends([(topic, n) for n, copy in followed.items() for topic in copy.at])
        if found is not None:
            for number, copy in followed.items():
                copy.target, copy.asked = {topic: found[topic, number] for topic in copy.at}, now
        self._weigh(followed)

    def close(self) -> None:
        """Forget all copies and close the client."""
        for number in list(self._copies):
            self.drop(number)
        self._consumer.close()

    def _new(self, number: int, stores: Stores) -> Copy:
        return Copy(stores, {topic: self._starts((topic, number)) for topic in stores}, time.monotonic())

    def _left(self) -> bool:
        """Whether a restoration is not complete."""
        return any(copy.at[topic] < end for copy in self._copies.values() for topic, end in copy.ends.items())

    def _assign(self) -> None:
        if self._assigned:
            return
        self._assigned = True
        self._consumer.assign(
            [
                TopicPartition(self._connection.topic(topic), number, at)
                for number, copy in self._copies.items()
                for topic, at in copy.at.items()
                if not copy.ends or at < copy.ends[topic]
            ]
        )

    def _take(self, message: Message) -> bool:
        """Fold one message; True when it may have been the last of a restoration."""
        topic = unprefixed(self._connection.run, message.topic() or "")
        number, offset = message.partition() or 0, message.offset() or 0
        copy = self._copies.get(number)
        if copy is None or topic not in copy.at:
            return False
        error = message.error()
        end = copy.ends.get(topic, offset + 1)
        if error is None:
            if offset < end:
                self._fold(copy, topic, message)
            copy.at[topic] = max(copy.at[topic], min(offset + 1, end))
        elif error.code() == KafkaError._PARTITION_EOF:
            copy.at[topic] = max(copy.at[topic], min(offset, end))
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._start_over(number, copy)
        else:
            log.warning("%s: reading %s[%d]: %s", self._name, topic, number, error.str())
        return bool(copy.ends) and copy.at[topic] >= end

    def _fold(self, copy: Copy, topic: str, message: Message) -> None:
        key, size = message.key(), len(message)
        copy.unfolded.setdefault(topic, []).append((key, message.value()))
        copy.nbytes += size
        self._unfolded += size
        if copy.seen is not None and key is not None:
            copy.seen[topic].add(key)
        kind = "restored" if copy.ends else "followed"
        self._counts[f"{kind}_records_total"] += 1
        self._counts[f"{kind}_bytes_total"] += size + len(key or b"")

    def _flush(self) -> None:
        """Fold what was read: many records at once, for stores in files."""
        for copy in self._copies.values():
            for topic, entries in copy.unfolded.items():
                copy.stores[topic].restore(entries)
            copy.unfolded = {}
        for name, count in self._counts.items():
            self._metrics.count(name, count)
        self._counts.clear()
        self._unfolded = 0

    def _start_over(self, number: int, copy: Copy) -> None:
        """What is held may have missed deletions, or the changelog was cut: read it from its start."""
        log.info("%s: the copy of task %d is read anew", self._name, number)
        copy.unfolded = {}
        for store in copy.stores.values():
            store.retain(())
        copy.at = {topic: self._starts((topic, number)) for topic in copy.stores}
        copy.whole, copy.seen, copy.nbytes, copy.target = time.monotonic(), None, 0, {}
        self._assigned = False

    def _weigh(self, followed: Mapping[int, Copy]) -> None:
        """Stop to follow when the copies are too large."""
        if sum(copy.nbytes for copy in followed.values()) <= self._limit:
            return
        for copy in followed.values():
            copy.nbytes = sum(store.nbytes() for store in copy.stores.values())
        held = sum(copy.nbytes for copy in followed.values())
        if held > self._limit:
            log.warning(
                "%s: follows no state of other workers any more: %d bytes are over runtime.standby_bytes (%d)",
                self._name, held, self._limit,
            )  # fmt: skip
            self._metrics.count("standby_given_up_total")
            self.full = True
            for number in followed:
                self.drop(number)
