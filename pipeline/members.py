"""From the trajectories of a group to the Members and the Group of one policy (protocol 6).

Pure functions. Every replica that reported becomes a Member, the excluded ones too; reward parts of a role go to the
policy whose sequences have that role, group-scope scores are added to the raw reward.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.pipeline.operators.operator import GroupDraft
from headrace.schemas.parts import Reward, Source
from headrace.schemas.records import Admission, Group, Member, Trajectory

__all__ = ("Reported", "draft_of", "is_usable")

Reported = tuple[Trajectory, Source]
"""A trajectory and the place where it lies."""


def is_usable(trajectory: Trajectory) -> bool:
    """Whether a trajectory counts towards the group's size."""
    return trajectory.status == "train"


def draft_of(
    policy: int,
    name: str,
    admission: Admission,
    reported: Mapping[int, Reported],
    scores: Mapping[int, Sequence[Reward]],
    closed_ms: int,
) -> GroupDraft:
    """The group of one policy from its reported replicas; ``name`` is the policy's name, ``scores`` are by replica."""
    members = [_member(policy, name, reported[r], scores.get(r, ())) for r in sorted(reported)]
    group = Group(
        policy=policy, group=admission.group, stream=admission.stream, prompt_id=admission.prompt_id, members=0,
        counted=0, trained=0, short=False, reward_mean=0.0, reward_std=0.0, raw_mean=0.0, raw_std=0.0,
        oldest_version=-1, newest_version=-1, tokens=0, closed_ms=closed_ms, task_type=admission.task_type,
        sources=[place for _, place in (reported[r] for r in sorted(reported))],
    )  # fmt: skip
    return GroupDraft(group=group, members=(), group_size=admission.group_size).with_members(members)


def _member(policy: int, name: str, reported: Reported, scores: Sequence[Reward]) -> Member:
    trajectory, place = reported
    sequences = [s for s in trajectory.sequences if s.policy == policy]
    length = sum(int(np.count_nonzero(s.mask)) for s in sequences)
    versions = [(s.oldest_version, s.newest_version) for s in sequences if s.newest_version >= 0]
    oldest = min((o for o, _ in versions), default=-1)
    newest = max((n for _, n in versions), default=-1)
    if trajectory.blob is not None:
        length = trajectory.tokens
        oldest = trajectory.oldest_versions.get(name, trajectory.oldest_versions.get(str(policy), -1))
        newest = max(oldest, newest)
    roles = {s.role for s in sequences}
    if trajectory.blob is not None:  # the roles lie with the arrays; these are the names that workflows give by default
        roles = {f"policy{policy}", name}
    rewards = [r for r in trajectory.rewards if not r.role or r.role in roles] + list(scores)
    raw = trajectory.reward + sum(r.value for r in rewards if r.role and r.turn < 0) + sum(r.value for r in scores)
    return Member(
        policy=policy, group=trajectory.group, replica=trajectory.replica, attempt=trajectory.attempt,
        stream=trajectory.stream, prompt_id=trajectory.prompt_id, status=_status(trajectory, length, oldest),
        raw_reward=raw, shaped_reward=raw, length=length, oldest_version=oldest, newest_version=newest,
        end_reason=trajectory.end_reason, error=trajectory.error, rewards=rewards, sources=[place],
        blob=trajectory.blob, sequences=sequences,
    )  # fmt: skip


def _status(trajectory: Trajectory, length: int, oldest: int) -> str:
    """Excluded results count nowhere; a full context or nothing to train counts in the statistics only."""
    if not is_usable(trajectory):
        return "excluded"
    if trajectory.end_reason == "context_full" or length == 0 or oldest < 0:
        return "baseline_only"
    return "train"
