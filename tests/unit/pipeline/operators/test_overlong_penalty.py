"""The penalty is the reference's, statistics follow the shaped rewards, raw rewards stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from stage_feed import make_members

from headrace.pipeline.operators.operator import GroupDraft
from headrace.pipeline.operators.overlong_penalty import OverlongPenalty, OverlongPenaltyConfiguration

DATA = json.loads((Path(__file__).parents[3] / "oracles" / "dapo_overlong_penalty.json").read_text())


class Ending:
    """Remembers the group that was emitted; there is nothing else to call."""

    metrics: Any = None

    def __init__(self) -> None:
        self.emitted: list[GroupDraft] = []

    def emit(self, draft: GroupDraft) -> None:
        self.emitted.append(draft)


def shaped(lengths: list[int], **options: Any) -> GroupDraft:
    *members, group = make_members(0, tokens=lengths)
    draft: Any = GroupDraft(group=group, members=tuple(members), group_size=len(lengths))  # type: ignore[arg-type]
    ending: Any = Ending()
    OverlongPenalty(OverlongPenaltyConfiguration(**options)).process(draft, ending)
    (out,) = ending.emitted
    for before, after in zip(members, out.members, strict=True):
        assert after.raw_reward == before.raw_reward  # type: ignore[union-attr]
    return out  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: c["case"])
def test_the_penalty_agrees_with_the_oracle(case: dict[str, Any]) -> None:
    inputs, hyper = DATA["inputs"][case["inputs"]], case["hyper"]
    operator = OverlongPenalty(
        OverlongPenaltyConfiguration(
            max_tokens=hyper["max_response_length"], buffer=hyper["overlong_tokens"],
            penalty=hyper["overlong_penalty_factor"],
        )
    )  # fmt: skip
    found = [r - operator.cost(n) for r, n in zip(inputs["rewards"], inputs["response_lengths"], strict=True)]
    assert found == pytest.approx(case["outputs"]["rewards"], rel=1e-5, abs=1e-6)


def test_shaped_rewards_and_statistics_follow_the_length() -> None:
    out = shaped([2, 8, 9, 30], max_tokens=10, buffer=4, penalty=0.5)
    costs = [m.raw_reward - m.shaped_reward for m in out.members]
    assert costs == pytest.approx([0.0, 0.25, 0.375, 3.0]), "it falls on beyond max_tokens"
    assert out.group.reward_mean == pytest.approx(sum(m.shaped_reward for m in out.members) / 4)
    assert out.group.raw_mean == pytest.approx(sum(m.raw_reward for m in out.members) / 4)


def test_a_floor_ends_the_costs() -> None:
    out = shaped([10, 30], max_tokens=10, buffer=4, floor=1.5)
    assert [m.raw_reward - m.shaped_reward for m in out.members] == pytest.approx([1.0, 1.5])


@pytest.mark.parametrize("options", [{"max_tokens": 4, "buffer": 5}, {"max_tokens": 4}, {"buffer": 1, "max_tokens": 0}])
def test_what_makes_no_sense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        OverlongPenaltyConfiguration(**options)  # type: ignore[arg-type]
