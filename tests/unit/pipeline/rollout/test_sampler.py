"""A sampler never samples below a task's min version, and frees what nobody waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.engines.engine import PromptTooLong
from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rollout.sampler import Sampler
from headrace.schemas.parts import PolicyBound, Sampling
from headrace.schemas.records import Prompt

PROMPT = np.array([5, 6], np.int32)


@pytest.fixture
def sampler(tiny_model: Path) -> Sampler:
    made = Sampler(0, ScriptedEngine(slots=4, max_prompt_tokens=8), ModelFolder(tiny_model))
    made.load({}, 3)
    return made


def test_a_request_waits_for_its_version_and_is_sampled_by_nothing_older(sampler: Sampler) -> None:
    async def play() -> None:
        sampling = Sampling(max_new_tokens=4, seed=1)
        now = asyncio.create_task(sampler.generate(PROMPT, sampling, PolicyBound(policy=0, min_version=3)))
        later = asyncio.create_task(sampler.generate(PROMPT, sampling, PolicyBound(policy=0, min_version=5)))
        await asyncio.sleep(0)
        assert sampler.waiting_for == 5
        sampler.load({}, 4)
        while sampler.busy:
            sampler.step()
        await asyncio.sleep(0)
        assert set((await now).versions.tolist()) == {4}
        assert not later.done()
        sampler.load({}, 6)
        assert sampler.waiting_for == -1
        while sampler.busy:
            sampler.step()
        assert set((await later).versions.tolist()) == {6}

    asyncio.run(play())


def test_cancelling_frees_the_row_or_the_place_in_the_queue(sampler: Sampler) -> None:
    async def play() -> None:
        sampling = Sampling(max_new_tokens=100, seed=1)
        tasks = [
            asyncio.create_task(sampler.generate(PROMPT, sampling, PolicyBound(policy=0, min_version=v)))
            for v in (3, 3, 9)
        ]
        await asyncio.sleep(0)
        sampler.step()
        for one in tasks[1:]:
            one.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert sampler.engine.active == 1
        assert sampler.waiting_for == -1
        while sampler.busy:
            sampler.step()
        assert (await tasks[0]).end_reason == "stop"

    asyncio.run(play())


def test_a_long_prompt_is_refused(sampler: Sampler) -> None:
    async def play() -> None:
        with pytest.raises(PromptTooLong):
            await sampler.generate(np.zeros(9, np.int32), Sampling(), PolicyBound(policy=0, min_version=0))

    asyncio.run(play())


def test_text_and_messages_become_tokens_and_back(sampler: Sampler) -> None:
    prompt = Prompt(prompt_id="1", stream="s", dataset="d", row=0, epoch=0, position=0, prompt="21=")
    tokens = sampler.encode(prompt)
    assert tokens.dtype == np.int32
    assert sampler.encode(prompt) is tokens
    assert sampler.decode(tokens) == "21="
    assert sampler.decode(np.append(tokens, 2)) == "21=", "special tokens are no text"


def test_a_refusal_after_waiting_reaches_who_waits_and_nobody_else(sampler: Sampler) -> None:
    async def play() -> None:
        bound = PolicyBound(policy=0, min_version=5)
        long = np.zeros(9, np.int32)
        waits = asyncio.create_task(sampler.generate(long, Sampling(), bound))
        left = asyncio.create_task(sampler.generate(long, Sampling(), bound))
        await asyncio.sleep(0)
        left.cancel()
        sampler.load({}, 5)
        assert sampler.waiting_for == -1
        with pytest.raises(PromptTooLong):
            await waits
        with pytest.raises(asyncio.CancelledError):
            await left
        assert not sampler.busy

    asyncio.run(play())


def test_a_request_cancelled_as_its_version_comes_is_taken_out_of_the_engine(sampler: Sampler) -> None:
    async def play() -> None:
        left = asyncio.create_task(sampler.generate(PROMPT, Sampling(), PolicyBound(policy=0, min_version=4)))
        await asyncio.sleep(0)
        left.cancel()
        sampler.load({}, 4)
        await asyncio.gather(left, return_exceptions=True)
        assert sampler.engine.active == 0

    asyncio.run(play())


def test_tokens_are_counted_and_equal_seeds_sample_equal_tokens(sampler: Sampler) -> None:
    async def play() -> None:
        sampling = Sampling(max_new_tokens=6, seed=3)
        same = [
            asyncio.create_task(sampler.generate(PROMPT, sampling, PolicyBound(policy=0, min_version=0)))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        while sampler.busy:
            sampler.step()
        made = [await one for one in same]
        assert len({tuple(m.tokens.tolist()) for m in made}) == 1
        assert len({m.key for m in made}) == 3
        assert sampler.tokens == sum(m.tokens.size for m in made)

    asyncio.run(play())


def test_a_text_that_no_prompt_can_hold_is_not_tokenised_to_its_end(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ModelFolder(tiny_model)
    made = Sampler(0, ScriptedEngine(slots=4, max_prompt_tokens=8), folder, max_prompt_tokens=8)
    whole, looked = folder.tokenize, list[int]()
    monkeypatch.setattr(folder, "tokenize", lambda text: looked.append(len(text)) or whole(text))
    with pytest.raises(PromptTooLong, match="first 128 of 5000000 characters are more than 8 tokens"):
        made.tokenize("5" * 5_000_000)
    assert looked == [128]
    assert made.tokenize("5" * 128).size == 128, "what is not much too long is left to the engine"
    monkeypatch.setattr(folder, "tokenize", lambda text: looked.append(len(text)) or np.array([7], np.int32))
    assert made.tokenize("5" * 300).tolist() == [7], "a text of few long tokens is looked at further"
    assert looked[-3:] == [128, 256, 300]
