"""Answers that were cut off: they are not trained, or end their group, by the end reason of the member.

The reward of an answer that ran into its limit says little about what it would have become. DAPO masks its loss
(overlong filtering; Yu et al. 2025, arXiv 2503.14476, 3.4); the member stays in the statistics of its group.
"""

from typing import ClassVar, Literal

from pydantic import Field

from headrace.pipeline.operators.masking import Action, mask_or_drop
from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("Truncated", "TruncatedConfiguration")

EndReason = Literal["stop", "length", "context_full", "abort", "env_timeout", "env_error", "tool_error"]


class TruncatedConfiguration(OperatorConfiguration):
    """``end_reasons``: those that count as cut off. ``action``: ``mask`` such members, or ``drop`` the group for
    one.
    """

    end_reasons: tuple[EndReason, ...] = Field(("length", "context_full"), min_length=1)
    action: Action = "mask"


class Truncated:
    """Trains no answer that was cut off; the reason is ``truncated_`` and the end reason, as ``truncated_length``."""

    kind: ClassVar[Kind] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = TruncatedConfiguration

    def __init__(self, configuration: TruncatedConfiguration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Mask or drop by end reason."""
        cut = {
            m.replica: f"truncated_{m.end_reason}" for m in record.trained() if m.end_reason in self._given.end_reasons
        }
        mask_or_drop(record, cut, self._given.action, "truncated", context)

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
