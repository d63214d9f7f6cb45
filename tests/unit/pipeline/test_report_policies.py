"""The figures of each policy are worked out as they are defined."""

from __future__ import annotations

import pytest

from headrace.pipeline.report_policies import policy_figures, unclaimed
from headrace.pipeline.tally import Tally
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import Reward
from headrace.schemas.records import EvalResult, Kept, Opened, Trained


def config(**policies: bool) -> RunConfig:
    stream = {"dataset": "d"}
    return RunConfig.model_validate(
        {
            "policies": {name: {"model": "m", "frozen": frozen} for name, frozen in policies.items()},
            "streams": {"main": stream, "alone": {**stream, "policies": [next(iter(policies))]}},
        }
    )


def opened(policy: int, group: int, stream: str = "main") -> Opened:
    return Opened(policy=policy, group=group, stream=stream, prompt_id="p", min_version=0, cap=9)


def evaluated(version: int, **roles: float) -> EvalResult:
    return EvalResult(
        policy=0, suite="heldout", prompt_id="p", replica=0, version=version, oldest_version=version,
        newest_version=version, reward=1.0, tokens=3, end_reason="stop", finished_ms=1,
        rewards=[Reward(name="mark", value=value, role=role) for role, value in roles.items()],
    )  # fmt: skip


def test_a_group_that_a_stream_opened_for_others_only_was_not_claimed() -> None:
    tally = Tally()
    for record in (opened(0, 0), opened(1, 0), opened(1, 1), opened(1, 2), opened(0, 3), opened(0, 4, "alone")):
        tally.fold(record)
    told = config(a=False, b=False)
    assert (unclaimed(told, 0, tally), unclaimed(told, 1, tally)) == (2, 1)
    assert unclaimed(config(a=False, b=True), 1, tally) == 0


def test_rewards_are_those_of_the_first_and_last_tenth_of_versions() -> None:
    tally = Tally()
    for version in range(1, 31):
        for group in (2 * version, 2 * version + 1):
            tally.fold(opened(0, group))
            tally.fold(Kept(policy=0, group=group, reward_mean=0, reward_std=0, raw_mean=version / 10))
        tally.fold(Trained(policy=0, batch=version, version=version, first=True))
    (first, second) = policy_figures(config(a=False, b=False), tally)
    assert (first.reward_start, first.reward_final) == (pytest.approx(0.2), pytest.approx(2.9))
    assert (second.reward_start, second.reward_final, second.mean_staleness) == (None, None, None)
    assert first.groups_opened == 60 and "reward 0.200 -> 2.900" in first.summary()


def test_held_out_rewards_are_told_by_role() -> None:
    tally = Tally()
    for version, solver, judge in ((0, 0.25, 0.5), (4, 0.5, 1.0)):
        tally.fold(evaluated(version, solver=solver, judge=judge))
    (figures, _) = policy_figures(config(a=False, b=False), tally)
    assert figures.by_role == {"solver": [0.25, 0.5], "judge": [0.5, 1.0]}
    assert figures.accuracy_final == 1.0 and ", judge 0.500 -> 1.000" in figures.summary()
