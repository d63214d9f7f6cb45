"""What a member earned in each role follows from its parts, and shaping counts for all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.parts import Reward
from headrace.schemas.role_rewards import role_rewards, split_reward

WHOLE = Reward(name="all", value=1.0)
SOLVER = Reward(name="mark", value=0.5, role="solver")
STYLE = Reward(name="style", value=0.25, role="solver")
JUDGE = Reward(name="verdict", value=0.0, role="judge")
TURN = Reward(name="turn", value=8.0, role="judge", turn=0)


def test_parts_add_up_by_role_and_turns_are_left_out() -> None:
    assert split_reward([WHOLE, SOLVER, STYLE, JUDGE, TURN]) == (1.0, {"solver": 0.75, "judge": 0.0})
    assert split_reward([]) == (0.0, {})
    assert split_reward([TURN]) == (0.0, {})


def test_every_role_earns_the_whole_and_what_shaping_did() -> None:
    earned = role_rewards([WHOLE, SOLVER, JUDGE], raw=1.25, shaped=1.0)
    assert earned == {"solver": 1.25, "judge": 0.75}


PARTS = st.builds(
    Reward, name=st.sampled_from("ab"), value=st.integers(-8, 8).map(float), role=st.sampled_from(["", "p", "q"]),
    turn=st.integers(-1, 1),
)  # fmt: skip


@given(st.lists(PARTS))
def test_nothing_is_lost_or_counted_twice(parts: list[Reward]) -> None:
    whole, roles = split_reward(parts)
    assert whole + sum(roles.values()) == sum(part.value for part in parts if part.turn < 0)
    assert set(roles) == {part.role for part in parts if part.turn < 0} - {""}
