"""The figures of each policy of a run, for the report: what it trained, what it earned, and what it did not claim.

In: a configuration and what the ledgers, steps, manifests and evaluations add up to; out: one entry for each policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.pipeline.evaluated import EvaluationFigures
from headrace.pipeline.tally import PolicyTally, RewardPoint, Tally
from headrace.schemas.config import RunConfig

__all__ = ("PolicyFigures", "policy_figures", "unclaimed")

_SHARE = 10
"""The first and the last of so many parts of a run are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """One policy. unclaimed: groups of its streams in which it had no credit, because it had no room or had stopped.

    reward_start, reward_final: mean raw reward of the groups that ended in the first and in the last tenth of its
    versions. accuracy_start, accuracy_final: held-out, as in the report's figures; by_role: the same of each role of a
    workflow that has roles, as [first, last]. evaluation: avg@k, pass@k and the best version.
    """

    policy: str
    frozen: bool
    versions: int
    groups_opened: int
    groups_trained: int
    unclaimed: int
    drops: dict[str, int]
    reward_start: float | None
    reward_final: float | None
    accuracy_start: float | None
    accuracy_final: float | None
    by_role: dict[str, list[float]]
    mean_staleness: float | None
    max_staleness: int | None
    evaluation: EvaluationFigures | None

    def summary(self) -> str:
        """One line for people."""
        if self.frozen:
            return f"{self.policy}: frozen"
        reward = f"reward {_shown(self.reward_start)} -> {_shown(self.reward_final)}"
        work = f"{self.versions} versions, {self.groups_trained} of {self.groups_opened} groups trained"
        left = f", {self.unclaimed} groups not claimed" if self.unclaimed else ""
        roles = "".join(f", {role} {first:.3f} -> {last:.3f}" for role, (first, last) in self.by_role.items())
        return f"{self.policy}: {reward}{roles}; {work}{left}"


def policy_figures(config: RunConfig, tally: Tally) -> list[PolicyFigures]:
    """The figures of all policies, in the order of their index."""
    return [_figures(config, index, name, tally) for index, name in enumerate(config.policies)]


def unclaimed(config: RunConfig, policy: int, tally: Tally) -> int:
    """Groups that a stream of this policy opened for others and not for it."""
    if config.policies[config.policy_names()[policy]].frozen:
        return 0
    missed = 0
    for stream in config.streams:
        beside = config.stream_policies(stream)
        if policy in beside:
            opened = set[int]().union(*(tally.policies[p].groups[stream] for p in beside))
            missed += len(opened - tally.policies[policy].groups[stream])
    return missed


def _figures(config: RunConfig, index: int, name: str, tally: Tally) -> PolicyFigures:
    policy = tally.policies[index]
    accuracies, staleness = policy.accuracies(), policy.staleness()
    items = sum(staleness.values())
    first, last = _ends(policy.rewards)
    return PolicyFigures(
        policy=name,
        frozen=config.policies[name].frozen,
        versions=policy.version,
        groups_opened=policy.opened,
        groups_trained=policy.trained,
        unclaimed=unclaimed(config, index, tally),
        drops=dict(policy.closed),
        reward_start=first,
        reward_final=last,
        accuracy_start=accuracies[0][1] if accuracies else None,
        accuracy_final=accuracies[-1][1] if accuracies else None,
        by_role=_by_role(policy),
        mean_staleness=sum(s * n for s, n in staleness.items()) / items if items else None,
        max_staleness=max(staleness, default=None),
        evaluation=policy.evaluations.figures(config.eval),
    )


def _by_role(policy: PolicyTally) -> dict[str, list[float]]:
    return {role: [points[0][1], points[-1][1]] for role, points in policy.role_rewards().items()}


def _ends(points: Sequence[RewardPoint]) -> tuple[float | None, float | None]:
    """Mean over the groups of the first and of the last part of the points."""
    part = max(1, len(points) // _SHARE)
    return _mean(points[:part]), _mean(points[-part:])


def _mean(points: Sequence[RewardPoint]) -> float | None:
    groups = sum(point.groups for point in points)
    return sum(point.mean * point.groups for point in points) / groups if groups else None


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
