"""Each rule of the protocol that the stages own, switched off: what a run looks like without it.

``MUTANTS`` maps a rule's name (protocol, in the words of its model) to a function that takes a pytest MonkeyPatch and
breaks the rule. A flow test plays runs until one of them violates an invariant: so the invariants can fail, and the
code that keeps each rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flow_world
import pytest

from headrace.pipeline import credits as credit_figures
from headrace.pipeline import group_to_batch, prompt_to_task
from headrace.pipeline.credits import Credits, PolicyCredits
from headrace.pipeline.group_to_batch import Batch
from headrace.pipeline.kept_groups import KeptGroups
from headrace.pipeline.prompt_to_task import Schedule
from headrace.pipeline.runtime import driver
from headrace.pipeline.trajectory_to_group import _Open
from headrace.schemas.records import Failed

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def mutant(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Register a mutant under its function's name."""
    MUTANTS[function.__name__] = function
    return function


@mutant
def count_batched(patch: pytest.MonkeyPatch) -> None:
    """Admission forgets groups that are batched and not yet trained."""
    room = PolicyCredits.room

    def forgetful(self: PolicyCredits) -> tuple[bool, int]:
        untrained, self.untrained = self.untrained, 0
        result = room(self)
        self.untrained = untrained
        return result

    patch.setattr(PolicyCredits, "room", forgetful)


@mutant
def fresh_b(patch: pytest.MonkeyPatch) -> None:
    """With replay, admission counts whole batches instead of their fresh groups."""
    patch.setattr(credit_figures, "fresh_groups", lambda batch, replay: batch)


@mutant
def edf(patch: pytest.MonkeyPatch) -> None:
    """A batch looks after its own last chances only, not after those of later batches."""

    def short_sighted(take: Any, kept: Any, bounds: Any, fresh: int, start: int, bound: int) -> bool:
        last = start - bound
        due = sum(v <= last for v in kept.values()) + sum(v <= last for v in bounds)
        return bool(sum(kept[g] <= last for g in take) >= min(fresh, due))

    patch.setattr(group_to_batch, "fits", short_sighted)


@mutant
def opened_first(patch: pytest.MonkeyPatch) -> None:
    """A Group counts as kept before its Opened has been read."""
    add_group = KeptGroups.add_group

    def hasty(self: KeptGroups, group: Any, store: Any) -> None:
        add_group(self, group, store)
        if group.group in self.early:
            self.kept[group.group] = self.early.pop(group.group)

    patch.setattr(KeptGroups, "add_group", hasty)


@mutant
def sync_a(patch: pytest.MonkeyPatch) -> None:
    """At depth 0 the configured bound holds, not lag."""
    init = Batch.__init__

    def lax(self: Batch, config: Any, partition: int) -> None:
        init(self, config, partition)
        self.bound = max(self.bound, self.settings.max_staleness)

    patch.setattr(Batch, "__init__", lax)


@mutant
def room_only(patch: pytest.MonkeyPatch) -> None:
    """A group opens credits for every policy of its stream, room or not."""
    openings = prompt_to_task.openings

    def generous(name: str, only: Any, config: Any, policies: Any) -> list[tuple[int, int]]:
        ready = openings(name, only, config, policies)
        active = [p for p in config.stream_policies(name) if not policies[p].stopped]
        return [(p, policies[p].room()[1]) for p in active] if ready else []

    patch.setattr(prompt_to_task, "openings", generous)


@mutant
def recount(patch: pytest.MonkeyPatch) -> None:
    """After a rollback, batches to be trained again do not count as batched."""

    moved = PolicyCredits.moved

    def forgetful(self: PolicyCredits, version: int, batch: int, *, resumed: bool) -> bool:
        first = moved(self, version, batch, resumed=resumed)
        self.untrained = sum(n for k, n in self.sizes.items() if k > self.stepped)
        return first

    patch.setattr(PolicyCredits, "moved", forgetful)


@mutant
def floor(patch: pytest.MonkeyPatch) -> None:
    """lag reaches below the version of the last Resumed."""
    patch.setattr(PolicyCredits, "min_version", lambda self: max(0, self.version - self.lag))


@mutant
def incarnation(patch: pytest.MonkeyPatch) -> None:
    """A worker takes tasks that name another incarnation."""
    patch.setattr(flow_world.Worker, "ignores_incarnation", True)


@mutant
def late_admission(patch: pytest.MonkeyPatch) -> None:
    """Groups are admitted as soon as there is a credit, whether a worker has room or not."""
    dispatch = Schedule._dispatch

    class Anybody:
        name = ""

        def free(self) -> int:
            return 1

        def takes(self, kind: str, policies: Any) -> bool:
            return True

        def has_loaded(self, bounds: Any) -> bool:
            return True

    def eager(self: Schedule, context: Any) -> None:
        while self._admit([Anybody()], context):  # type: ignore[list-item]
            pass
        dispatch(self, context)

    patch.setattr(Schedule, "_dispatch", eager)


@mutant
def all_reported(patch: pytest.MonkeyPatch) -> None:
    """A group waits for its deadline although every replica has reported."""
    patch.setattr(_Open, "all_reported", lambda self: False)


@mutant
def read_first(patch: pytest.MonkeyPatch) -> None:
    """Silence, deadlines and timers are judged before the inputs have been read to their ends."""
    patch.setattr(driver._Context, "caught_up", lambda self, *topics: True)
    fire = driver.TopologyDriver._fire

    def at_once(self: Any, task: Any, context: Any) -> bool:
        due = task.timers.next_due_ms()
        if due is not None and due <= self.now_ms:
            task.barrier = (self.now_ms, {})
        return fire(self, task, context)

    patch.setattr(driver.TopologyDriver, "_fire", at_once)


@mutant
def grace(patch: pytest.MonkeyPatch) -> None:
    """Time without a broker counts as silence and towards timers."""
    patch.setattr(driver._Context, "outage_end_ms", lambda self: 0)


@mutant
def first_end(patch: pytest.MonkeyPatch) -> None:
    """Every ending record of a credit counts, not only the first."""
    end = Credits.end

    def again(self: Credits, group: int, policy: int) -> Any:
        found = end(self, group, policy)
        if found is None:
            self.policies[policy].rolling -= 1
        return found

    patch.setattr(Credits, "end", again)


@mutant
def failed_record(patch: pytest.MonkeyPatch) -> None:
    """Nobody tells assemble of a replica that is given up."""
    lost = Schedule._lost

    def silent(self: Schedule, work: Any, loss: Any, context: Any) -> None:
        emit = context.emit
        patch.setattr(type(context), "emit", lambda own, topic, record, **where: (
            None if isinstance(record, Failed) else emit(topic, record, **where)
        ))  # fmt: skip
        try:
            lost(self, work, loss, context)
        finally:
            patch.setattr(type(context), "emit", emit.__func__)

    patch.setattr(Schedule, "_lost", silent)


@mutant
def end_in_ledger(patch: pytest.MonkeyPatch) -> None:
    """No End is written to the ledgers."""
    patch.setattr(Schedule, "_end_ledgers", lambda self, context: None)
