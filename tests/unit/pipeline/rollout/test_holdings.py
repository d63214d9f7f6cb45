"""What a worker holds and when it says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.pipeline.rollout.holdings import Holdings
from headrace.schemas.records import Cancel, Demand, Record, Task


class World:
    """Holdings with a clock that the test moves."""

    def __init__(self) -> None:
        self.time = 100.0
        self.sent: list[Demand] = []
        self.holdings = Holdings(
            "w", 7, capacity=5, heartbeat_seconds=2.0, send=self.sent.append, now=lambda: self.time
        )

    def announce(self, after: float, next_sequence: int = 0) -> int:
        """Move the clock, announce, and count the Demands so far."""
        self.time += after
        self.holdings.announce(next_sequence=next_sequence, inbox=3, versions={0: 4})
        return len(self.sent)


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    return found  # type: ignore[no-any-return]


def test_demand_goes_out_at_once_then_by_heartbeat_or_50_ms_after_a_change() -> None:
    world = World()
    assert world.announce(0) == 1
    assert world.announce(1.9) == 1
    assert world.announce(0.1) == 2
    world.holdings.changed()
    assert world.announce(0.049) == 2
    assert world.announce(0.01) == 3
    assert world.announce(1.0) == 3
    first = world.sent[0]
    assert (first.worker, first.incarnation, first.capacity, first.inbox) == ("w", 7, 5, 3)
    assert [(p.policy, p.version) for p in first.policies] == [(0, 4)]


def test_a_task_is_held_until_dropped_and_a_cancelled_episode_ends(task: Task) -> None:
    async def play() -> None:
        world = World()
        episode = asyncio.create_task(asyncio.sleep(60))
        world.holdings.take(task, episode)
        world.announce(0, next_sequence=13)
        assert [(h.kind, h.group, h.replica, h.attempt) for h in world.sent[-1].held] == [("train", 5, 0, 0)]
        other = Cancel(kind="train", group=5, replica=0, attempt=1, worker="w", incarnation=7)
        world.holdings.cancel(other)
        assert len(world.holdings) == 1
        world.holdings.cancel(Cancel(kind="train", group=5, replica=0, attempt=0, worker="w", incarnation=7))
        assert len(world.holdings) == 0
        with pytest.raises(asyncio.CancelledError):
            await episode
        world.announce(0.06)
        assert world.sent[-1].held == []
        world.holdings.drop(task)
        assert world.holdings.due() > 1, "dropping what is not held is no change"

    asyncio.run(play())


def test_a_farewell_ends_every_lease_and_takes_nothing(task: Task) -> None:
    async def play() -> None:
        world = World()
        world.holdings.take(task, asyncio.create_task(asyncio.sleep(60)))
        world.announce(0, next_sequence=13)
        episodes = world.holdings.cancel_all()
        await asyncio.gather(*episodes, return_exceptions=True)
        world.holdings.bid_farewell(next_sequence=13, inbox=3)
        last = world.sent[-1]
        assert (last.capacity, last.held, last.policies, last.inbox) == (0, [], [], 3)
        assert last.incarnation == 8, "a successor for schedule, and older than any process that starts later"

    asyncio.run(play())


def test_who_gives_everything_up_is_another_incarnation_that_holds_nothing(task: Task) -> None:
    async def play() -> None:
        world = World()
        episode = asyncio.create_task(asyncio.sleep(60))
        world.holdings.take(task, episode)
        world.holdings.suspend(True)
        world.announce(0, next_sequence=13)
        assert world.holdings.give_up() == 8
        world.announce(0.06, next_sequence=13)
        assert [(d.incarnation, d.capacity, len(d.held)) for d in world.sent] == [(7, 0, 1), (8, 0, 0)]
        assert (world.sent[-1].next_sequence, world.sent[-1].policies) == (13, world.sent[0].policies)
        world.holdings.suspend(False)
        world.announce(0.06, next_sequence=13)
        assert (world.sent[-1].incarnation, world.sent[-1].capacity) == (8, 5)
        episode.cancel()

    asyncio.run(play())
