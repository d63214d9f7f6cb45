"""The shipped workflows keep every promise, and one that breaks a promise is found by its name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from headrace.connectors.conformance import assert_conforms
from headrace.pipeline.workflows.conformance import conformance
from headrace.pipeline.workflows.single_turn import SingleTurn
from headrace.pipeline.workflows.workflow import PolicySession, Scoring
from headrace.schemas.records import Task, Trajectory

COUNTER = itertools.count()
Engines = Mapping[int, PolicySession]


@pytest.mark.parametrize("name", ["single_turn", "solver_verifier"])
def test_shipped_workflows_conform(name: str) -> None:
    assert_conforms("workflows", name)


class Mistaken(SingleTurn):
    """Says that it is of another group."""

    async def run(self, task: Task, engines: Engines, rewards: Scoring) -> Trajectory:
        return replace(await super().run(task, engines, rewards), group=task.group + 1)


class Drawing(SingleTurn):
    async def run(self, task: Task, engines: Engines, rewards: Scoring) -> Trajectory:
        return replace(await super().run(task, engines, rewards), completion_text=str(next(COUNTER)))


class Forgiving(SingleTurn):
    """Makes an answer of what could not be sampled: the last one that could."""

    last: Trajectory | None = None

    async def run(self, task: Task, engines: Engines, rewards: Scoring) -> Trajectory:
        try:
            self.last = await super().run(task, engines, rewards)
        except Exception:
            assert self.last is not None
            return self.last
        return self.last


class Clinging(SingleTurn):
    """Goes on when it is cancelled."""

    async def run(self, task: Task, engines: Engines, rewards: Scoring) -> Trajectory:
        try:
            return await super().run(task, engines, rewards)
        except asyncio.CancelledError:
            await asyncio.sleep(30)
            raise


class Sharing(SingleTurn):
    """Keeps the task in itself while it waits."""

    async def run(self, task: Task, engines: Engines, rewards: Scoring) -> Trajectory:
        self.task = task
        await asyncio.sleep(0)
        return await super().run(self.task, engines, rewards)


@pytest.mark.parametrize(
    ("cls", "broken", "says"),
    [
        (Mistaken, {"trajectories"}, "the trajectory is of"),
        (Drawing, {"seeds"}, "gives another episode again"),
        (Forgiving, {"failure"}, "gives a usable trajectory"),
        (Clinging, {"cancel"}, "goes on when it is cancelled"),
        (Sharing, {"together"}, "episodes that overlap"),
    ],
)
def test_a_broken_promise_is_found(
    cls: type[SingleTurn], broken: set[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = conformance(f"{__name__}:{cls.__name__}", {})
    found = {check.name: check.detail for check in checks if not check.passed}
    assert broken <= set(found), found
    assert any(says in detail for detail in found.values()), found
