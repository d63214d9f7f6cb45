"""Dynamic sampling: a group whose members all earned the same reward teaches nothing and is dropped (DAPO).

The group advantage of such a group is zero for every member. The test is exact by default: the spread of shaped rewards
over counted members must be greater than ``tolerance``.
"""

from typing import ClassVar

from pydantic import Field

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("DynamicSampling", "DynamicSamplingConfiguration")


class DynamicSamplingConfiguration(OperatorConfiguration):
    """``tolerance``: largest difference between two rewards that still counts as none."""

    tolerance: float = Field(0.0, ge=0)


class DynamicSampling:
    """Drops groups without variance, with the reason ``zero_variance``."""

    kind: ClassVar[Kind] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = DynamicSamplingConfiguration

    def __init__(self, configuration: DynamicSamplingConfiguration) -> None:
        self._tolerance = configuration.tolerance

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Emit the group when its rewards differ, else drop it."""
        rewards = [m.shaped_reward for m in record.counted()]
        lowest, highest = min(rewards, default=0.0), max(rewards, default=0.0)
        if highest - lowest > self._tolerance:
            context.emit(record)
        elif lowest == highest:
            context.drop("zero_variance", f"all {len(rewards)} rewards are {lowest:g}")
        else:
            context.drop("zero_variance", f"{len(rewards)} rewards lie within {lowest:g} and {highest:g}")

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
