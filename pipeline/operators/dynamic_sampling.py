"""Dynamic sampling: a group whose members all earned the same reward teaches nothing and is dropped (DAPO).

The group advantage of such a group is zero for every member (Yu et al. 2025, arXiv 2503.14476, 3.2). The test is exact
by default: ``max - min > tolerance`` over the shaped rewards of counted members. With ``test = "allclose"`` it is that
of AstraFlow: some reward differs from that of the first member by more than ``1e-8 + 1e-5 * |first|``. A policy that
is rewarded in several roles is tested by role, since its advantages are: one role that varies keeps the group.
"""

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("DynamicSampling", "DynamicSamplingConfiguration")


class DynamicSamplingConfiguration(OperatorConfiguration):
    """``tolerance``: largest difference between two rewards that still counts as none. ``test``: ``spread`` compares
    the highest with the lowest by ``tolerance``, ``allclose`` all with the first by fixed tolerances.
    """

    tolerance: float = Field(0.0, ge=0, allow_inf_nan=False)
    test: Literal["spread", "allclose"] = "spread"

    @model_validator(mode="after")
    def _one_test(self) -> "DynamicSamplingConfiguration":
        if self.test == "allclose" and self.tolerance:
            raise ValueError("tolerance belongs to test = 'spread'; allclose has its own")
        return self


class DynamicSampling:
    """Drops groups without variance, with the reason ``zero_variance``."""

    kind: ClassVar[Kind] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = DynamicSamplingConfiguration

    def __init__(self, configuration: DynamicSamplingConfiguration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Emit the group when its rewards differ, else drop it."""
        rewards = [m.shaped_reward for m in record.counted()]
        lowest, highest = min(rewards, default=0.0), max(rewards, default=0.0)
        if not all(map(isfinite, rewards)):
            context.drop("reward_unknown", f"rewards are {', '.join(f'{r:g}' for r in rewards)}")
        elif any(self.varied(own) for own in (record.by_role() or {"": rewards}).values()):
            context.emit(record)
        elif lowest == highest:
            context.drop("zero_variance", f"all {len(rewards)} rewards are {lowest:g}")
        else:
            context.drop("zero_variance", f"{len(rewards)} rewards lie within {lowest:g} and {highest:g}")

    def varied(self, rewards: Sequence[float]) -> bool:
        """Whether rewards, in order of replica, differ by more than the test lets pass."""
        if not rewards:
            return False
        if self._given.test == "allclose":
            return any(abs(r - rewards[0]) > 1e-8 + 1e-5 * abs(rewards[0]) for r in rewards)
        return max(rewards) - min(rewards) > self._given.tolerance

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
