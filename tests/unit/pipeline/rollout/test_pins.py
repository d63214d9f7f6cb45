"""A worker that only evaluates samples every task with exactly its version, one version after the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rollout.pins import Pins
from headrace.pipeline.rollout.sampler import Sampler
from headrace.pipeline.workflows.workflow import EpisodeFailed
from headrace.schemas.parts import PolicyBound, Sampling
from headrace.schemas.records import Record, Task

PROMPT = np.array([5, 6], np.int32)


class World:
    """Samplers of two policies at version 9, and what was asked for."""

    def __init__(self, model: Path, task: Task) -> None:
        self.samplers = {p: Sampler(p, ScriptedEngine(slots=4), ModelFolder(model)) for p in (0, 1)}
        for sampler in self.samplers.values():
            sampler.load({}, 9)
        self.asked: list[tuple[int, int | None]] = []
        self.pins = Pins(self.samplers, lambda policy, version: self.asked.append((policy, version)))
        self._task = task

    def task(self, *bounds: tuple[int, int, bool]) -> Task:
        made = [PolicyBound(policy=p, min_version=v, pinned=pinned) for p, v, pinned in bounds]
        return replace(self._task, policies=made)

    def comes(self, policy: int, version: int) -> None:
        self.samplers[policy].load({}, version)


@pytest.fixture
def world(tiny_model: Path, examples: dict[str, Record]) -> World:
    task: Any = examples["Task"]
    return World(tiny_model, task)


def test_versions_are_taken_in_order_and_each_stays_until_nothing_pins_it(world: World) -> None:
    old, new = world.task((0, 2, True)), world.task((0, 6, True))
    world.pins.follow([new, old])
    world.pins.follow([new, old])
    assert world.asked == [(0, 2)], "asked for once"
    world.comes(0, 2)
    world.pins.follow([new, old])
    assert world.asked == [(0, 2)], "the loaded one is pinned still"
    world.pins.follow([new])
    assert world.asked == [(0, 2), (0, 6)]
    world.comes(0, 6)
    world.pins.follow([])
    world.pins.follow([new])
    assert len(world.asked) == 2


def test_policies_beside_the_pinned_one_are_taken_as_they_are_newest(world: World) -> None:
    world.pins.follow([world.task((0, 2, True), (1, 0, False))])
    assert world.asked == [(0, 2), (1, None)]
    both = [world.task((0, 2, True), (1, 0, False)), world.task((1, 3, True), (0, 0, False))]
    world.asked.clear()
    world.comes(0, 2)
    world.pins.follow(both)
    assert world.asked == [(1, 3)], "one that is pinned itself is left alone"


def test_a_pinned_request_waits_for_exactly_its_version_up_or_down(world: World) -> None:
    sampler = world.samplers[0]

    async def play(version: int) -> None:
        bound = PolicyBound(policy=0, min_version=version, pinned=True)
        waits = asyncio.create_task(sampler.generate(PROMPT, Sampling(max_new_tokens=3, seed=1), bound))
        for other in (version + 1, version - 1):
            world.comes(0, other)
            await asyncio.sleep(0)
            assert not sampler.busy and sampler.waiting_for == version
        world.comes(0, version)
        while sampler.busy:
            sampler.step()
        assert set((await waits).versions.tolist()) == {version}

    for version in (12, 4):
        asyncio.run(play(version))


def test_a_version_that_cannot_be_had_fails_what_waits_for_it_and_nothing_else(world: World) -> None:
    sampler = world.samplers[0]

    async def play() -> None:
        lost, pinned, free = (
            asyncio.create_task(sampler.generate(PROMPT, Sampling(max_new_tokens=2, seed=1), bound))
            for bound in (
                PolicyBound(policy=0, min_version=2, pinned=True),
                PolicyBound(policy=0, min_version=11, pinned=True),
                PolicyBound(policy=0, min_version=10),
            )
        )
        await asyncio.sleep(0)
        world.pins.follow([world.task((0, 2, True))])
        world.pins.refused(0, 2, "version 2 of main: gone")
        with pytest.raises(EpisodeFailed, match="version 2 of main: gone"):
            await lost
        world.pins.follow([world.task((0, 11, True))])
        assert world.asked == [(0, 2), (0, 11)]
        world.comes(0, 11)
        while sampler.busy:
            sampler.step()
        assert set((await pinned).versions.tolist()) == set((await free).versions.tolist()) == {11}

    asyncio.run(play())
