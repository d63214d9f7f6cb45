"""The arithmetic environment: its episodes follow from the seed and the answers alone."""

from __future__ import annotations

import pytest

from headrace.pipeline.environments.arithmetic import Arithmetic
from headrace.schemas.records import Prompt

PROMPT = Prompt(prompt_id="1", stream="s", dataset="d", row=0, epoch=0, position=0, prompt="go")


def _solve(text: str) -> int:
    question = text.removesuffix("=")
    at = max(question.rfind("+"), question.rfind("-"))
    return int(question[:at]) + int(question[at:])


@pytest.mark.parametrize("seed", range(20))
def test_right_answers_earn_one_each_and_equal_seeds_give_equal_episodes(seed: int) -> None:
    first, second = Arithmetic(turns=4), Arithmetic(turns=4)
    seen, total = first.reset(seed, PROMPT), 0.0
    assert second.reset(seed, PROMPT) == seen
    for turn in range(4):
        assert not seen.done
        answer = str(_solve(seen.text))
        seen = first.step(f" {answer}\n")
        assert second.step(answer) == seen
        total += seen.reward
        assert seen.done == (turn == 3)
    assert total == 4
    with pytest.raises(ValueError, match="call reset first"):
        first.step("1")


def test_a_wrong_number_goes_on_and_no_number_ends_it() -> None:
    environment = Arithmetic(turns=3)
    wrong = _solve(environment.reset(1, PROMPT).text) + 1
    seen = environment.step(str(wrong))
    assert (seen.reward, seen.done) == (0.0, False)
    assert _solve(seen.text) is not None
    seen = environment.step("I do not know")
    assert (seen.reward, seen.done, seen.details) == (0.0, True, {"verdict": "no number"})
    environment.close()
    environment.close()
    with pytest.raises(ValueError, match="call reset first"):
        environment.step("1")
    episodes = {Arithmetic().reset(seed, PROMPT).text for seed in range(30)}
    assert len(episodes) > 5
