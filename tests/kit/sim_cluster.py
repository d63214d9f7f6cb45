"""A cluster of one node in virtual time: the local broker's state machines behind ``connectors.kafka.Connection``.

Clients made by ``SimConnection`` have the methods of confluent_kafka that headrace uses. Each of their calls takes time
on the way there and on the way back, and may find the broker away; between the two the process can die. What lies in
the logs is read from the broker's own bytes (``PartitionView``).
"""

from __future__ import annotations

import random
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from sim_time import SimProcess, SimTime

from headrace.connectors.broker import batches
from headrace.connectors.broker.broker import Broker, BrokerOptions, Times
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.storage import MemoryStorage
from headrace.connectors.kafka import Connection
from headrace.schemas.config import KafkaConfig
from headrace.schemas.ids import topic_name, unprefixed
from headrace.schemas.topics import settings_of

if TYPE_CHECKING:
    from sim_consumer import SimConsumer
    from sim_producer import SimProducer

Place = tuple[str, int]
Headers = list[tuple[str, bytes | None]]
T = TypeVar("T")


def _varint(value: int) -> bytes:
    return batches._signed(value)


def _field(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def build_batch(
    rows: list[tuple[bytes | None, bytes | None, Headers]],
    *,
    wall_ms: int,
    producer: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    transactional: bool = False,
) -> bytearray:
    """A batch of (key, value, headers) records."""
    count = len(rows)
    attributes = 16 if transactional else 0
    header = batches.Header(
        0, 0, -1, 2, 0, attributes, count - 1, wall_ms, wall_ms, producer, epoch, sequence, count
    )  # fmt: skip
    records = []
    for number, (key, value, headers) in enumerate(rows):
        tail = b"".join(_field(name.encode()) + _field(content) for name, content in headers)
        body = _field(key) + _field(value) + _varint(len(headers)) + tail
        records.append(batches.Record(number, wall_ms, key, value is not None, body))
    return batches.rebuilt(header, records)


@dataclass(slots=True)
class Entry:
    """One stored record."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    producer: tuple[int, int]
    """Id and epoch of its producer: -1, -1 without one."""
    aborted: bool = False


def _parts(body: bytes) -> tuple[bytes | None, bytes | None, Headers]:
    at = 0

    def take() -> bytes | None:
        nonlocal at
        size, at = batches._read_signed(body, at)
        if size < 0:
            return None
        at += size
        return body[at - size : at]

    key, value = take(), take()
    count, at = batches._read_signed(body, at)
    return key, value, [((take() or b"").decode(), take()) for _ in range(count)]


class PartitionView:
    """The records of one log, read from its bytes as they come; ``changed`` is called by the log."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.entries: list[Entry] = []
        self.offsets: list[int] = []
        self.listeners: list[Callable[[Place], None]] = []
        self._read_to = 0
        self._open: dict[int, list[Entry]] = {}

    def attach(self, log: PartitionLog) -> None:
        """Follow a log; after a restart it must hold what the old one held."""
        assert log.end >= self._read_to, f"{self.place}: the broker lost {self._read_to - log.end} offsets"
        self.log = log
        log.watchers.add(self)

    def changed(self, log: PartitionLog) -> None:
        """Read what was appended."""
        while self._read_to < log.end:
            found = log.read(self._read_to, 1 << 30, log.end, True)
            assert found is not None
            piece, self._read_to = found
            self._take(piece.file.read(piece.position, piece.size))
        for listener in list(self.listeners):
            listener(self.place)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            header = batches.read_header(data, at)
            batch = memoryview(data)[at : at + header.size]
            at += header.size
            if header.is_control:
                commit = batches.marker_commits(batch)
                for entry in self._open.pop(header.producer_id, []):
                    entry.aborted = not commit
                continue
            for record in batches.records(bytes(batch[batches.HEADER_SIZE :]), header):
                key, value, headers = _parts(record.body)
                producer = (header.producer_id, header.producer_epoch)
                entry = Entry(record.offset, record.timestamp, key, value, headers, producer)
                self.entries.append(entry)
                self.offsets.append(record.offset)
                if header.is_transactional:
                    self._open.setdefault(header.producer_id, []).append(entry)

    def next(self, position: int, limit: int) -> Entry | None:
        """The first record from ``position`` below ``limit`` that is no part of an aborted transaction."""
        at = bisect_left(self.offsets, position)
        while at < len(self.entries) and self.offsets[at] < limit:
            if not self.entries[at].aborted:
                return self.entries[at]
            at += 1
        return None


class SimCluster:
    """The node of one run with its topics; ``latency`` is the way of a message, seconds from and to."""

    def __init__(
        self, time: SimTime, run: str, counts: Mapping[str, int], *, seed: int, latency: tuple[float, float]
    ) -> None:
        self.time, self.run, self.counts = time, run, dict(counts)
        self.rng = random.Random(f"cluster {seed}")
        self.latency = latency
        self.down_until = 0.0
        """Nobody reaches the broker before."""
        self.frozen = False
        self.restarts = 0
        self.clients: list[SimConsumer | SimProducer] = []
        self.stuck: dict[tuple[str, Place], float] = {}
        """(process name, input place) that cannot be fetched until then."""
        self._storage = MemoryStorage()
        self.views: dict[Place, PartitionView] = {}
        self._start()
        for name, count in counts.items():
            self.broker.topics.create(topic_name(run, name), count, settings_of(name))
        self._attach()
        self._tick()

    # the node

    def times(self) -> Times:
        """The clocks of the broker."""
        return Times(self.time.now, self.time.wall_ms())

    def _start(self) -> None:
        options = BrokerOptions(auto_create=False)
        self.broker = Broker(self._storage, options, self.times(), log_error=lambda line: None)

    def _attach(self) -> None:
        for topic, partition, log in self.broker.topics.logs():
            place = unprefixed(self.run, topic.name), partition
            view = self.views.setdefault(place, PartitionView(place))
            view.attach(log)
            view.changed(log)

    def _tick(self) -> None:
        if not self.away():
            self.broker.tick(self.times())
        self.time.at(0.1, self._tick)

    def away(self) -> bool:
        """Whether the broker does not answer."""
        return self.time.now < self.down_until

    def stop_for(self, seconds: float) -> None:
        """The node stands still; what reaches it meanwhile waits."""
        self.down_until = max(self.down_until, self.time.now + seconds)

    def kill(self, seconds: float) -> None:
        """kill -9 of the node, which is back after ``seconds``."""
        self.stop_for(seconds)
        self.restarts += 1
        self._start()
        self._attach()
        for client in list(self.clients):
            client.disconnected()

    # calls

    def delay(self) -> float:
        """The way of one message."""
        return self.rng.uniform(*self.latency)

    def request(self, effect: Callable[[], T], seconds: float) -> T:
        """A blocking call of the current process. Raises BrokerError, and KafkaException when nobody answers."""
        process = self.time.me()
        deadline = self.time.now + seconds
        process.step()
        process.block(self.delay())
        while self.away():
            if self.down_until > deadline:
                process.block(max(0.0, deadline - self.time.now))
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True))
            process.block(self.down_until - self.time.now + self.delay())
        self.broker.times = self.times()
        result = effect()
        process.step()
        process.block(self.delay())
        return result

    def later(self, process: SimProcess, effect: Callable[[], None]) -> None:
        """A message of a background thread: sent when the process runs, there when the broker answers."""

        def arrive() -> None:
            if not process.alive:
                return
            wait = max(process.frozen_until, self.down_until) - self.time.now
            if wait > 0:
                self.time.at(wait + self.delay(), arrive)
                return
            self.broker.times = self.times()
            effect()

        self.time.at(self.delay(), arrive)

    # what the test reads and writes

    def append(self, place: Place, key: bytes | None, value: bytes | None, headers: Headers) -> int:
        """Write a record at once, from outside."""
        self.broker.times = self.times()
        batch = build_batch([(key, value, headers)], wall_ms=self.time.wall_ms())
        return self.views[place].log.append(batch, self.time.wall_ms())

    def committed(self, place: Place, start: int = 0) -> Iterator[Entry]:
        """The committed records of a partition."""
        view = self.views[place]
        limit = view.log.last_stable_offset
        while (entry := view.next(start, limit)) is not None:
            yield entry
            start = entry.offset + 1


