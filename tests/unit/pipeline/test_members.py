"""Members and groups of one policy follow from what its replicas reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_feed import make_admission, make_sequence, make_trajectory

from headrace.pipeline.members import Reported, draft_of, is_usable
from headrace.schemas.parts import BlobRef, Reward, RolePart, Source
from headrace.schemas.records import Member, Trajectory

BLOB = BlobRef(key="runs/first/blobs/5/0/0", size=7, digest="ab")


def reported(*trajectories: Trajectory) -> dict[int, Reported]:
    return {
        t.replica: (t, Source(topic="trajectories", partition=1, offset=100 + at)) for at, t in enumerate(trajectories)
    }


def member(trajectory: Trajectory, policy: int = 0, scores: list[Reward] | None = None) -> Member:
    draft = draft_of(
        policy, ("main", "judge")[policy], make_admission(5), reported(trajectory),
        {trajectory.replica: scores} if scores else {}, closed_ms=9,
    )  # fmt: skip
    (made,) = draft.members
    return made


def one(**more: Any) -> Trajectory:
    return make_trajectory(5, 0, 1.0, **more)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, "train"),
        ({"end_reason": "length"}, "train"),
        ({"end_reason": "context_full"}, "baseline_only"),
        ({"sequences": []}, "baseline_only"),
        ({"sequences": [make_sequence(policy=1)]}, "baseline_only"),
        ({"sequences": [make_sequence(tokens=0, oldest=-1)]}, "baseline_only"),
        ({"usable": False}, "excluded"),
        ({"usable": False, "end_reason": "context_full"}, "excluded"),
        ({"blob": BLOB, "sequences": [], "oldest_versions": {"0": 3}}, "train"),
        ({"blob": BLOB, "sequences": [], "oldest_versions": {}}, "baseline_only"),
        ({"blob": BLOB, "sequences": [], "oldest_versions": {"1": 3}}, "baseline_only"),
    ],
)
def test_what_is_trained_and_what_only_counts(more: dict[str, Any], status: str) -> None:
    trajectory = one(**more)
    assert member(trajectory).status == status
    assert is_usable(trajectory) == (status != "excluded")


def test_length_and_versions_are_those_of_the_policys_own_sequences() -> None:
    own = [make_sequence(0, oldest=4, newest=6, tokens=3), make_sequence(0, oldest=2, tokens=2)]
    both = one(sequences=[*own, make_sequence(1, oldest=1, newest=9, tokens=7)])
    first, second = member(both, 0), member(both, 1)
    assert (first.length, first.oldest_version, first.newest_version) == (5, 2, 6)
    assert (second.length, second.oldest_version, second.newest_version) == (7, 1, 9)
    assert [s.policy for s in first.sequences] == [0, 0] and [s.policy for s in second.sequences] == [1]


@pytest.mark.parametrize("key", ["0", "main"])
def test_an_offloaded_trajectory_is_known_by_its_head(key: str) -> None:
    made = member(one(blob=BLOB, sequences=[], tokens=77, oldest_versions={key: 3, "1": 1}))
    assert (made.length, made.oldest_version, made.newest_version, made.blob) == (77, 3, 3, BLOB)


ROLES = [
    Reward(name="all", value=1.0),
    Reward(name="own", value=0.25, role="policy0"),
    Reward(name="own", value=0.5, role="policy1"),
    Reward(name="turn", value=8.0, role="policy0", turn=0),
]


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize(("policy", "raw"), [(0, 1.25), (1, 1.5)])
def test_rewards_of_a_role_go_to_the_policy_that_played_it(policy: int, raw: float, offloaded: bool) -> None:
    sequences = [replace(make_sequence(p), role=f"policy{p}") for p in (0, 1)]
    more: dict[str, Any] = {"sequences": sequences}
    if offloaded:
        more = {"sequences": [], "blob": BLOB, "oldest_versions": {"0": 0, "1": 0}}
    made = member(one(rewards=ROLES, **more), policy)
    assert (made.raw_reward, made.shaped_reward, made.status) == (raw, raw, "train")
    assert {r.role for r in made.rewards} == {"", f"policy{policy}"}


def test_scores_of_the_group_are_added_to_the_raw_reward() -> None:
    made = member(one(), scores=[Reward(name="rank", value=-0.75), Reward(name="style", value=0.5)])
    assert made.raw_reward == 0.75
    assert [r.name for r in made.rewards] == ["rank", "style"]


@settings(max_examples=60, deadline=None)
@given(
    replies=st.dictionaries(
        st.integers(0, 7), st.tuples(st.sampled_from(["train", "full", "failed"]), st.integers(-4, 4)), min_size=1
    )
)
def test_the_group_counts_everything_but_the_excluded(replies: dict[int, tuple[str, int]]) -> None:
    trajectories = [
        make_trajectory(5, replica, reward / 4, usable=kind != "failed", sequences=[make_sequence(oldest=replica)],
                        **({"end_reason": "context_full"} if kind == "full" else {}))
        for replica, (kind, reward) in replies.items()
    ]  # fmt: skip
    found = reported(*trajectories)
    draft = draft_of(0, "main", make_admission(5), found, {}, closed_ms=9)
    assert [m.replica for m in draft.members] == sorted(replies)
    counted = [reward / 4 for kind, reward in replies.values() if kind != "failed"]
    trained = [replica for replica, (kind, _) in replies.items() if kind == "train"]
    group = draft.group
    assert (group.members, group.counted, group.trained) == (len(replies), len(counted), len(trained))
    if counted:
        assert group.raw_mean == pytest.approx(np.mean(counted))
        assert group.raw_std == pytest.approx(np.std(counted, ddof=1) if len(counted) > 1 else 0.0, abs=1e-9)
    if trained:
        assert (group.oldest_version, group.newest_version) == (min(trained), max(trained))
    assert group.tokens == 2 * len(trained)
    assert group.sources == [found[r][1] for r in sorted(replies)]
    assert all(m.sources == [found[m.replica][1]] for m in draft.members)
    assert group.short is (len(counted) < 2)


def team(solver: float, retry: float | None = None, **more: Any) -> Trajectory:
    """A trajectory of a solver (policy 0), perhaps with a second attempt, and a judge (policy 1)."""
    roles = [("solver", 0, solver), ("verifier", 1, 0.25)] + ([("retry", 0, retry)] if retry is not None else [])
    return one(
        rewards=[Reward(name="mark", value=value, role=role) for role, _, value in roles],
        sequences=[replace(make_sequence(policy), role=role) for role, policy, _ in roles],
        **more,
    )


def test_a_policy_in_several_roles_has_their_mean_and_never_the_outcome() -> None:
    assert (member(team(0.0, 1.0)).raw_reward, member(team(1.0)).raw_reward) == (0.5, 1.0)
    assert member(team(0.0, 1.0), 1).raw_reward == 0.25
    assert {r.role for r in member(team(0.0, 1.0)).rewards} == {"solver", "retry"}
    assert team(0.0).reward == 1.0, "what the episode came to is for people"


def test_statistics_are_by_role_where_a_policy_plays_several() -> None:
    found = reported(*(replace(team(*marks), replica=at) for at, marks in enumerate([(0.0, 1.0), (1.0,), (0.0, 0.0)])))
    group = draft_of(0, "main", make_admission(5), found, {}, closed_ms=9).group
    assert [(s.role, s.mean, s.count) for s in group.roles] == [("solver", pytest.approx(1 / 3), 3), ("retry", 0.5, 2)]
    assert group.roles[1].std == pytest.approx(0.5**0.5)
    judge = draft_of(1, "judge", make_admission(5), found, {}, closed_ms=9).group
    assert judge.roles == [] and (judge.reward_mean, judge.reward_std) == (0.25, 0.0)


def test_an_offloaded_team_is_told_apart_by_its_head() -> None:
    roles = [RolePart(role="solver", policy=0, tokens=5), RolePart(role="verifier", policy=1, tokens=3)]
    away = replace(team(1.0), sequences=[], blob=BLOB, roles=roles, tokens=8, oldest_versions={"0": 4, "1": 2})
    first, second = member(away, 0), member(away, 1)
    assert (first.length, first.oldest_version, first.raw_reward, first.status) == (5, 4, 1.0, "train")
    assert (second.length, second.oldest_version, second.raw_reward) == (3, 2, 0.25)


def test_a_policy_that_took_no_part_is_no_member_to_count() -> None:
    silent = one(rewards=[Reward(name="mark", value=1.0, role="solver")],
                 sequences=[replace(make_sequence(0), role="solver")])  # fmt: skip
    assert (member(silent, 0).status, member(silent, 1).status) == ("train", "excluded")


@pytest.mark.parametrize(
    ("ends", "policy", "end"),
    [
        (("stop", "length", "stop"), 0, "stop"),
        (("stop", "length", "stop"), 1, "length"),
        (("length", "stop", "stop"), 0, "length"),
        (("context_full", "stop", "context_full"), 0, "stop"),
    ],
)
def test_a_member_ends_as_its_own_sequences_did(ends: tuple[str, ...], policy: int, end: str) -> None:
    base = team(0.0, 1.0)
    made = replace(base, sequences=[replace(s, end_reason=e) for s, e in zip(base.sequences, ends, strict=True)])
    assert member(made, policy).end_reason == end
