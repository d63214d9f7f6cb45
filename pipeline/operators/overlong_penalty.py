"""The soft penalty for overlong answers: from a length on, every further token costs reward (DAPO).

``R + min(0, -(length - (max_tokens - buffer)) / buffer * penalty)``: nothing up to ``max_tokens - buffer``, then a
line that reaches ``-penalty`` at ``max_tokens`` and falls on beyond, unless ``floor`` ends it.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("OverlongPenalty", "OverlongPenaltyConfiguration")


class OverlongPenaltyConfiguration(OperatorConfiguration):
    """``max_tokens``: longest answer, in trained tokens. ``buffer``: tokens before it that cost already. ``penalty``:
    what an answer of ``max_tokens`` costs. ``floor``: the costs end there; without it they go on.
    """

    max_tokens: int = Field(ge=1)
    buffer: int = Field(ge=1)
    penalty: float = Field(1.0, ge=0)
    floor: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _within(self) -> "OverlongPenaltyConfiguration":
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer is {self.buffer}, more than max_tokens {self.max_tokens}")
        return self


class OverlongPenalty:
    """Takes reward away for every token of the last ``buffer`` before ``max_tokens``, and beyond."""

    kind: ClassVar[Kind] = "shape"
    Configuration: ClassVar[type[OperatorConfiguration]] = OverlongPenaltyConfiguration

    def __init__(self, configuration: OverlongPenaltyConfiguration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Emit the group with the costs of length taken from its shaped rewards."""
        members = [replace(m, shaped_reward=m.shaped_reward - self.cost(m.length)) for m in record.members]
        context.emit(record.with_members(members))

    def cost(self, length: int) -> float:
        """What an answer of so many tokens costs."""
        given = self._given
        over = max(0, length - (given.max_tokens - given.buffer))
        cost = given.penalty * over / given.buffer
        return cost if given.floor is None else min(cost, given.floor)

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
