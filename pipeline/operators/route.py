"""Route groups to policies: a policy takes what its rules name, everything else is dropped for it by a named reason.

A trajectory is offered to every policy whose tokens it holds, each with its own members and its own credit; so several
``route`` entries, each with ``policy = "..."``, send it to one trainer, to several, or to none, and what one policy
refuses costs the others nothing. A rule is over the stream (the source of its prompts), the task type of its prompt,
the mean raw reward of the group, the oldest version among its trained tokens, and how many versions these span; all
rules that are given must hold. Source: AstraFlow routes by model id only; its paper names version,
reward and task type.
"""

from math import isfinite
from typing import ClassVar, Self

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("Route", "RouteConfiguration")


class RouteConfiguration(OperatorConfiguration):
    """``streams``, ``task_types``: those that are taken; empty: all. ``low``, ``high``: bounds of the group's mean raw
    reward, both included. ``from_version``, ``to_version``: bounds of its oldest trained version, both included, -1 for
    none. ``max_span``: versions between its oldest and newest trained token at most, -1 for any.
    """

    streams: list[str] = Field(default_factory=list)
    task_types: list[str] = Field(default_factory=list)
    low: float | None = Field(None, allow_inf_nan=False)
    high: float | None = Field(None, allow_inf_nan=False)
    from_version: int = Field(-1, ge=-1)
    to_version: int = Field(-1, ge=-1)
    max_span: int = Field(-1, ge=-1)

    @model_validator(mode="after")
    def _can_take_something(self) -> Self:
        if self.model_dump() == type(self).model_construct().model_dump():
            raise ValueError(f"it takes everything: give one of {', '.join(type(self).model_fields)}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}: it would take nothing")
        if -1 < self.to_version < self.from_version:
            raise ValueError(f"no version is from {self.from_version} to {self.to_version}: it would take nothing")
        return self


class Route:
    """Takes for its policy what the rules name and drops the rest.

    Reasons are ``other_stream``, ``other_task_type``, ``reward_below``, ``reward_above``, ``reward_unknown``,
    ``version_below``, ``version_above`` and ``span_above``.
    """

    kind: ClassVar[Kind] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = RouteConfiguration

    def __init__(self, configuration: RouteConfiguration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Emit the group, or drop it by the first rule that does not hold."""
        refused = self._by_name(record) or self._by_number(record)
        if refused:
            context.drop(*refused)
        else:
            context.emit(record)

    def _by_name(self, record: GroupDraft) -> tuple[str, str] | None:
        given, group = self._given, record.group
        if given.streams and group.stream not in given.streams:
            return "other_stream", f"{group.stream!r} is none of {', '.join(given.streams)}"
        if given.task_types and group.task_type not in given.task_types:
            return "other_task_type", f"{group.task_type!r} is none of {', '.join(given.task_types)}"
        return None

    def _by_number(self, record: GroupDraft) -> tuple[str, str] | None:
        given, group = self._given, record.group
        if (given.low is not None or given.high is not None) and not isfinite(group.raw_mean):
            return "reward_unknown", f"the mean is {group.raw_mean:g}"
        if given.low is not None and group.raw_mean < given.low:
            return "reward_below", f"mean {group.raw_mean:g} is below {given.low:g}"
        if given.high is not None and group.raw_mean > given.high:
            return "reward_above", f"mean {group.raw_mean:g} is above {given.high:g}"
        if group.oldest_version < given.from_version:
            return "version_below", f"{group.oldest_version} is below {given.from_version}"
        if -1 < given.to_version < group.oldest_version:
            return "version_above", f"{group.oldest_version} is above {given.to_version}"
        if -1 < given.max_span < group.newest_version - group.oldest_version:
            told = f"versions {group.oldest_version} to {group.newest_version}"
            return "span_above", f"{told} are more than {given.max_span}"
        return None

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
