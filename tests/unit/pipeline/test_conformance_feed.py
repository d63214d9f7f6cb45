"""The feed holds what runs hold, is the same each time, and travels."""

from __future__ import annotations

import numpy as np

from headrace.pipeline.conformance_feed import ROUND, admission_of, trajectories_of
from headrace.schemas import codec


def test_groups_are_the_same_each_time_and_of_all_sorts() -> None:
    groups = [list(trajectories_of(group)) for group in range(44)]
    again = [[codec.encode(t) for t in trajectories_of(group)] for group in range(44)]
    assert [[codec.encode(t) for t in group] for group in groups] == again
    rewards = [[t.reward for t in group if t.status == "train"] for group in groups]
    assert {len(set(found)) == 1 for found in rewards} == {True, False}
    assert any(0 < reward < 1 for found in rewards for reward in found)
    ends = {t.end_reason for group in groups for t in group}
    assert ends == {"stop", "length", "env_error"}
    failed = [n for n, group in enumerate(groups) if any(t.status == "excluded" for t in group)]
    assert failed == list(range(ROUND - 1, 44, ROUND))


def test_prompts_come_again_with_an_answer_of_their_first_visit_or_are_fresh() -> None:
    first = {t.replica: t for t in trajectories_of(2)}
    second = {t.replica: t for t in trajectories_of(13)}
    assert first[0].prompt_id == second[0].prompt_id == admission_of(13).prompt_id
    assert np.array_equal(first[0].sequences[0].tokens, second[2].sequences[0].tokens)
    assert len({admission_of(group, fresh=True).prompt_id for group in range(44)}) == 44
