"""The staleness bound: no trained token is older than A versions at the start of its batch (protocol 4).

``start_version - oldest_version <= A``, judged where batches are made, for fresh and replayed groups alike; equality is
served. ``mode = "wait"`` waits for a group that would pass the bound, so that nothing but surplus is lost to it;
``"drop"`` lets it go, and the report says how the dropped groups differ from the trained ones. At depth 0 the bound is
the policy's lag, whatever is set.

AstraFlow checks fresh samples only and overlooks version 0; here replayed groups are
judged too, and version 0 is a version.
"""

from typing import ClassVar, Literal

from pydantic import Field

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, Moment, ServingKind
from headrace.schemas.config import PolicyConfig

__all__ = ("Staleness", "StalenessConfiguration")


class StalenessConfiguration(OperatorConfiguration):
    """``max_staleness``: A in versions. ``mode``: wait for groups that would grow too old, or drop them. Unset, both
    are the policy's own.
    """

    max_staleness: int | None = Field(None, ge=0)
    mode: Literal["wait", "drop"] | None = None


class Staleness:
    """Serves nothing that is older than A versions; the reason is ``too_old``."""

    kind: ClassVar[ServingKind] = "staleness"
    Configuration: ClassVar[type[OperatorConfiguration]] = StalenessConfiguration

    def __init__(self, configuration: StalenessConfiguration) -> None:
        self._given = configuration

    def policy(self, name: str, section: PolicyConfig) -> PolicyConfig:
        """The policy with this bound and mode."""
        return section.model_copy(update=self._given.model_dump(exclude_none=True))

    def refusal(self, candidate: Candidate, moment: Moment) -> str:
        """Refuse what is beyond the bound in force."""
        age = moment.start_version - candidate.group.oldest_version
        if age <= moment.bound:
            return ""
        oldest = candidate.group.oldest_version
        return f"too_old: sampled by version {oldest}, {age} before {moment.start_version}; the bound is {moment.bound}"
