"""Rewards: exact match, what counts as a failed reward, and processes that are killed and replaced."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.pipeline.rewards.pool import RewardPool
from headrace.pipeline.rewards.reward import Completion, RewardFailed, call_reward, load_reward
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

PROMPT = Prompt(prompt_id="1", stream="main", dataset="d", row=0, epoch=0, position=0, prompt="21=", answer="12")


def _done(text: str, end: str = "stop") -> Completion:
    return Completion(text, end, np.array([4, 5, 2], np.int32))


@pytest.mark.parametrize(
    ("text", "end", "worth"), [("12", "stop", 1.0), ("12", "length", 0.0), ("12 ", "stop", 0.0), ("", "stop", 0.0)]
)
def test_exact_match_wants_the_answer_ended_by_the_model(text: str, end: str, worth: float) -> None:
    reward = load_reward("exact_match", {})
    assert call_reward("exact_match", reward, PROMPT, _done(text, end)) == {"exact_match": worth}


def test_exact_match_may_strip_and_refuses_unknown_options() -> None:
    assert load_reward("exact_match", {"strip": True})(PROMPT, _done(" 12\n")) == 1.0
    with pytest.raises(ConfigurationError, match="exact_match"):
        load_reward("exact_match", {"stripp": True})
    with pytest.raises(ConfigurationError, match="did you mean 'exact_match'"):
        load_reward("exact-match", {})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        ("1", "returned '1'"),
        (None, "returned None"),
        ({"a": 1.0, "b": math.nan}, "part b returned nan"),
        ({}, "returned no part"),
        (10**400, "returned an integer too large for a float"),
        pytest.param(-(10**5000), "returned an integer too large for a float", id="huge"),
        (1 + 2j, "returned .1.2j."),
        (np.complex128(1), "returned np.complex128"),
        (np.float32("nan"), "returned np.float32.nan"),
        (np.ones(1), "returned array"),
        ([1.0], "returned .1.0."),
        ({"a": {"b": 1.0}}, "part a returned"),
        ({"mine": None}, "reward mine returned None"),
    ],
)
def test_what_is_no_finite_number_is_a_failure_not_a_zero(value: Any, says: str) -> None:
    with pytest.raises(RewardFailed, match=says):
        call_reward("mine", lambda prompt, completion: value, PROMPT, _done(""))


def test_numbers_and_parts_come_through() -> None:
    assert call_reward("mine", lambda p, c: np.float32(0.5), PROMPT, _done("")) == {"mine": 0.5}
    assert call_reward("mine", lambda p, c: {"a": 1, "b": True}, PROMPT, _done("")) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(
    ("value", "number"),
    [(np.bool_(True), 1.0), (np.int64(-3), -3.0), (np.float16(0.25), 0.25), (False, 0.0), (2**60, float(2**60))],
)
def test_every_kind_of_real_number_is_taken_as_a_float(value: Any, number: float) -> None:
    (found,) = call_reward("mine", lambda prompt, completion: value, PROMPT, _done("")).values()
    assert type(found) is float and found == number


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("x"), RecursionError("deep"), AssertionError()])
def test_whatever_a_reward_raises_is_named_with_its_type(error: Exception) -> None:
    def raises(prompt: Prompt, completion: Completion) -> float:
        raise error

    with pytest.raises(RewardFailed, match=f"reward mine raised {type(error).__name__}"):
        call_reward("mine", raises, PROMPT, _done(""))


class Lazy(dict[str, float]):
    """Parts under names that are no text."""


def test_parts_of_any_mapping_get_names_of_text() -> None:
    assert call_reward("mine", lambda p, c: Lazy({1: 0.5, "b": 2}), PROMPT, _done("")) == {"1": 0.5, "b": 2.0}  # type: ignore[dict-item]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool of two processes that can import the rewards written here."""
    (tmp_path / "pool_rewards.py").write_text(
        "import os, time\n"
        "def slow(p, c): time.sleep(0.6); print('noise'); return len(c.text)\n"
        "def hangs(p, c): time.sleep(3600)\n"
        "def dies(p, c): os._exit(9)\n"
        "def pid(p, c): return os.getpid()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = RewardPool(2)
    yield made
    made.close()


def test_calls_overlap_and_hung_or_dead_processes_are_replaced(pool: RewardPool) -> None:
    def call(name: str, timeout: float = 10.0) -> Any:
        return pool.call(f"pool_rewards:{name}", {}, PROMPT, _done("abc"), timeout)

    async def play() -> None:
        await asyncio.gather(call("slow"), call("slow"))
        began = time.monotonic()
        assert await asyncio.gather(call("slow"), call("slow")) == [{"pool_rewards:slow": 3.0}] * 2
        assert time.monotonic() - began < 1.15
        hung, fine = await asyncio.gather(call("hangs", 0.3), call("slow"), return_exceptions=True)
        assert isinstance(hung, RewardFailed)
        assert "did not return within 0.3 s" in str(hung)
        assert fine == {"pool_rewards:slow": 3.0}
        assert pool.killed == 1
        with pytest.raises(RewardFailed, match="exit status 9"):
            await call("dies")
        with pytest.raises(RewardFailed, match="no_such"):
            await call("no_such")
        assert len({(await call("pid"))["pool_rewards:pid"] for _ in range(4)}) <= 2

    asyncio.run(play())
