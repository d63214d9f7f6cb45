"""Target shares of sources among admitted groups, exact in the long run.

By `stream` the operator says whose prompt is next, by Webster's rule (least `(groups + 1/2) / weight`); nothing is
dropped, and a stream that has ended leaves its share to the others. While a stream has no prompt at hand and has not
ended, the others wait for it, so that one seed gives one order; with `missing = "lend"` they go on, and it is repaid.

By `dataset`, `task_type` or a column, the classes come as they come within their streams, and what is ahead of its
share is dropped until the others have followed. It comes again in the next epoch.
"""

import json
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import (
    Candidate,
    PromptConfiguration,
    PromptContext,
    PromptOperator,
    class_of,
)
from headrace.pipeline.operators.quota import Quota
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("Mix", "MixConfiguration")

_STATE = b"counts"


class MixConfiguration(PromptConfiguration):
    """``weights``: share of each source; they need not sum to 1. ``by``: what a source is: ``stream``, ``dataset``,
    ``task_type`` or the name of a column. ``missing``: ``wait`` for a stream without a prompt at hand, or ``lend``.
    """

    weights: dict[str, float] = Field(min_length=1)
    by: str = "stream"
    missing: Literal["wait", "lend"] = "wait"

    @model_validator(mode="after")
    def _possible(self) -> "MixConfiguration":
        if any(not 0 < weight < float("inf") for weight in self.weights.values()):
            raise ValueError("weights must be greater than 0; leave a source out to admit nothing of it")
        if self.missing == "lend" and self.by != "stream":
            raise ValueError("missing = 'lend' belongs to by = 'stream': classes within a stream are never waited for")
        return self


class Mix(PromptOperator):
    """Holds sources to their shares; by other than streams, the reasons are ``source_ahead`` and ``source_unnamed``."""

    Configuration: ClassVar[type[OperatorConfiguration]] = MixConfiguration

    def __init__(self, configuration: MixConfiguration) -> None:
        self._given = configuration
        self._by_stream = configuration.by == "stream"
        self._quota = Quota(configuration.weights)

    def check(self, streams: Sequence[str], config: RunConfig) -> None:
        """Streams that are mixed must be the ones that are named, and must train the same policies."""
        if not self._by_stream:
            return
        if set(streams) != set(self._given.weights):
            named, given = ", ".join(self._given.weights), ", ".join(streams)
            raise ConfigurationError(
                f"mix.weights names {named}; the streams that it mixes are {given}: name each once"
            )
        if len({tuple(config.stream_policies(name)) for name in streams}) > 1:
            raise ConfigurationError(
                f"mix cannot hold the streams {', '.join(streams)} to shares: they train different policies, each of "
                "which takes what it has room for. Mix streams of the same policies, or set pacing"
            )

    def open(self, context: PromptContext) -> None:
        """Read the counts."""
        self._quota = Quota(self._given.weights)
        self._quota.counts.update(json.loads(context.store().get(_STATE) or b"{}"))

    def select(self, present: Sequence[str], absent: Collection[str]) -> Sequence[str]:
        """The stream whose turn it is; none while that one has no prompt at hand and is waited for."""
        if not self._by_stream:
            return present
        mine = [name for name in present if name in self._given.weights]
        awaited = [name for name in absent if name in self._given.weights] if self._given.missing == "wait" else []
        if not mine:
            return present
        turn = self._quota.most_owed([*mine, *awaited])
        return [name for name in present if name == turn or name not in mine]

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        """Admit by stream; else drop what is ahead of its share."""
        name = class_of(candidate.prompt, self._given.by)
        if self._by_stream:
            context.admit()
        elif name not in self._given.weights:
            context.drop("source_unnamed", f"{self._given.by} {name[:40]!r} has no weight")
        elif self._quota.surplus(name) > 1 - 1e-9:
            total = sum(self._quota.counts.values())
            told = (
                f"{self._quota.counts[name]} of {total} groups are {name!r}, its share is {self._quota.share(name):.4g}"
            )
            context.drop("source_ahead", told)
        else:
            context.admit()

    def admitted(self, candidate: Candidate, context: PromptContext) -> None:
        """Count the group for its source."""
        prompt = candidate.prompt
        name = prompt.stream if self._by_stream else class_of(prompt, self._given.by)
        self._quota.add(name)
        context.store().put(_STATE, json.dumps(self._quota.counts, separators=(",", ":")).encode())
        if name in self._quota.counts:
            context.metrics.gauge("mix_groups", self._quota.counts[name], source=name)
