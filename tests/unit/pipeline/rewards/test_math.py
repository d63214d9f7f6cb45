"""The reward ``math``: equal as mathematics, and refused by name where it cannot be compared."""

from __future__ import annotations

import asyncio
import sys

import pytest

from headrace.pipeline.rewards.pool import RewardPool
from headrace.pipeline.rewards.reward import Completion, RewardFailed, call_reward, load_reward
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt


def prompt(answer: str) -> Prompt:
    return Prompt(prompt_id="p", stream="s", dataset="d", row=0, epoch=0, position=0, answer=answer)


@pytest.mark.parametrize(
    ("answer", "text", "worth"),
    [
        ("\\frac{1}{2}", "so it is $\\boxed{0.5}$", 1.0),
        ("10000", "The answer is $10{,}000$.", 1.0),
        ("x^2-1", "$\\boxed{(x-1)(x+1)}$", 1.0),
        ("3", "<think>\\boxed{3}</think> I say \\boxed{4}", 0.0),
        ("3", "nothing", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(answer: str, text: str, worth: float) -> None:
    pytest.importorskip("math_verify")
    reward = load_reward("math", {})
    assert call_reward("math", reward, prompt(answer), Completion(text, "stop")) == {"math": worth}
    assert call_reward("math", reward, prompt(answer), Completion(text, "length")) == {"math": 0.0}


def test_it_runs_in_a_process_where_signals_and_hangs_do_no_harm() -> None:
    pytest.importorskip("math_verify")
    pool = RewardPool(1)
    try:
        made = asyncio.run(pool.call("math", {}, prompt("4"), Completion("$2+2$", "stop"), 60.0))
        assert made == {"math": 1.0}
        with pytest.raises(RewardFailed, match="cannot be read as mathematics"):
            asyncio.run(pool.call("math", {}, prompt(""), Completion("4", "stop"), 60.0))
    finally:
        pool.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigurationError, match=r"headrace\[math\]"):
        load_reward("math", {})
