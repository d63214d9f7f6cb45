"""Which runs on a cluster may go, by rules that never touch one that anybody works on.

A run is *live* while one of its consumer groups has members or a record is younger than ``quiet``; live runs stay,
whatever else is true of them. *Finished* ones (their end mark stands) go after one time, *orphaned* ones (neither ended
nor touched for long) after a longer one. *Empty* ones stay: topics do not tell their age, and these may be new.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.connectors.cluster_runs import RunTopics, busy_groups, has_record_since, runs_on
from headrace.connectors.kafka import Connection
from headrace.connectors.stores.store import ObjectStore
from headrace.pipeline.run_records import read_records
from headrace.schemas.access import LAUNCHER
from headrace.schemas.config import KafkaConfig
from headrace.schemas.records import RunEnd

__all__ = ("Rules", "Verdict", "delete_run", "judge", "verdicts")

DAY_SECONDS = 86_400.0
_ALWAYS = frozenset({"run", "prompts", "demand", "ledger", "trajectories"})
"""Without all of these, a topic's name looks like ours by accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Times in seconds."""

    quiet: float = 3600.0
    """A run with a younger record is live."""
    finished_after: float = 7 * DAY_SECONDS
    """Age of the end mark from which a finished run goes."""
    orphaned_after: float = 30 * DAY_SECONDS
    """Silence after which a run without an end mark goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to happen with a run, and why. state: live, finished, stopped, orphaned, empty, or foreign."""

    run: str
    state: str
    goes: bool
    reason: str
    topics: int


def verdicts(config: KafkaConfig, bootstrap: str, rules: Rules) -> Iterator[Verdict]:
    """A verdict for every run on the cluster. Raises KafkaFailure."""
    for found in runs_on(Connection.of(config, "janitor", bootstrap)):
        yield judge(Connection.of(config, found.run, bootstrap), found, rules)


def judge(connection: Connection, found: RunTopics, rules: Rules) -> Verdict:
    """The verdict on one run. Raises KafkaFailure."""
    state, goes, reason = _judge(connection, found, rules)
    return Verdict(run=found.run, state=state, goes=goes, reason=reason, topics=len(found.topics))


def _judge(connection: Connection, found: RunTopics, rules: Rules) -> tuple[str, bool, str]:
    now = time.time()
    missing = sorted(_ALWAYS - set(found.topics))
    if missing:
        return "foreign", False, f"has no topic {', '.join(missing)}: perhaps another application's; delete it by hand"

    def silent_for(seconds: float) -> bool:
        return not has_record_since(connection, found.topics, int((now - seconds) * 1000))

    busy = busy_groups(connection)
    if busy:
        return "live", False, f"{', '.join(busy)} has members"
    if not silent_for(rules.quiet):
        return "live", False, f"something was written within {rules.quiet:.0f} s"
    end = _end_of(connection) if "run" in found.topics else None
    if end is not None:
        age = now - end.ended_ms / 1000
        return "finished", age >= rules.finished_after, f"ended {_ago(age)} by {end.reason}"
    if not has_record_since(connection, found.topics, 0):
        return "empty", False, "no record yet: its topics were made ahead, or its creation died; delete it by hand"
    if silent_for(rules.orphaned_after):
        return "orphaned", True, f"did not end, and nothing was written for {_ago(rules.orphaned_after)}"
    return "stopped", False, f"did not end: headrace run --resume goes on; orphaned after {_ago(rules.orphaned_after)}"


def delete_run(
    config: KafkaConfig, bootstrap: str, run: str, rules: Rules, store: ObjectStore | None = None
) -> tuple[Verdict | None, int]:
    """Delete a run's topics, groups and (given a store) offloaded arrays, if it may still go at this moment.

    Returns the verdict of this moment (None: it is gone already) and how many objects went. Arrays go last, so that
    topics never refer to what is gone. Raises KafkaFailure and the store's errors; it may be repeated.
    """
    found = next((one for one in runs_on(Connection.of(config, "janitor", bootstrap)) if one.run == run), None)
    if found is None:
        return None, 0
    connection = Connection.of(config, run, bootstrap, role=LAUNCHER)
    verdict = judge(connection, found, rules)
    if not verdict.goes:
        return verdict, 0
    connection.delete_run_topics()
    gone = 0
    for info in list(store.list(f"runs/{run}/blobs/")) if store is not None else ():
        store.delete(info.key)  # type: ignore[union-attr]
        gone += 1
    return verdict, gone


def _end_of(connection: Connection) -> RunEnd | None:
    ends = [record for _, record in read_records(connection, "run") if isinstance(record, RunEnd)]
    return ends[-1] if ends else None


def _ago(seconds: float) -> str:
    for size, name in ((DAY_SECONDS, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"
