"""The real rollout worker in a ``sim_world``: inbox, holdings, deliveries, weights and episodes around the scripted
engine.

Its threads are processes of the simulation that die with it, its event loop has virtual time, and a decode step lets
time pass. Only the model folder is made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sim_cluster import SimConnection
from sim_threads import sim_threading
from sim_time import Killed, SimProcess, SimStop, SimTime, virtual_time

from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.pipeline import task_to_trajectory
from headrace.pipeline.rollout import delivery, episodes, weights
from headrace.pipeline.rollout.holdings import Holdings
from headrace.pipeline.task_to_trajectory import RolloutWorker
from headrace.pipeline.workflows import single_turn, workflow
from headrace.schemas.records import Prompt, RunManifest

if TYPE_CHECKING:
    from sim_world import ClusterWorld

MODULES = (task_to_trajectory, delivery, episodes, weights, single_turn, workflow)


class WordFolder:
    """A model folder without a model: any prompt is two tokens."""

    stop_token_ids = (2,)

    def __init__(self, path: str) -> None:
        self.path = path

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids of a prompt."""
        return np.array([5, 6], np.int32)

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        """Some text."""
        return "!"


@contextmanager
def virtual_loops(time: SimTime) -> Iterator[None]:
    """Event loops whose clock is the simulation's."""

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return time.now

    class Policy(asyncio.DefaultEventLoopPolicy):
        _loop_factory = Loop

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


@contextmanager
def rollout_parts(world: ClusterWorld) -> Iterator[None]:
    """Give rollout workers the world's clock, store and engine."""
    time = world.driver.time
    replaced: list[tuple[Any, str, Any]] = [
        (task_to_trajectory, "open_store", lambda *_: world.store),
        (task_to_trajectory, "ModelFolder", WordFolder),
        (task_to_trajectory, "tokenizer_digest", lambda _: ""),
        (task_to_trajectory, "load", lambda *_: partial(ScriptedEngine, wait=time.sleep)),
        (task_to_trajectory, "Holdings", partial(Holdings, now=time.time)),
        (task_to_trajectory, "_say", lambda _: None),
        (weights, "threading", sim_threading(time)),
        (weights.WeightFeed, "_tell", lambda *_, **__: None),
    ]
    with ExitStack() as stack:
        stack.enter_context(virtual_time(time, MODULES))
        stack.enter_context(virtual_loops(time))
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


class RealWorker:
    """One incarnation of a rollout worker, as ``flow_world`` and ``flow_check`` know their own."""

    def __init__(self, world: ClusterWorld, number: int) -> None:
        self.world, self.number, self.name = world, number, f"worker-{number}"
        self.thawed_ms = 0
        self.rollout: RolloutWorker | None = None
        self.stop = SimStop(world.driver.time)
        self.process = SimProcess(world.driver.time, self.name, self._run, self._ended)
        self.process.kill_at = world.plan.kill_steps.pop(self.name, -1)

    def _run(self) -> None:
        connection = SimConnection(self.world.driver.cluster).patient(self.stop.is_set)
        self.rollout = RolloutWorker(self.world.config, connection, self.name, self.stop)
        self.rollout.run()

    def _ended(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Killed):
            self.world.violation(f"died: {self.name}: {type(error).__name__}: {error}")
        if isinstance(error, Killed) and self.process.kill_at >= 0:
            self.world.at(self.world.rng.uniform(500, 15_000), lambda: self.world.start_worker(self.number))

    @property
    def incarnation(self) -> int:
        """As its Demand says; -1 before it has joined."""
        holdings = getattr(self.rollout, "_holdings", None)
        return -1 if holdings is None else holdings._incarnation

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.alive

    def die(self) -> None:
        """kill -9."""
        self.process.kill()

    def freeze(self, milliseconds: float) -> None:
        """Stand still for a while."""
        self.process.freeze(milliseconds / 1000)
        self.thawed_ms = self.world.now + round(milliseconds)

    def later(self, delay: float, what: Callable[[], None]) -> None:
        """It follows the weights by itself."""


def run_manifest(world: ClusterWorld) -> RunManifest:
    """What a run is created with."""
    return RunManifest(
        run=world.config.run.id, created_ms=world.now, tokenizer_digest="", policies=world.config.policy_names(),
        partitions=dict(world.driver.partitions),
    )  # fmt: skip
