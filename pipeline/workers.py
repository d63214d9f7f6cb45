"""The rollout workers of a run as their Demand shows them, and the records by which a person holds one or lets it go.

In: a connection; out: what each worker said last, and Suspend or Resume in its inbox, with the worker's own Demand as
the proof that it has obeyed. A worker obeys between two decode steps; one that is started again is not suspended.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import headrace
from headrace.connectors.kafka import Connection
from headrace.pipeline.run_records import created_run
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.parts import HeldTask
from headrace.schemas.records import Demand, Resume, RunManifest, Suspend

__all__ = ("Pool", "State", "WorkerView", "choose", "is_suspended", "steer")

State = Literal["sampling", "idle", "suspended", "silent", "gone"]
"""Holds tasks; has room and holds none; asks for none until Resume; missed its heartbeats; said goodbye."""

_LOOK_SECONDS = 0.1
_WRITE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker by its newest Demand.

    slots: tasks that it runs at once, one less than it takes; -1 where it never announced room in what was read.
    capacity: tasks that it would take now. versions: loaded version by policy. seen_ms: when it spoke last, by its own
    clock.
    """

    worker: str
    role: str
    state: State
    slots: int
    capacity: int
    tasks: dict[str, int]
    versions: dict[str, int]
    seen_ms: int
    incarnation: int
    inbox: int
    held: list[HeldTask] = field(default_factory=list)


def is_suspended(demand: Demand) -> bool:
    """Whether a worker takes no tasks though it has weights: one that leaves tells of none."""
    return demand.capacity == 0 and bool(demand.policies)


class Pool:
    """Folds ``demand``; ``catch_up`` reads to its present end.

    minutes: how far before the newest Demand to begin. Raises HeadraceError for a run that was never created,
    MissingTopic for none at all.
    """

    def __init__(self, connection: Connection, minutes: float) -> None:
        manifest, self.ended = created_run(connection)
        """The run's end mark is there: no worker is any more."""
        self._connection = connection
        self._policies = manifest.policies
        self._lease_ms = 1000 * _lease_seconds(manifest)
        self._newest: dict[str, Demand] = {}
        self._slots: dict[str, int] = {}
        self._next = self._beginning(minutes)

    def catch_up(self) -> None:
        """Read what has come since the last call. Raises BrokerUnreachable."""
        for raw in self._connection.read_topic("demand", self._next):
            self._next[raw.partition] = raw.offset + 1
            record = raw.decoded_if_ours()
            if isinstance(record, Demand):
                self._newest[record.worker] = record
                if record.capacity:
                    self._slots[record.worker] = record.capacity - 1

    def demand(self, worker: str) -> Demand:
        """What a worker said last. Raises KeyError."""
        return self._newest[worker]

    def views(self, now_ms: int) -> list[WorkerView]:
        """Every worker that was heard, by name."""
        return [self.view(name, now_ms) for name in sorted(self._newest)]

    def view(self, worker: str, now_ms: int) -> WorkerView:
        """One worker at a time in milliseconds since the epoch. Raises KeyError."""
        last = self._newest[worker]
        return WorkerView(
            worker=worker, role=last.role, state=self._state(last, now_ms), slots=self._slots.get(worker, -1),
            capacity=last.capacity, tasks=dict(sorted(Counter(task.kind for task in last.held).items())),
            versions={self._name(hosted.policy): hosted.version for hosted in last.policies},
            seen_ms=last.sent_ms, incarnation=last.incarnation, inbox=last.inbox, held=list(last.held),
        )  # fmt: skip

    def _state(self, last: Demand, now_ms: int) -> State:
        if self.ended or (last.capacity == 0 and not is_suspended(last)):
            return "gone"
        if now_ms - last.sent_ms > self._lease_ms:
            return "silent"
        if is_suspended(last):
            return "suspended"
        return "sampling" if last.held else "idle"

    def _name(self, policy: int) -> str:
        return self._policies[policy] if policy < len(self._policies) else str(policy)

    def _beginning(self, minutes: float) -> dict[int, int]:
        """Where to read from, by the time of the newest record rather than by now: a run may have ended long ago."""
        ends = self._connection.end_offsets("demand")
        last = self._connection.read_topic("demand", {p: end - 1 for p, end in ends.items() if end > 0})
        newest = max((raw.timestamp_ms for raw in last), default=0)
        return self._connection.offsets_since("demand", max(0, newest - round(60_000 * minutes)))


def _lease_seconds(manifest: RunManifest) -> float:
    """``rollout.lease_seconds`` of the run; the default where its manifest holds no configuration that can be read."""
    try:
        return RunConfig.model_validate_json(manifest.config).rollout.lease_seconds
    except ValueError:
        return RunConfig.model_fields["rollout"].default.lease_seconds  # type: ignore[no-any-return]


