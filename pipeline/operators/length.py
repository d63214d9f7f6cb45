"""Bounds on the length of an answer: members outside are not trained, or end their group.

A member is ``too_short`` when ``length < min_tokens`` and ``too_long`` when ``length > max_tokens``; length counts the
tokens that would be trained, of all sequences of the member. Masked members stay in the statistics of their group
(``baseline_only``, protocol 6), as in DAPO's overlong filtering (Yu et al. 2025, arXiv 2503.14476, 3.4).
"""

from typing import ClassVar

from pydantic import Field, model_validator

from headrace.pipeline.operators.masking import Action, mask_or_drop
from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("Length", "LengthConfiguration")


class LengthConfiguration(OperatorConfiguration):
    """``min_tokens``, ``max_tokens``: the shortest and longest answer that is trained; one of them must be given.
    ``action``: ``mask`` the members outside, or ``drop`` the whole group for one.
    """

    min_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    action: Action = "mask"

    @model_validator(mode="after")
    def _bounded(self) -> "LengthConfiguration":
        if self.min_tokens is None and self.max_tokens is None:
            raise ValueError("give min_tokens, max_tokens or both")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        return self


class Length:
    """Trains answers within ``min_tokens`` and ``max_tokens`` only; the reasons are ``too_short`` and ``too_long``."""

    kind: ClassVar[Kind] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = LengthConfiguration

    def __init__(self, configuration: LengthConfiguration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Mask or drop by length."""
        reasons = {m.replica: reason for m in record.trained() if (reason := self.reason(m.length))}
        mask_or_drop(record, reasons, self._given.action, "length", context)

    def reason(self, length: int) -> str:
        """Why an answer of so many tokens is not trained; empty when it is."""
        given = self._given
        if given.min_tokens is not None and length < given.min_tokens:
            return "too_short"
        return "too_long" if given.max_tokens is not None and length > given.max_tokens else ""

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
