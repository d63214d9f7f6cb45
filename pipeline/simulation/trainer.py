"""A trainer in virtual time: turns Manifests into Steps in the seconds that the plan gives (protocol 8)."""

import math
from typing import TYPE_CHECKING

from headrace.pipeline.simulation.measure import StepSeen
from headrace.schemas.records import Manifest, Step

if TYPE_CHECKING:
    from headrace.pipeline.simulation.world import World

__all__ = ("Trainer",)


class Trainer:
    """The trainer of one policy."""

    def __init__(self, world: "World", policy: int) -> None:
        self.policy = policy
        self.version = 0
        self.steps: list[StepSeen] = []
        self._world = world
        self._manifests: list[Manifest] = []
        self._busy = False
        self._idle_since = 0.0

    def take(self, manifest: Manifest) -> None:
        """A batch has been composed."""
        self._manifests.append(manifest)
        self._look()

    def _look(self) -> None:
        if self._busy or len(self._manifests) <= len(self.steps):
            return
        self._busy = True
        manifest = self._manifests[len(self.steps)]
        waited = self._world.clock.now - self._idle_since
        seconds = self._seconds(manifest)
        self._world.clock.after(
            seconds + self._world.plan.machines.publish_seconds, lambda: self._stepped(manifest, waited, seconds)
        )

    def _seconds(self, manifest: Manifest) -> float:
        machines = self._world.plan.machines
        tokens = sum(self._world.length_of(m.group, m.replica, self.policy) for m in manifest.members)
        gpu = machines.train_token_seconds * tokens + machines.train_sample_seconds * len(manifest.members)
        seconds = machines.train_seconds + gpu / machines.trainer_gpus
        if machines.train_sigma:
            spread = machines.train_sigma
            seconds *= math.exp(float(self._world.noise.normal(-(spread**2) / 2, spread)))
        return seconds

    def _stepped(self, manifest: Manifest, waited: float, seconds: float) -> None:
        world = self._world
        self.version += 1
        self._busy, self._idle_since = False, world.clock.now
        world.published(self.policy, self.version)
        self.steps.append(world.measured(manifest, waited, seconds))
        step = Step(
            policy=self.policy, batch=manifest.batch, version=self.version, lineage=0, updates=1, loss=0.0,
            tokens=manifest.tokens, sequences=manifest.sequences, wait_seconds=waited, step_seconds=seconds,
            publish_seconds=world.plan.machines.publish_seconds, delta_bytes=0, changed_share=0.0,
            finished_ms=world.driver.now_ms,
        )  # fmt: skip
        world.write("steps", step, partition=self.policy)
        self._look()
