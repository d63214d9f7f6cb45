"""Candidates for tests of serving operators, and a driver of ``batch`` that opens, keeps and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from stage_feed import make_config, make_driver, make_members, make_opened, make_step, of_type

from headrace.pipeline.operators.serving import Candidate, Moment
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.schemas.records import Closed, Group, Kept, Manifest


def make_candidate(number: int, *, uses: int = 0, entered: int = 0, last_used: int = 0, **fields: Any) -> Candidate:
    """A group with these fields of its Group record."""
    group = cast(Group, make_members(number)[-1])
    return Candidate(group=replace(group, **fields), uses=uses, entered=entered, last_used=last_used)


def make_moment(batch: int = 1, start: int = 0, bound: int = 9, seed: int = 0) -> Moment:
    """The batch that is composed."""
    return Moment(seed=seed, policy="main", batch=batch, start_version=start, bound=bound)


class ServingFeed:
    """``batch`` alone, of one policy with batches of ``size`` groups; what it decided, in short."""

    def __init__(self, *operators: dict[str, Any], size: int = 2, trainer: Any = None, **policy: Any) -> None:
        config = make_config(
            policies={"main": {"model": "none", **policy}}, operators=operators,
            trainer={"batch_groups": size, **(trainer or {})},
        )  # fmt: skip
        self.driver: TopologyDriver = make_driver(config, "batch")
        self.steps = 0

    def open(self, groups: Iterable[int], version: int = 0) -> None:
        """Credits open at a min version."""
        for group in groups:
            self.driver.append("ledger", make_opened(group, version))
        self.driver.settle()

    def keep(self, group: int, oldest: int = 0, *, settle: bool = True, **fields: Any) -> None:
        """A group closes and is kept; ``fields`` are of its Group record."""
        *members, closed = make_members(group, oldest)
        for record in (*members, replace(cast(Group, closed), **fields)):
            self.driver.append("groups", record)
        self.driver.append("ledger", Kept(policy=0, group=group))
        if settle:
            self.driver.settle()

    def step(self) -> None:
        """The next batch has been trained."""
        self.steps += 1
        self.driver.append("steps", make_step(self.steps))
        self.driver.settle()

    def manifests(self) -> list[Manifest]:
        """The batches so far."""
        return of_type(self.driver, "manifests", Manifest)

    def batches(self) -> list[list[int]]:
        """Groups of the batches in the order of their Manifests."""
        return [list(dict.fromkeys(m.group for m in r.members)) for r in self.manifests()]

    def fresh(self) -> list[list[int]]:
        """Fresh groups of the batches, ascending."""
        return [sorted({m.group for m in r.members if m.use == 0}) for r in self.manifests()]

    def replayed(self) -> list[list[int]]:
        """Replayed groups of the batches, ascending."""
        return [sorted({m.group for m in r.members if m.use > 0}) for r in self.manifests()]

    def closed(self) -> list[Closed]:
        """Credits that ended without training."""
        return of_type(self.driver, "ledger", Closed)
