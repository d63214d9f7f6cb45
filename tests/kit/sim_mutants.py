"""Rules of the protocol that trainers and rollout workers own, switched off in the real code.

Like ``flow_mutants``: a function takes a pytest MonkeyPatch and breaks the rule of its name; runs of the plan named
beside it, on the simulated cluster, then violate an invariant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from headrace.pipeline import task_to_trajectory
from headrace.schemas.records import Trajectory
from headrace.trainers import batch_to_step, lineage
from headrace.trainers.batch_to_step import Trainer
from headrace.trainers.lineage import Plan, Point
from headrace.trainers.step_log import StepLog

SIM_MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {}


def mutant(plan: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], Callable[[pytest.MonkeyPatch], None]]:
    """Register a mutant under its function's name, with the plans that show it."""

    def register(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
        SIM_MUTANTS[function.__name__] = (function, plan)
        return function

    return register


@mutant("racing_plan")
def late_step(patch: pytest.MonkeyPatch) -> None:
    """A head that lacks its Step never gets it."""
    decide = batch_to_step.decide

    def silent(*given: Any) -> Plan:
        return dataclasses.replace(decide(*given), announce=None)

    patch.setattr(batch_to_step, "decide", silent)


@mutant("racing_plan")
def fence_first(patch: pytest.MonkeyPatch) -> None:
    """A trainer reads the steps and the head, and fences its predecessor afterwards."""
    decide = Trainer._decide

    def late(self: Trainer) -> Any:
        log, versions = self._lead_log, self._lead_versions
        fence, read_head = log.open, versions.read_head

        def read_then_fence() -> Point | None:
            del versions.read_head, log.open
            head = read_head()
            fence()
            return head

        log.open = lambda: None  # type: ignore[method-assign]
        versions.read_head = read_then_fence  # type: ignore[method-assign]
        return decide(self)

    patch.setattr(Trainer, "_decide", late)


@mutant("racing_plan")
def prove(patch: pytest.MonkeyPatch) -> None:
    """Who finds its version taken goes on without a commit that would show that it is fenced."""
    commit = StepLog.commit

    def trusting(self: StepLog, records: Any, offsets: Any) -> None:
        if records:
            commit(self, records, offsets)

    patch.setattr(StepLog, "commit", trusting)


@mutant("returning_plan")
def by_lineage(patch: pytest.MonkeyPatch) -> None:
    """Version numbers are compared, not (lineage, batch)."""

    decide = batch_to_step.decide

    def newest(seen: Any, checkpoints: Any) -> list[Point]:
        return sorted(checkpoints, key=lambda point: point.version)[-1:]

    def by_version(*given: Any) -> Plan:
        with patch.context() as inner:
            inner.setattr(lineage, "ancestry", newest)
            return decide(*given)

    patch.setattr(batch_to_step, "decide", by_version)


SIM_MUTANTS["lineage"] = SIM_MUTANTS.pop("by_lineage")


@mutant("late_plan")
def ended_mark(patch: pytest.MonkeyPatch) -> None:
    """A worker that starts does not look for the run's end mark."""
    patch.setattr(task_to_trajectory, "RunEnd", Trajectory)
