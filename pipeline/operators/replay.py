"""Use trained groups again: of every batch a share r comes from a pool of groups that earlier batches had.

A batch holds F = round((1 - r) B) fresh groups and, over the run, exactly F r / (1 - r) replayed ones a batch: the
fraction is carried on, and what the pool lacked is made up by one group more a batch. F is at least 1 and r below 1, so
fresh groups never starve. A replayed group is within the staleness bound like any other, is never in its own first
batch again, and every use is a numbered entry of the Manifest (protocol 4).

selector: ``latest`` the last to enter the pool (AstraFlow's only one); ``oldest`` the longest unused, which spreads
uses evenly; ``uniform`` drawn without replacement, each draw a hash of the run's seed, policy, batch and group;
``reward_variance`` the largest deviation of shaped rewards within the group (what group-relative losses learn most
from). Source: AstraFlow 3.2 and appendix A.8, which replays without a bound and stops taking fresh data at r = 1.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, Moment, ServingKind
from headrace.schemas.config import PolicyConfig

__all__ = ("Replay", "ReplayConfiguration")


class ReplayConfiguration(OperatorConfiguration):
    """``ratio``: share r of replayed groups; unset, the policy's own ``replay``. ``selector``: which groups. ``pool``:
    groups that it holds at most, 0 for four batches. ``max_uses``: replayed uses of a group at most, 0 for as many as
    the bound allows.
    """

    ratio: float | None = Field(None, ge=0)
    selector: Literal["latest", "oldest", "uniform", "reward_variance"] = "oldest"
    pool: int = Field(0, ge=0)
    max_uses: int = Field(0, ge=0)

    @field_validator("ratio")
    @classmethod
    def _leaves_fresh_ones(cls, ratio: float | None) -> float | None:
        if ratio is not None and not ratio < 1:
            raise ValueError("a batch must hold something fresh: ratio is below 1")
        return ratio


def _draw(candidate: Candidate, moment: Moment) -> tuple[float, ...]:
    text = f"{moment.seed}/{moment.policy}/{moment.batch}/{candidate.group.group}"
    return (int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big"),)


_RANKS: dict[str, Callable[[Candidate, Moment], tuple[float, ...]]] = {
    "latest": lambda c, _: (-c.entered,),
    "oldest": lambda c, _: (c.last_used,),
    "uniform": _draw,
    "reward_variance": lambda c, _: (-c.group.reward_std, -c.entered),
}
"""Selector to the rank of a group; the smallest are replayed."""


class Replay:
    """Replays a share of every batch from a pool of trained groups, within the staleness bound."""

    kind: ClassVar[ServingKind] = "replay"
    Configuration: ClassVar[type[OperatorConfiguration]] = ReplayConfiguration

    def __init__(self, configuration: ReplayConfiguration) -> None:
        self._given = configuration
        self._rank = _RANKS[configuration.selector]

    def policy(self, name: str, section: PolicyConfig) -> PolicyConfig:
        """The policy with this share."""
        ratio = self._given.ratio
        return section if ratio is None else section.model_copy(update={"replay": ratio})

    def capacity(self, batch_groups: int) -> int:
        """``pool``, or four batches."""
        return self._given.pool or 4 * batch_groups

    def choose(self, pool: Sequence[Candidate], count: int, moment: Moment) -> Sequence[int]:
        """The ``count`` groups that the selector puts first, in the order in which they entered the pool."""
        most = self._given.max_uses
        usable = [c for c in pool if not most or c.uses <= most]
        chosen = sorted(usable, key=lambda c: (self._rank(c, moment), c.entered))[:count]
        return [c.group.group for c in sorted(chosen, key=lambda c: c.entered)]
