"""GPG's advantage: distance to the group's mean reward, scaled up by the share of the batch that has no reward."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from headrace.trainers.advantages.advantage import AddUp, AdvantageOptions, Scored
from headrace.trainers.advantages.per_member import PerMember

__all__ = ("GPG", "GPGOptions")


class GPGOptions(AdvantageOptions):
    """f_norm: what the distance is divided by."""

    f_norm: float = Field(1.0, gt=0)


class GPG(PerMember):
    """``(R - mean) / f_norm * B / B_r``: of B trained trajectories of the batch, B_r have a reward other than 0."""

    Options: ClassVar[type[AdvantageOptions]] = GPGOptions

    def __init__(self, options: GPGOptions) -> None:
        self.options = options

    def values_of(self, members: Sequence[Scored], add_up: AddUp) -> list[float]:
        """See ``PerMember``."""
        total = add_up({"all": float(len(members)), "some": float(sum(m.reward != 0 for m in members))})
        scale = total.get("all", 0.0) / max(1.0, total.get("some", 0.0)) / self.options.f_norm
        return [scale * (m.reward if m.count <= 1 else m.reward - m.mean) if self._counts(m) else 0.0 for m in members]

    def _counts(self, member: Scored) -> bool:
        return member.count > 1 or self.options.singleton == "raw"
