"""Reads a rank's lanes of a batch topic, and on rank 0 the manifests, forward from given offsets (protocol 8).

A batch is complete when each lane holds the Manifest's count of its items; offsets say nothing, because transaction
markers take some. A thread reads, decodes and fetches beside training, so that what was composed ahead waits in memory,
up to a bound.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from confluent_kafka import KafkaError, TopicPartition

from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.lifetime import StopSignal
from headrace.schemas.digests import lane_digest
from headrace.schemas.errors import ConfigurationError, HeadraceError, UndecodableRecord
from headrace.schemas.records import End, Item, Manifest
from headrace.trainers.checkpoint import Positions

__all__ = ("BatchReader", "BrokenBatch", "Stopped", "lanes_of")


_MANIFESTS = -1
"""The place that is no lane."""


class BrokenBatch(HeadraceError):
    """What a lane holds is not what the Manifest says."""


class Stopped(HeadraceError):
    """This process was asked to stop while it waited; nothing is lost."""


def lanes_of(rank: int, ranks: int, lanes: int) -> list[int]:
    """The lanes of a rank: r, r + W, r + 2 W, ...

    >>> lanes_of(1, 3, 8)
    [1, 4, 7]
    """
    return list(range(rank, lanes, ranks))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An item that was read ahead; ``size``: bytes that it takes, its arrays in the object store included."""

    offset: int
    value: bytes
    item: Item
    size: int


def _longer(waiting: deque[_Waiting], than: int) -> bool:
    return len(waiting) > than


