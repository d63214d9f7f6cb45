"""Prompts that the policy solves nearly always are not rolled out any more.

AstraFlow's curator ``filter_solved`` (its code at 343e8088): of every prompt an average of solve rates is kept,
``rate = decay * rate + (1 - decay) * share of rewards > 0`` from ``prior`` on, and the prompt is admitted while
``rate < threshold``. With the defaults 29 groups in which everything is solved stop a prompt. Two things differ: only
complete groups teach, and the rate is that of the id that the run knows the prompt by, whatever its column is called.

A prompt that is dropped brings no outcome, so it stays out; `max_skips` bounds what an all-solved set does to a run.
"""

from typing import ClassVar

from pydantic import Field

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_history import PromptHistory
from headrace.pipeline.operators.prompt_operator import (
    Candidate,
    Outcome,
    PromptConfiguration,
    PromptContext,
    PromptOperator,
)

__all__ = ("FilterSolved", "FilterSolvedConfiguration")


class FilterSolvedConfiguration(PromptConfiguration):
    """``threshold``: average solve rate from which on a prompt is dropped. ``decay``: weight of what was before.
    ``prior``: rate of a prompt that was never rolled out. ``remember``: prompts whose rate is kept at most.
    """

    threshold: float = Field(0.95, gt=0, le=1)
    decay: float = Field(0.9, ge=0, lt=1)
    prior: float = Field(0.0, ge=0, lt=1)
    remember: int = Field(1_000_000, ge=1)


class FilterSolved(PromptOperator):
    """Drops prompts whose average solve rate has reached ``threshold``, with the reason ``solved``."""

    Configuration: ClassVar[type[OperatorConfiguration]] = FilterSolvedConfiguration

    def __init__(self, configuration: FilterSolvedConfiguration) -> None:
        self._given = configuration
        self._rates = PromptHistory(configuration.remember)

    def open(self, context: PromptContext) -> None:
        """Read the rates."""
        self._rates.load(context.store())

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        """Admit while the rate is below the threshold."""
        rate = self._rates.get(candidate.prompt)
        if rate is None or rate < self._given.threshold:
            context.admit()
        else:
            context.drop("solved", f"average solve rate {rate:.4f}, threshold {self._given.threshold:g}")

    def outcome(self, outcome: Outcome, context: PromptContext) -> None:
        """Move the prompt's rate by a complete group."""
        if not outcome.complete or not outcome.rewards:
            context.metrics.count("outcomes_ignored", operator="filter_solved")
            return
        before = self._rates.get(outcome.prompt)
        rate = self.moved_rate(self._given.prior if before is None else before, outcome.rewards)
        self._rates.put(outcome.prompt, rate, context.store())
        context.metrics.gauge("prompts_remembered", len(self._rates), operator="filter_solved")

    def moved_rate(self, rate: float, rewards: tuple[float, ...]) -> float:
        """The average after one more group with these raw rewards."""
        solved = sum(reward > 0 for reward in rewards) / len(rewards)
        return self._given.decay * rate + (1 - self._given.decay) * solved
