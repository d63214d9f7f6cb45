"""Whole runs in virtual time whose prompts come again: several epochs and streams, and operators before rollout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from flow_check import violations
from flow_world import Plan, World, prompt

from headrace.schemas.records import Admission, End, Prompt, Skipped


@dataclass(kw_only=True)
class DataPlan(Plan):
    """A plan with ``prompts`` of each stream in each epoch; ``operators`` stand before dynamic sampling."""

    epochs: int = 1
    streams: tuple[str, ...] = ("main",)
    operators: list[dict[str, Any]] = field(default_factory=list)
    max_samples: int = 0

    def settings(self) -> dict[str, Any]:
        """What ``run.toml`` would say."""
        made = super().settings()
        made["streams"] = dict.fromkeys(self.streams, made["streams"]["main"])
        made["operators"] = [*self.operators, *made["operators"]]
        made["trainer"] = {"max_samples": self.max_samples}
        return made


class DataWorld(World):
    """A World with a source for each stream of a DataPlan."""

    plan: DataPlan

    def _publish(self, position: int = 0) -> None:
        for name in self.plan.streams:
            self.publish_stream(name, position)

    def publish_stream(self, name: str, position: int) -> None:
        """Publish some prompts of a stream, and later the rest."""
        if self.now < self.down_until:
            self.at(self.down_until - self.now + 500, lambda: self.publish_stream(name, position))
            return
        total = self.plan.prompts * self.plan.epochs
        more = min(self.rng.randint(1, 9), total - position)
        for n in range(position, position + more):
            epoch, row = divmod(n, self.plan.prompts)
            kinds = {"task_type": ("even", "odd")[row % 2], "columns": {"difficulty": str(row % 10)}}
            self.driver.append("prompts", replace(prompt(row, name), epoch=epoch, position=n, **kinds))
        if more <= 0:
            self.driver.append("prompts", End(reason="epochs", count=position, stream=name))
        else:
            self.at(self.rng.uniform(50, 500), lambda: self.publish_stream(name, position + more))


def data_violations(world: DataWorld) -> list[str]:
    """Every breach of an invariant; each prompt that was published was admitted or skipped by name, once."""
    bad = violations(world, once=False)
    ended: Counter[int] = Counter()
    for record in [*world.driver.records("admissions"), *world.driver.records("ledger")]:
        if isinstance(record, Skipped) or (isinstance(record, Admission) and record.retry == 0):
            ended[record.sources[0].offset] += 1
    bad += [f"prompt {offset} ended {n} times" for offset, n in ended.items() if n > 1]
    log = world.driver.log["prompts", 0]
    unended = [n for n, e in enumerate(log) if isinstance(e.record, Prompt) and not ended[n]]
    endless = all(p.max_steps == 0 for p in world.plan.policies) and not world.plan.max_samples
    if unended and endless:
        bad.append(f"{len(unended)} prompts were neither admitted nor skipped: {unended[:9]}")
    return bad
