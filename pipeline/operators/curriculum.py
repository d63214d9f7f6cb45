"""Which difficulty is trained when: shares of pools that change by phases, or a ceiling that rises.

The difficulty of a prompt is a number in one of its columns. With `bounds` and `phases` prompts fall into pools, pool n
up to and excluding `bounds[n]`, and each phase says the shares of the pools among admitted groups; they are met exactly
(see `quota`), counted from the phase's beginning. With `ceiling` a prompt is admitted up to a difficulty that is
interpolated between points `[when, difficulty]`. `when` counts versions of the policy or admitted groups, by `clock`.

A prompt that is dropped comes again in the next epoch; with one epoch it is not trained, and the ledger says so.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import (
    Candidate,
    PromptConfiguration,
    PromptContext,
    PromptOperator,
    class_of,
)
from headrace.pipeline.operators.quota import Quota

__all__ = ("Curriculum", "CurriculumConfiguration", "Phase")

_STATE = b"state"


class Phase(BaseModel):
    """``start``: when the phase begins, the first at 0. ``weights``: one a pool, 0 leaves it out."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    start: int = Field(0, ge=0)
    weights: list[float]


class CurriculumConfiguration(PromptConfiguration):
    """``column``: where the difficulty stands. ``bounds``, ``phases``: pools and their shares. ``ceiling``: points of a
    rising limit instead. ``clock``: what ``start`` and points count. ``unknown``: what becomes of a prompt whose column
    is no number.
    """

    column: str = "difficulty"
    bounds: list[float] = Field(default_factory=list)
    phases: list[Phase] = Field(default_factory=list)
    ceiling: list[tuple[int, float]] = Field(default_factory=list)
    clock: Literal["versions", "groups"] = "versions"
    unknown: Literal["drop", "admit"] = "drop"

    @model_validator(mode="after")
    def _one_of_two(self) -> "CurriculumConfiguration":
        if bool(self.bounds and self.phases) == bool(self.ceiling):
            raise ValueError("give bounds and phases, or a ceiling")
        if self.bounds != sorted(set(self.bounds)):
            raise ValueError("bounds must rise")
        starts = [phase.start for phase in self.phases] or [at for at, _ in self.ceiling]
        if starts != sorted(set(starts)) or (self.phases and starts[0] != 0):
            raise ValueError("phases begin at 0, and what follows starts later")
        for phase in self.phases:
            if len(phase.weights) != len(self.bounds) + 1 or min(phase.weights) < 0 or not any(phase.weights):
                raise ValueError(
                    f"{len(self.bounds)} bounds make {len(self.bounds) + 1} pools: give each a weight >= 0"
                )
        return self


class Curriculum(PromptOperator):
    """Drops what is not due: ``pool_closed``, ``pool_ahead``, ``too_difficult``, ``difficulty_unknown``."""

    Configuration: ClassVar[type[OperatorConfiguration]] = CurriculumConfiguration

    def __init__(self, configuration: CurriculumConfiguration) -> None:
        self._given = configuration
        self._clock = 0
        self._phase = 0
        self._quota = Quota({})

    def open(self, context: PromptContext) -> None:
        """Read the clock and the counts of the phase."""
        saved = context.store().get(_STATE)
        self._clock, self._phase, counts = json.loads(saved) if saved else (0, 0, {})
        self._quota = self._quota_of(self._phase)
        self._quota.counts.update(counts)

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        """Admit what the phase or the ceiling lets pass."""
        difficulty = self.difficulty_of(candidate)
        if math.isnan(difficulty):
            if self._given.unknown == "admit":
                context.admit()
            else:
                found = class_of(candidate.prompt, self._given.column)
                context.drop("difficulty_unknown", f"column {self._given.column!r} holds {found[:40]!r}, no number")
        elif self._given.ceiling:
            limit = self.limit(self._clock)
            if difficulty <= limit:
                context.admit()
            else:
                context.drop("too_difficult", f"difficulty {difficulty:g}, at {self._clock} the ceiling is {limit:g}")
        else:
            self._by_pool(difficulty, context)

    def _by_pool(self, difficulty: float, context: PromptContext) -> None:
        pool = self.pool_of(difficulty)
        name, share = str(pool), self._quota.share(str(pool))
        if share == 0:
            context.drop(
                "pool_closed", f"difficulty {difficulty:g} is pool {pool}, which phase {self._phase} leaves out"
            )
        elif self._quota.surplus(name) > 1 - 1e-9:
            counts = ", ".join(f"{n}: {count}" for n, count in self._quota.counts.items())
            context.drop("pool_ahead", f"pool {pool} has its share of {share:g} in phase {self._phase} ({counts})")
        else:
            context.admit()

    def admitted(self, candidate: Candidate, context: PromptContext) -> None:
        """Count the group in its pool; the clock of groups goes on."""
        difficulty = self.difficulty_of(candidate)
        if not math.isnan(difficulty) and not self._given.ceiling:
            self._quota.add(str(self.pool_of(difficulty)))
        if self._given.clock == "groups":
            self._advance(self._clock + 1)
        self._save(context)

    def moved(self, version: int, context: PromptContext) -> None:
        """The clock of versions goes on."""
        if self._given.clock == "versions" and version > self._clock:
            self._advance(version)
            self._save(context)

    def difficulty_of(self, candidate: Candidate) -> float:
        """The number in the prompt's column; NaN when there is none."""
        try:
            return float(class_of(candidate.prompt, self._given.column))
        except ValueError:
            return math.nan

    def pool_of(self, difficulty: float) -> int:
        """Pool of a difficulty, from 0."""
        return bisect_right(self._given.bounds, difficulty)

    def limit(self, clock: int) -> float:
        """The ceiling at a time: linear between two points, constant before the first and after the last."""
        points: Sequence[tuple[int, float]] = self._given.ceiling
        place = bisect_right([at for at, _ in points], clock)
        if place == 0 or place == len(points):
            return points[max(0, place - 1)][1]
        (from_, low), (to, high) = points[place - 1], points[place]
        return low + (high - low) * (clock - from_) / (to - from_)

    def _advance(self, clock: int) -> None:
        self._clock = clock
        starts = [phase.start for phase in self._given.phases]
        phase = max(0, bisect_right(starts, clock) - 1)
        if phase != self._phase:
            self._phase, self._quota = phase, self._quota_of(phase)

    def _quota_of(self, phase: int) -> Quota:
        weights = self._given.phases[phase].weights if self._given.phases else []
        return Quota({str(pool): weight for pool, weight in enumerate(weights)})

    def _save(self, context: PromptContext) -> None:
        state = [self._clock, self._phase, self._quota.counts]
        context.store().put(_STATE, json.dumps(state, separators=(",", ":")).encode())
        context.metrics.gauge("curriculum_phase", self._phase)
        if self._given.ceiling:
            context.metrics.gauge("curriculum_ceiling", self.limit(self._clock))
