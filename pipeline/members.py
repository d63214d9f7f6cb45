"""From the trajectories of a group to the Members and the Group of one policy (protocol 6).

Pure functions. Every replica that reported becomes a Member, the excluded ones too; reward parts of a role go to the
policy that played that role, group-scope scores are added to the raw reward. A policy that is rewarded in several roles
of a trajectory has their mean as its raw reward; advantages are by role (``Group.roles``).
"""

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from headrace.pipeline.operators.operator import GroupDraft
from headrace.schemas.parts import Reward, Source
from headrace.schemas.parts import Sequence as TokenSequence
from headrace.schemas.records import Admission, Group, Member, Trajectory
from headrace.schemas.role_rewards import split_reward

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
    roles = {s.role for s in sequences} | {part.role for part in trajectory.roles if part.policy == policy}
    if trajectory.blob is not None:  # the sequences lie with the arrays; what is known of them stands in the head
        played = [part for part in trajectory.roles if part.policy == policy]
        length = sum(part.tokens for part in played) if trajectory.roles else trajectory.tokens
        oldest = trajectory.oldest_versions.get(name, trajectory.oldest_versions.get(str(policy), -1))
        newest = max(oldest, newest)
        roles = roles or {f"policy{policy}", name}
    rewards = [r for r in trajectory.rewards if not r.role or r.role in roles] + list(scores)
    raw = _raw_reward(trajectory, rewards, scores)
    status = _status(trajectory, length, oldest, took_part=bool(roles or rewards))
    error = trajectory.error
    if not isfinite(raw):
        status, raw, error = "excluded", 0.0, error or "the parts of its reward have no finite sum"
    return Member(
        policy=policy, group=trajectory.group, replica=trajectory.replica, attempt=trajectory.attempt,
        stream=trajectory.stream, prompt_id=trajectory.prompt_id, status=status,
        raw_reward=raw, shaped_reward=raw, length=length, oldest_version=oldest, newest_version=newest,
        end_reason=_end_reason(trajectory, sequences), error=error, rewards=rewards, sources=[place],
        blob=trajectory.blob, sequences=sequences,
    )  # fmt: skip


def _raw_reward(trajectory: Trajectory, rewards: Sequence[Reward], scores: Sequence[Reward]) -> float:
    """What is of the whole trajectory, and the mean over the roles that are rewarded apart.

    A trajectory without parts has its reward as a whole.
    """
    whole, roles = split_reward(rewards)
    if not trajectory.rewards:
        whole, roles = trajectory.reward + sum(s.value for s in scores), {}
    return whole + (sum(roles.values()) / len(roles) if roles else 0.0)


def _end_reason(trajectory: Trajectory, sequences: Sequence[TokenSequence]) -> str:
    """Of a usable trajectory in several sequences, how this policy's own ended: ``length`` where any was cut off."""
    if not is_usable(trajectory) or len(trajectory.sequences) < 2 or not sequences:
        return trajectory.end_reason
    ends = {s.end_reason for s in sequences}
    return next((end for end in ("length", "stop") if end in ends), trajectory.end_reason)


def _status(trajectory: Trajectory, length: int, oldest: int, *, took_part: bool) -> str:
    """Excluded results count nowhere, nor does a policy that said and earned nothing where others are rewarded by role;
    a full context or nothing to train counts in the statistics only.
    """
    if not is_usable(trajectory) or (trajectory.rewards and not took_part):
        return "excluded"
    if trajectory.end_reason == "context_full" or length == 0 or oldest < 0:
        return "baseline_only"
    return "train"
