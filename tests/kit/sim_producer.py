"""A producer of a simulated cluster: what headrace calls of confluent_kafka's, with librdkafka's answers.

Records leave in the background, batch by batch, so that a process which dies leaves any part of a transaction behind.
A refusal by the coordinator is fatal (fenced) or asks for an abort; a broker that is away is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from sim_cluster import Headers, Place, SimCluster, build_batch, sorted_error
from sim_consumer import GroupMetadata, SimMessage
from sim_time import SimProcess

from headrace.connectors.broker.codes import BrokerError
from headrace.connectors.broker.offsets import Committed
from headrace.connectors.kafka_errors import ErrorLog
from headrace.schemas.ids import unprefixed

_LINGER = 0.001
_TIMEOUT_MS = 10_000
_RETRY = 0.05
Row = tuple[bytes | None, bytes | None, Headers]
Report = Callable[[Any, Any], None]


class SimProducer:
    """Transactional when it has an id."""

    def __init__(self, cluster: SimCluster, client_id: str, transactional_id: str | None) -> None:
        self.errors = ErrorLog()
        self.producer_id = self.epoch = -1
        self._cluster, self._id, self._name = cluster, transactional_id, client_id
        self._process = cluster.time.me()
        self._caller = self._process
        """The thread that waits."""
        self._queue: list[tuple[Place, Row, Report | None]] = []
        self._flight = 0
        self._sequence: dict[Place, int] = {}
        self._backlog: dict[Place, list[tuple[Row, Report | None]]] = {}
        """What waits behind the batch under way, by place; no entry: none is."""
        self._in_transaction = False
        self._added: set[Place] = set()
        self._sending = False
        self._fatal: KafkaError | None = None
        self._abortable: KafkaError | None = None
        self._generation = 0
        """Counts purges: what was on its way before is nobody's business any more."""
        self._reports: list[tuple[Report, Any]] = []

    def disconnected(self) -> None:
        """The broker was restarted; requests are sent again by themselves."""

    def _me(self) -> SimProcess:
        self._caller = self._cluster.time.me()
        return self._caller

    # plain and transactional

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        *,
        headers: Headers | None = None,
        on_delivery: Report | None = None,
    ) -> None:
        """Queue a record."""
        self._process.check()
        self._refuse()
        if self._id is not None and not self._in_transaction:
            raise KafkaException(KafkaError(KafkaError._STATE, "no transaction is open"))
        place = unprefixed(self._cluster.run, topic), partition
        self._queue.append((place, (key, value, headers or []), on_delivery))
        if not self._sending:
            self._sending = True
            self._cluster.time.at(_LINGER, self._send)

    def poll(self, timeout: float = 0.0) -> int:
        """Serve delivery reports."""
        self._me().step()
        if not self._reports and timeout > 0:
            self._me().wait_for(lambda: bool(self._reports), timeout)
        served = self._reports
        self._reports = []
        for report, message in served:
            report(None, message)
        return len(served)

    def flush(self, timeout: float = 10.0) -> int:
        """Wait until all is acknowledged; returns what is not."""
        self._me().step()
        self._me().wait_for(lambda: not self._queue and not self._flight, timeout)
        self.poll(0)
        return len(self._queue) + self._flight

    def purge(self) -> None:
        """Forget what is queued."""
        self._process.check()
        self._queue.clear()
        self._backlog = {place: [] for place in self._backlog}
        self._generation += 1
        self._flight = 0

    def __len__(self) -> int:
        return len(self._queue) + self._flight

    def _refuse(self) -> None:
        if self._fatal is not None:
            raise KafkaException(self._fatal)

    # sending

    def _send(self) -> None:
        self._sending = False
        queued, self._queue = self._queue, []
        by_place: dict[Place, list[tuple[Row, Report | None]]] = {}
        for place, row, report in queued:
            by_place.setdefault(place, []).append((row, report))
        for place, rows in by_place.items():
            self._flight += 1
            if place in self._backlog:
                self._backlog[place] += rows
                self._flight -= bool(len(self._backlog[place]) > len(rows))
            else:
                self._dispatch(place, rows)

    def _dispatch(self, place: Place, rows: list[tuple[Row, Report | None]]) -> None:
        self._backlog[place] = []
        self._deliver(place, rows, self._generation)

    def _next(self, place: Place) -> None:
        """The batch under way has ended; send what waited behind it."""
        waiting = self._backlog.pop(place, [])
        if waiting:
            self._dispatch(place, waiting)

    def _deliver(self, place: Place, rows: list[tuple[Row, Report | None]], generation: int) -> None:
        def arrive() -> None:
            if generation != self._generation or self._fatal is not None or self._abortable is not None:
                self._acknowledged(generation)
                self._next(place)
                return
            try:
                offset = self._append(place, [row for row, _ in rows])
            except BrokerError as error:
                found = sorted_error(error)
                if found is None:
                    self._cluster.time.at(_RETRY, lambda: self._deliver(place, rows, generation))
                    return
                self._take_error(found)
                self._acknowledged(generation)
                self._next(place)
                return
            self._next(place)
            self._cluster.later(self._process, lambda: self._acknowledged(generation, place, rows, offset))

        self._cluster.later(self._process, arrive)

    def _append(self, place: Place, rows: list[Row]) -> int:
        cluster = self._cluster
        broker, log = cluster.broker, cluster.views[place].log
        wall_ms = cluster.time.wall_ms()
        if self._id is None:
            return log.append(build_batch(rows, wall_ms=wall_ms), wall_ms)
        position = f"{cluster.run}.{place[0]}", place[1]
        if place not in self._added:
            broker.transactions.add_partitions(
                self._id, self.producer_id, self.epoch, [position], cluster.time.now
            )  # fmt: skip
            self._added.add(place)
        broker.transactions.check_produce(self._id, self.producer_id, self.epoch, position)
        first = self._sequence.get(place, 0)
        batch = build_batch(
            rows, wall_ms=wall_ms, producer=self.producer_id, epoch=self.epoch, sequence=first, transactional=True
        )
        offset = log.append(batch, wall_ms)
        self._sequence[place] = first + len(rows)
        return offset

    def _acknowledged(
        self,
        generation: int,
        place: Place | None = None,
        rows: Sequence[tuple[Row, Report | None]] = (),
        offset: int = -1,
    ) -> None:
        if generation == self._generation:
            self._flight -= 1
            for number, (row, report) in enumerate(rows):
                if report is not None and place is not None:
                    self._reports.append((report, SimMessage(place, offset + number, 0, *row)))
        self._caller.wake()

    def _take_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fatal = self._fatal or error
        else:
            self._abortable = self._abortable or error

    # transactions

    def _ask(self, call: Callable[[], Any], seconds: float) -> Any:
        """A request to the coordinator, repeated while it is busy. Raises KafkaException."""
        deadline = self._cluster.time.now + seconds
        while True:
            self._refuse()
            try:
                return self._cluster.request(call, deadline - self._cluster.time.now)
            except BrokerError as refused:
                error = sorted_error(refused)
                if error is not None:
                    self._take_error(error)
                    raise KafkaException(error) from refused
                if self._cluster.time.now > deadline:
                    raise KafkaException(
                        KafkaError(KafkaError._TIMED_OUT, str(refused), retriable=True)
                    ) from refused  # fmt: skip
                self._me().block(_RETRY)

    def init_transactions(self, timeout: float = 30.0) -> None:
        """Fence a predecessor."""
        assert self._id is not None
        name = self._id
        now = self._cluster.time
        found = self._ask(
            lambda: self._cluster.broker.transactions.init(name, _TIMEOUT_MS, None, now.now), timeout
        )  # fmt: skip
        self.producer_id, self.epoch = found

    def begin_transaction(self) -> None:
        """Nothing goes out yet."""
        self._me().step()
        self._refuse()
        if self._in_transaction:
            raise KafkaException(KafkaError(KafkaError._STATE, "a transaction is open"))
        self._in_transaction, self._added = True, set()

    def send_offsets_to_transaction(
        self, offsets: list[TopicPartition], group: GroupMetadata, timeout: float = 30.0
    ) -> None:
        """Add offsets under the membership of ``group``."""
        assert self._id is not None
        name, time = self._id, self._cluster.time
        self._abort_first()
        entries = {(p.topic, p.partition): Committed(p.offset, -1, p.metadata or "") for p in offsets}

        def add() -> None:
            broker = self._cluster.broker
            broker.transactions.add_group(name, self.producer_id, self.epoch, group.group, time.now)
            broker.groups.check_commit(
                group.group, group.generation, group.member_id, group.instance_id, True, time.now
            )  # fmt: skip
            broker.transactions.add_offsets(name, self.producer_id, self.epoch, group.group, entries, time.now)

        self._ask(add, timeout)

    def _abort_first(self) -> None:
        self._refuse()
        if self._abortable is not None:
            raise KafkaException(self._abortable)

    def commit_transaction(self, timeout: float = 30.0) -> None:
        """Wait for the records, then end the transaction."""
        self._me().step()

        def settled() -> bool:
            wrong = self._fatal is not None or self._abortable is not None
            return wrong or (not self._queue and not self._flight)

        if not self._me().wait_for(settled, timeout):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "records are not acknowledged", retriable=True))
        self._abort_first()
        self._end(True, timeout)

    def abort_transaction(self, timeout: float = 30.0) -> None:
        """Undo the transaction."""
        self._me().step()
        self._refuse()
        self._queue.clear()
        self._flight -= sum(bool(rows) for rows in self._backlog.values())
        self._backlog = {place: [] for place in self._backlog}
        self._me().wait_for(lambda: not self._flight, timeout)
        self._end(False, timeout)
        self._abortable = None

    def _end(self, commit: bool, timeout: float) -> None:
        assert self._id is not None
        name, time = self._id, self._cluster.time

        def end() -> None:
            state = self._cluster.broker.transactions
            if self._added or name_is_open(state, name):
                state.end(name, self.producer_id, self.epoch, commit, time.now)

        self._ask(end, timeout)
        self._in_transaction = False


def name_is_open(state: Any, name: str) -> bool:
    """Whether the coordinator has anything of a transaction; librdkafka ends an empty one without asking."""
    entry = state._ids.get(name)
    return entry is not None and bool(entry.partitions or entry.offsets)