class SimConnection(Connection):
    """A connection to a simulated cluster; its clients belong to the process that makes them."""

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(KafkaConfig(), cluster.run, "simulated:9092")
        self.cluster = cluster

    def producer(self, client_id: str, transactional_id: str | None = None, **settings: Any) -> Any:
        """See ``Connection``."""
        from sim_producer import SimProducer

        return SimProducer(self.cluster, client_id, transactional_id)

    def consumer(self, client_id: str, group: str | None = None, **settings: Any) -> Any:
        """See ``Connection``."""
        from sim_consumer import SimConsumer

        return SimConsumer(self.cluster, client_id, group or f"{self.run}.reader.{client_id}", settings)

    def wait_for_broker(self, *_: Any, **__: Any) -> None:
        """See ``Connection``; waits as long as it takes."""
        while not self.answers():
            self.cluster.time.me().block(0.2)

    def answers(self, timeout: float = 1.0) -> bool:
        """See ``Connection``."""
        try:
            self.cluster.request(lambda: None, timeout)
        except KafkaException:
            return False
        return True

    def list_run_topics(self) -> dict[str, int]:
        """See ``Connection``."""
        return dict(self.cluster.counts)

    def end_offsets(self, topic: str, *, committed: bool = True) -> dict[int, int]:
        """See ``Connection``."""

        def ends() -> dict[int, int]:
            logs = self._logs(topic)
            return {p: log.last_stable_offset if committed else log.end for p, log in logs.items()}

        return self._doing(f"asking for the end of {topic}", lambda: self.cluster.request(ends, 15.0))

    def start_offsets(self, topic: str) -> dict[int, int]:
        """See ``Connection``."""

        def starts() -> dict[int, int]:
            return {p: log.start for p, log in self._logs(topic).items()}

        return self._doing(f"asking for the start of {topic}", lambda: self.cluster.request(starts, 15.0))

    def _logs(self, topic: str) -> dict[int, PartitionLog]:
        return {p: self.cluster.views[topic, p].log for p in range(self.partition_count(topic))}


_FENCED = frozenset({Code.PRODUCER_FENCED, Code.INVALID_PRODUCER_EPOCH})
_AGAIN = frozenset({Code.CONCURRENT_TRANSACTIONS, Code.COORDINATOR_NOT_AVAILABLE, Code.KAFKA_STORAGE_ERROR})


def sorted_error(error: BrokerError) -> KafkaError | None:
    """What a transactional client makes of a refusal: None to repeat it, else fatal or to be aborted (librdkafka)."""
    if error.code in _AGAIN:
        return None
    if error.code in _FENCED:
        return KafkaError(KafkaError._FENCED, str(error), fatal=True)
    if error.code in (Code.INVALID_TXN_STATE, Code.INVALID_PRODUCER_ID_MAPPING):
        return KafkaError(int(error.code), str(error), fatal=True)
    return KafkaError(int(error.code), str(error), txn_requires_abort=True)


@contextmanager
def cheap_checksums() -> Iterator[None]:
    """CRC-32 in the place of CRC-32C while a simulation runs: in pure Python, the latter is most of its time."""
    original = batches.crc32c
    batches.crc32c = zlib.crc32
    try:
        yield
    finally:
        batches.crc32c = original