class BatchReader:
    """The lanes ``lanes`` of a policy's batches; ``manifests`` says whether to read the policy's manifests too.

    ahead: bytes of items that are read before they are asked for, at most and one item more. Stop requests raise
    Stopped out of every wait; what goes wrong while reading ahead is raised by the next wait.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        policy: int,
        name: str,
        lanes: Iterable[int],
        manifests: bool,
        client_id: str,
        group: str,
        stop: StopSignal,
        ahead: int = 256 << 20,
    ) -> None:
        self._connection, self._policy, self._stop = connection, policy, stop
        self._ahead = ahead
        self._whole: Callable[[Item], Item] = lambda item: item
        self._topic = f"batches.{name}"
        self._lanes = list(lanes)
        self._with_manifests = manifests
        self._items: dict[int, deque[_Waiting]] = {}
        self._orders: deque[tuple[int, Manifest | End]] = deque()
        self._next: dict[int, int] = {}
        self._next_manifest = -1
        self.consumer = connection.consumer(client_id, group=group)
        self._changed = threading.Condition()
        self._held = 0
        self._closing = False
        self._wanted: int | None = None
        self._paused: set[int] = set()
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = None

    def fetch_with(self, whole: Callable[[Item], Item]) -> None:
        """Make items whole by this before they are given out; called in the reading thread, before ``start`` is."""
        self._whole = whole

    def start(self, positions: Positions) -> None:
        """Read from these positions on; what was read before is forgotten."""
        self._halt()
        self._held, self._failed, self._paused = 0, None, set()
        self._items = {lane: deque() for lane in self._lanes}
        self._orders.clear()
        self._next = {lane: positions.lanes[lane] for lane in self._lanes}
        self._next_manifest = positions.manifests
        places = [TopicPartition(self._connection.topic(self._topic), lane, at) for lane, at in self._next.items()]
        if self._with_manifests:
            places.append(TopicPartition(self._connection.topic("manifests"), self._policy, positions.manifests))
        self.consumer.assign(places)
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        self._thread.start()

    @property
    def lane_offsets(self) -> Mapping[int, int]:
        """Per lane of this rank, the offset after the last item that ``take`` gave out."""
        return dict(self._next)

    @property
    def manifest_offset(self) -> int:
        """The offset after the last Manifest that ``order`` gave out."""
        return self._next_manifest

    def order(self, batch: int) -> Manifest | End:
        """Wait for the Manifest of ``batch``, or the End before it. Raises BrokenBatch at a gap, Stopped."""
        while True:
            while self._orders:
                offset, found = self._orders.popleft()
                if isinstance(found, End) or found.batch == batch:
                    self._next_manifest = offset + 1 if isinstance(found, Manifest) else self._next_manifest
                    return found
                if found.batch > batch:
                    raise BrokenBatch(
                        f"manifests[{self._policy}]@{offset} is of batch {found.batch}, batch {batch} was expected: "
                        "a Manifest is missing; the run's topics are damaged"
                    )
            self._wait(lambda: bool(self._orders), _MANIFESTS)

    def take(self, manifest: Manifest) -> list[Item]:
        """Wait until this rank's lanes hold their items of the batch, check their digests and give them out.

        Raises BrokenBatch when a lane's items are others than those that were composed, Stopped.
        """
        out: list[Item] = []
        for lane in manifest.lanes:
            if lane.lane in self._items:
                out += self._take_lane(manifest.batch, lane.lane, lane.count, lane.digest)
        return out

    def _take_lane(self, batch: int, lane: int, count: int, digest: str) -> list[Item]:
        waiting = self._items[lane]
        while True:
            while waiting and waiting[0].item.batch < batch:  # a repeat of what was trained
                self._next[lane] = self._pop(waiting).offset + 1
            if len(waiting) >= count:
                break
            self._wait(partial(_longer, waiting, len(waiting)), lane)
        taken = [self._pop(waiting) for _ in range(count)]
        where = f"{self._topic}[{lane}]"
        if any(entry.item.batch != batch for entry in taken):
            raise BrokenBatch(f"{where}@{taken[-1].offset}: fewer items of batch {batch} than its Manifest's {count}")
        if count and lane_digest([entry.value for entry in taken]) != digest:
            raise BrokenBatch(
                f"{where}@{taken[0].offset}..{taken[-1].offset}: the items of batch {batch} have another digest than "
                "its Manifest says; they were changed or are of another run"
            )
        if taken:
            self._next[lane] = taken[-1].offset + 1
        return [entry.item for entry in taken]

    def _pop(self, waiting: deque[_Waiting]) -> _Waiting:
        with self._changed:
            taken = waiting.popleft()
            self._held -= taken.size
            self._changed.notify_all()
        return taken

    def _wait(self, come: Callable[[], bool], place: int) -> None:
        """Return when the reading thread has brought what is waited for, or a little later. Raises what it raised."""
        if self._stop.is_set():
            raise Stopped(f"stopping: {self._stop.reason}")
        with self._changed:
            self._wanted = place
            self._changed.notify_all()
            self._changed.wait_for(lambda: come() or self._failed is not None, 0.1)
            self._wanted = None
        if self._failed is not None and not come():
            raise self._failed

    def _read_ahead(self) -> None:
        """The reading thread: until it is halted, or something is wrong."""
        try:
            while not self._closing:
                with self._changed:
                    full, wanted = self._held >= self._ahead, self._wanted
                    if full and wanted is None:
                        self._changed.wait(0.1)
                        continue
                self._pause({lane for lane in self._lanes if lane != wanted} if full else set())
                self._poll()
        except Exception as error:  # the seam of a thread: the next wait raises it
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _pause(self, lanes: set[int]) -> None:
        """Read none of these lanes, and all others: beyond the bound only what somebody waits for is read."""
        for change, some in ((self.consumer.pause, lanes - self._paused), (self.consumer.resume, self._paused - lanes)):
            if some:
                change([TopicPartition(self._connection.topic(self._topic), lane) for lane in sorted(some)])
        self._paused = lanes

    def _halt(self) -> None:
        """End the reading thread."""
        if self._thread is not None:
            self._closing = True
            with self._changed:
                self._changed.notify_all()
            self._thread.join()
            self._thread, self._closing = None, False

    def _poll(self) -> None:
        """Take in one record, or wait a little."""
        message = self.consumer.poll(0.1)
        if message is None:
            self.consumer.errors.raise_refused(self._connection.bootstrap)
            return
        error = message.error()
        if error is not None:
            self._judge(error, message.topic() or "", message.partition() or 0, message.offset() or 0)
            return
        raw = RawRecord.of(message, self._connection.run)
        try:
            record = raw.decoded()
        except UndecodableRecord as error:
            place = f"{self._connection.topic(raw.topic)}[{raw.partition}]@{raw.offset}"
            sys.stderr.write(f"passed over {place}, which is no record of this run: {error}\n")
            return
        if isinstance(record, Item):
            value = raw.value or b""
            size = len(value) + (record.blob.size if record.blob is not None else 0)
            waiting = _Waiting(raw.offset, value, self._whole(record), size)
            with self._changed:
                self._items[raw.partition].append(waiting)
                self._held += size
                self._changed.notify_all()
        elif isinstance(record, Manifest | End):
            with self._changed:
                self._orders.append((raw.offset, record))
                self._changed.notify_all()

    def _judge(self, error: KafkaError, topic: str, partition: int, offset: int) -> None:
        """Raise for errors that waiting does not cure."""
        if error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            raise ConfigurationError(
                f"{topic}[{partition}]@{offset} is not in the topic: records that this trainer has to read again were "
                "deleted, or topics and checkpoints are of different runs"
            )
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC) and not error.retriable():
            raise ConfigurationError(f"{topic}[{partition}] does not exist on the cluster: {error.str()}")

    def close(self) -> None:
        """Leave the cluster."""
        self._halt()
        self.consumer.close()
