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
from headrace.schemas.parts import BlobRef, Reward, Source
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
