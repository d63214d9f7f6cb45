"""Which version a worker that only evaluates has loaded: the one that its tasks pin, one after the other.

Goes in: the tasks held, and what the weight feed fetched; comes out: versions asked for. A version stays until no held
task pins it, so an episode of many turns is played with the weights that it began with.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from headrace.pipeline.rollout.sampler import Sampler
from headrace.schemas.records import Task

__all__ = ("Pins",)


@dataclass(slots=True)
class Pins:
    """ask: fetches a version of a policy, None: the newest."""

    samplers: Mapping[int, Sampler]
    ask: Callable[[int, int | None], None]
    asked: dict[int, int] = field(default_factory=dict)
    """Policy to the version that is on its way."""

    def follow(self, tasks: Iterable[Task]) -> None:
        """Ask for what is pinned next; the policies beside it that nothing pins are taken as they are newest."""
        pinned: dict[int, set[int]] = {}
        beside: set[int] = set()
        for task in tasks:
            for bound in task.policies:
                if bound.pinned:
                    pinned.setdefault(bound.policy, set()).add(bound.min_version)
                else:
                    beside.add(bound.policy)
        self.asked = {p: v for p, v in self.asked.items() if self.samplers[p].version != v}
        for policy, versions in pinned.items():
            if policy in self.asked or self.samplers[policy].version in versions:
                continue
            self.asked[policy] = min(versions)
            self.ask(policy, self.asked[policy])
            for other in sorted(beside - pinned.keys()):
                self.ask(other, None)

    def refused(self, policy: int, version: int, reason: str) -> None:
        """A version cannot be loaded: what waits for it fails."""
        if self.asked.get(policy) == version:
            del self.asked[policy]
        self.samplers[policy].refuse(version, reason)
