"""A consumer of a simulated cluster: membership of a classic group, and records as they become visible.

Eager rebalances with the range assignor and static members, callbacks out of ``poll``, heartbeats by a background
thread that stands still with its process. A record is seen some time after its transaction has ended, each partition
for itself, so that inputs run apart as they do on a network.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from sim_cluster import Headers, Place, SimCluster

from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.groups import JoinRequest, JoinResult, SyncResult
from headrace.connectors.kafka_errors import ErrorLog
from headrace.schemas.ids import topic_name, unprefixed

_HEARTBEAT = 1.0
_SESSION_MS, _REBALANCE_MS = 6_000, 300_000
_RETRY = 0.1
_CALL_SECONDS = 0.0005
"""Least time of a call in vain: a loop that waits for nothing else takes time too."""
Callback = Callable[[Any, list[TopicPartition]], None]


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """Who a caller is in a group; without a member id, an outsider."""

    group: str
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


class SimMessage:
    """A consumed record, or what the client reports instead."""

    def __init__(
        self,
        place: Place,
        offset: int,
        timestamp_ms: int,
        key: bytes | None = None,
        value: bytes | None = None,
        headers: Headers | None = None,
        error: KafkaError | None = None,
        run: str = "",
    ) -> None:
        self._topic = topic_name(run, place[0]) if run else place[0]
        self._partition, self._offset, self._time = place[1], offset, timestamp_ms
        self._key, self._value, self._headers, self._error = key, value, headers, error

    def error(self) -> KafkaError | None:
        return self._error

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> Headers | None:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, self._time

    def __len__(self) -> int:
        return len(self._value or b"")


@dataclass(slots=True)
class _Fetch:
    """How far one assigned partition has been handed out, and how far it has been seen to reach."""

    position: int
    seen: int = -1
    high: int = -1
    said_end: int = -1
    paused: bool = False
    looking: bool = False


class SimConsumer:
    """One client; ``settings`` are those of ``Connection.consumer``."""

    def __init__(self, cluster: SimCluster, client_id: str, group: str, settings: dict[str, Any]) -> None:
        self.errors = ErrorLog()
        self._cluster, self._client, self._group = cluster, client_id, group
        self._process = cluster.time.me()
        self._caller = self._process
        """Whose turn it is to be woken: the thread that polled last."""
        self._instance: str | None = settings.get("group_instance_id")
        self._tells_ends = bool(settings.get("enable_partition_eof"))
        self._latest = settings.get("auto_offset_reset") == "latest"
        self._fetches: dict[Place, _Fetch] = {}
        self._turn = 0
        self._topics: list[str] = []
        self._callbacks: dict[str, Callback] = {}
        self._events: deque[tuple[str, list[TopicPartition]]] = deque()
        self._state = "out"
        self._member_id, self._generation = "", -1
        self._owned: list[TopicPartition] = []
        self._joins = 0
        self._closed = False
        self._fatal: KafkaError | None = None
        cluster.clients.append(self)

    # reading

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read these partitions from their offsets."""
        self._process.check()
        for place in self._fetches:
            self._cluster.views[place].listeners.remove(self._changed)
        self._fetches = {}
        for p in partitions:
            place = unprefixed(self._cluster.run, p.topic), p.partition
            view = self._cluster.views[place]
            start = view.log.last_stable_offset if p.offset < 0 and self._latest else max(0, p.offset)
            self._fetches[place] = _Fetch(start)
            view.listeners.append(self._changed)
            self._changed(place)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Hand out nothing of these."""
        self._set_paused(partitions, True)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo ``pause``."""
        self._set_paused(partitions, False)

    def _set_paused(self, partitions: Sequence[TopicPartition], paused: bool) -> None:
        for p in partitions:
            self._fetches[unprefixed(self._cluster.run, p.topic), p.partition].paused = paused

    def _changed(self, place: Place) -> None:
        fetch = self._fetches.get(place)
        if not self._process.alive:
            self._gone()
        if fetch is None or fetch.looking or self._closed:
            return
        fetch.looking = True
        stuck = self._cluster.stuck.get((self._process.name, place), 0.0) - self._cluster.time.now
        if stuck > 0:
            self._cluster.time.at(stuck, lambda: self._cluster.later(self._process, lambda: self._look(place, fetch)))
        else:
            self._cluster.later(self._process, lambda: self._look(place, fetch))

    def _look(self, place: Place, fetch: _Fetch) -> None:
        fetch.looking = False
        if self._fetches.get(place) is fetch and not self._closed:
            log = self._cluster.views[place].log
            fetch.seen, fetch.high = log.last_stable_offset, log.end
            self._caller.wake()

    def poll(self, timeout: float = -1) -> SimMessage | None:
        """The next record or event; callbacks are made here."""
        self._caller = self._cluster.time.me()
        self._caller.step()
        deadline = self._cluster.time.now + max(timeout, _CALL_SECONDS)
        while True:
            if self._fatal is not None:
                fatal, self._fatal = self._fatal, None
                return SimMessage(("", 0), 0, 0, error=fatal)
            self._serve()
            message = self._next()
            if message is not None:
                return message
            left = deadline - self._cluster.time.now
            if left <= 0:
                return None
            self._caller.block(left)

    def _next(self) -> SimMessage | None:
        """One record or end of a partition, from the partitions in turn."""
        places = list(self._fetches)
        for number in range(len(places)):
            place = places[(self._turn + number) % len(places)]
            fetch = self._fetches[place]
            if fetch.paused or fetch.seen < 0:
                continue
            entry = self._cluster.views[place].next(fetch.position, fetch.seen)
            if entry is not None:
                fetch.position = entry.offset + 1
                self._turn += number
                return SimMessage(
                    place, entry.offset, entry.timestamp_ms, entry.key, entry.value, entry.headers, None,
                    self._cluster.run,
                )  # fmt: skip
            fetch.position = max(fetch.position, fetch.seen)
            if self._tells_ends and fetch.said_end != fetch.position:
                fetch.said_end = fetch.position
                self._turn += number
                end = KafkaError(KafkaError._PARTITION_EOF)
                return SimMessage(place, fetch.position, 0, error=end, run=self._cluster.run)
        return None

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool = False) -> tuple[int, int] | None:
        """What the newest fetch said."""
        fetch = self._fetches.get((unprefixed(self._cluster.run, partition.topic), partition.partition))
        return (0, fetch.high) if fetch is not None and fetch.high >= 0 else None

    # questions

    def offsets_for_times(self, wanted: Sequence[TopicPartition], timeout: float = 10.0) -> list[TopicPartition]:
        """Last stable offsets: nothing else is asked for."""

        def ask() -> list[TopicPartition]:
            out = []
            for p in wanted:
                view = self._cluster.views[unprefixed(self._cluster.run, p.topic), p.partition]
                out.append(TopicPartition(p.topic, p.partition, view.log.last_stable_offset))
            return out

        return self._cluster.request(ask, timeout)

    def list_topics(self, topic: str, timeout: float = 10.0) -> None:
        """Who leads a topic: there is one node, so only whether it answers."""
        self._cluster.request(lambda: None, timeout)

    def committed(self, wanted: Sequence[TopicPartition], timeout: float = 10.0) -> list[TopicPartition]:
        """Stable committed offsets of the group; waits for transactions that hold some of them."""
        time = self._cluster.time
        deadline = time.now + timeout

        def ask() -> list[TopicPartition] | None:
            offsets = self._cluster.broker.offsets
            places = [(p.topic, p.partition) for p in wanted]
            if any(offsets.is_pending(self._group, place) for place in places):
                return None
            found = offsets.of(self._group)
            out = []
            for place in places:
                entry = found.get(place)
                if entry is None:
                    out.append(TopicPartition(*place, -1001))
                else:
                    out.append(TopicPartition(*place, entry.offset, entry.metadata))
            return out

        while True:
            answer = self._cluster.request(ask, max(0.0, deadline - time.now))
            if answer is not None:
                return answer
            if time.now >= deadline:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "offsets are pending", retriable=True))
            time.me().block(_RETRY)

    def consumer_group_metadata(self) -> GroupMetadata:
        """Who this client is in the group at this moment."""
        self._process.check()
        if self._member_id and self._generation >= 0:
            return GroupMetadata(self._group, self._generation, self._member_id, self._instance)
        return GroupMetadata(self._group)

    # membership

    def subscribe(self, topics: list[str], *, on_assign: Callback, on_revoke: Callback, on_lost: Callback) -> None:
        """Join the group."""
        self._process.check()
        self._topics = topics
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        self._join()
        self._cluster.time.at(_HEARTBEAT, self._beat)

    def close(self) -> None:
        """Revoke what is owned and be gone; a static member does not leave its group."""
        self._cluster.time.me().step()
        if self._owned and self._state == "in":
            owned, self._owned = self._owned, []
            self._callbacks["revoke"](self, owned)
        self._gone()

    def unsubscribe(self) -> None:
        """Revoke what is owned and leave the group."""
        self._cluster.time.me().step()
        if self._owned and self._state == "in":
            owned, self._owned = self._owned, []
            self._callbacks["revoke"](self, owned)
        self._state = "left"
        self._joins += 1

        def leave() -> None:
            now = self._cluster.time.now
            self._cluster.broker.groups.leave(self._group, self._member_id, self._instance, now)
            self._member_id = ""

        self._later(leave)

    def memberid(self) -> str | None:
        """The member's id while the group knows it."""
        return self._member_id or None

    def _gone(self) -> None:
        if not self._closed:
            self._closed = True
            for place in self._fetches:
                self._cluster.views[place].listeners.remove(self._changed)
            self._fetches = {}
            self._cluster.clients.remove(self)

    def disconnected(self) -> None:
        """The broker was restarted: what was asked of it is asked again."""
        if not self._process.alive:
            self._gone()
            return
        if self._state in ("joining", "syncing"):
            self._join()
        for place, fetch in self._fetches.items():
            fetch.looking = False
            self._changed(place)

    def _serve(self) -> None:
        while self._events:
            what, partitions = self._events.popleft()
            self._callbacks[what](self, partitions)
            if what != "assign" and not self._closed:
                self._join()

    def _later(self, effect: Callable[[], None], joins: int | None = None) -> None:
        """A message to the coordinator; one of an earlier attempt to join is void."""

        def run() -> None:
            if not self._closed and (joins is None or joins == self._joins):
                effect()

        self._cluster.later(self._process, run)

    def _join(self) -> None:
        self._joins += 1
        self._state = "joining"
        joins = self._joins

        def ask() -> None:
            request = JoinRequest(
                self._group, self._member_id, self._instance, self._client, "/sim", _SESSION_MS, _REBALANCE_MS,
                "consumer", [("range", json.dumps(self._topics).encode())], True,
            )  # fmt: skip
            self._cluster.broker.groups.join(request, answer, self._cluster.time.now)

        def answer(result: JoinResult) -> None:
            self._later(lambda: self._joined(result), joins)

        self._later(ask, joins)

    def _joined(self, result: JoinResult) -> None:
        if result.code is Code.MEMBER_ID_REQUIRED:
            self._member_id = result.member_id
            self._join()
            return
        if result.code is Code.FENCED_INSTANCE_ID:
            self._fence()
            return
        if result.code is not Code.NONE:
            self._member_id = ""
            self._cluster.time.at(_RETRY, self._join)
            return
        self._member_id, self._generation = result.member_id, result.generation
        self._state = "syncing"
        joins = self._joins
        given: dict[str, bytes] = {}
        if result.leader == result.member_id and result.members:
            given = self._range({m.member_id: (m.instance_id or m.member_id, m.metadata) for m in result.members})

        def ask() -> None:
            self._cluster.broker.groups.sync(
                self._group, result.generation, result.member_id, self._instance, given, answer, self._cluster.time.now
            )

        def answer(synced: SyncResult) -> None:
            self._later(lambda: self._synced(synced), joins)

        self._later(ask, joins)

    def _synced(self, result: SyncResult) -> None:
        if result.code is Code.FENCED_INSTANCE_ID:
            self._fence()
            return
        if result.code is not Code.NONE:
            if result.code is Code.UNKNOWN_MEMBER_ID:
                self._member_id = ""
            self._join()
            return
        self._state = "in"
        self._owned = [TopicPartition(topic, partition) for topic, partition in json.loads(result.assignment or b"[]")]
        self._events.append(("assign", self._owned))
        self._caller.wake()

    def _range(self, members: dict[str, tuple[str, bytes]]) -> dict[str, bytes]:
        """The range assignor: each topic by itself, members by name."""
        out: dict[str, list[tuple[str, int]]] = {member: [] for member in members}
        wanted = {member: set(json.loads(metadata)) for member, (_, metadata) in members.items()}
        for topic in sorted(set().union(*wanted.values())):
            takers = sorted((m for m in members if topic in wanted[m]), key=lambda m: members[m][0])
            count = self._cluster.counts[unprefixed(self._cluster.run, topic)]
            share, more = divmod(count, len(takers))
            at = 0
            for number, member in enumerate(takers):
                size = share + (number < more)
                out[member] += [(topic, p) for p in range(at, at + size)]
                at += size
        return {member: json.dumps(places).encode() for member, places in out.items()}

    def _beat(self) -> None:
        if self._closed or not self._process.alive:
            return
        self._cluster.time.at(_HEARTBEAT, self._beat)
        if self._state in ("in", "revoking") and self._process.awake and not self._cluster.away():
            self._later(self._heartbeat, self._joins)

    def _heartbeat(self) -> None:
        if self._state not in ("in", "revoking"):
            return
        now = self._cluster.time.now
        code = self._cluster.broker.groups.heartbeat(
            self._group, self._generation, self._member_id, self._instance, now
        )  # fmt: skip
        if code is Code.NONE or (self._state == "revoking" and code is Code.REBALANCE_IN_PROGRESS):
            return
        if code is Code.FENCED_INSTANCE_ID:
            self._fence()
            return
        owned, self._owned = self._owned, []
        self._events = deque(event for event in self._events if event[0] != "assign")
        if code is Code.REBALANCE_IN_PROGRESS:
            self._state = "revoking"
            self._events.append(("revoke", owned))
        else:
            self._state = "lost"
            self._generation = -1
            if code is Code.UNKNOWN_MEMBER_ID:
                self._member_id = ""
            self._events.append(("lost", owned))
        self._caller.wake()

    def _fence(self) -> None:
        self._state, self._owned = "fenced", []
        self._fatal = KafkaError(KafkaError.FENCED_INSTANCE_ID, "another member has this instance id", fatal=True)
        self._caller.wake()


def refused(error: BrokerError) -> KafkaException:
    """A refusal as an exception of the client."""
    return KafkaException(KafkaError(int(error.code), str(error)))