def choose(
    views: Sequence[WorkerView], names: Sequence[str], record: type[Suspend] | type[Resume], *, hand_over: bool = False,
    now_ms: int,
) -> list[WorkerView]:  # fmt: skip
    """The workers that names or patterns mean, as far as there is something to do for them.

    Raises ConfigurationError for a name that means nobody, or a worker that cannot obey or has done so already; a
    pattern passes over these unless it means no other.
    """
    by_name = {view.worker: view for view in views}
    chosen: dict[str, WorkerView] = {}
    for name in names:
        meant = [by_name[name]] if name in by_name else [v for v in views if fnmatchcase(v.worker, name)]
        if not meant:
            if not views:
                raise ConfigurationError("no rollout worker of the run was ever heard: none has joined yet")
            known = ", ".join(by_name)
            raise ConfigurationError(f"no worker is called {name}; heard were {known} (headrace workers list)")
        obstacles = {view.worker: _obstacle(view, record, hand_over, now_ms) for view in meant}
        if all(obstacles.values()):
            raise ConfigurationError("\n".join(obstacles.values()))
        chosen.update({view.worker: view for view in meant if not obstacles[view.worker]})
    return list(chosen.values())


def _obstacle(view: WorkerView, record: type[Suspend] | type[Resume], hand_over: bool, now_ms: int) -> str:
    """Why a worker cannot be suspended or resumed, and what to do; empty when it can."""
    ago = f"{max(0, now_ms - view.seen_ms) / 1000:.0f} s ago"
    if view.state == "gone":
        return f"{view.worker} left {ago}; its tasks have gone to others"
    if view.state == "silent":
        return f"{view.worker} spoke last {ago}: it is dead or cut off, and its tasks go to others; see its log"
    if record is Resume and view.state != "suspended":
        return f"{view.worker} is not suspended: it is {view.state}"
    if record is Suspend and view.state == "suspended" and not (hand_over and view.held):
        return f"{view.worker} is suspended already; headrace workers resume {view.worker} lets it go on"
    return ""


def steer(
    connection: Connection, pool: Pool, chosen: Iterable[WorkerView], record: type[Suspend] | type[Resume],
    *, hand_over: bool = False, seconds: float,
) -> list[WorkerView]:  # fmt: skip
    """Write the record to each worker and wait until each has said by its Demand that it obeys; gives what they said.

    hand_over: a suspended worker gives up its tasks. Raises HeadraceError naming those who have not obeyed within
    ``seconds``.
    """
    waited = {view.worker: view for view in chosen}
    _write(connection, waited.values(), record, hand_over)
    obeyed: dict[str, WorkerView] = {}
    until = time.monotonic() + seconds
    while len(obeyed) < len(waited):
        pool.catch_up()
        for name, before in waited.items():
            now = pool.demand(name)
            if is_suspended(now) == (record is Suspend) and not (hand_over and now.incarnation == before.incarnation):
                obeyed[name] = pool.view(name, _now_ms())
        if len(obeyed) < len(waited) and time.monotonic() > until:
            missing = ", ".join(f"{n} ({pool.view(n, _now_ms()).state})" for n in waited if n not in obeyed)
            raise HeadraceError(
                f"{record.__name__} is in the inbox of {missing}, but was not obeyed within {seconds:g} s: a worker in "
                "the middle of a long step obeys after it; headrace workers list shows who has"
            )
        if len(obeyed) < len(waited):
            time.sleep(_LOOK_SECONDS)
    return [obeyed[name] for name in waited]


def _write(
    connection: Connection, views: Iterable[WorkerView], record: type[Suspend] | type[Resume], hand_over: bool
) -> None:
    """Raises HeadraceError when the broker does not take them all."""
    producer = connection.producer("workers")
    failed: list[str] = []

    def delivered(error: object, _: object) -> None:
        if error is not None:
            failed.append(str(error))

    for view in views:
        made = Suspend(worker=view.worker, hand_over=hand_over) if record is Suspend else Resume(worker=view.worker)
        headers = headers_of(made, connection.run, headrace.__version__)
        connection.produce(
            producer, "tasks", encode(made), partition=view.inbox, headers=headers, on_delivery=delivered
        )
    left = producer.flush(_WRITE_SECONDS)
    if failed or left:
        why = failed[0] if failed else f"no answer within {_WRITE_SECONDS:.0f} s"
        raise HeadraceError(f"{record.__name__} could not be written to {connection.topic('tasks')}: {why}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
