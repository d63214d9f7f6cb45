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
from headrace.pipeline.workflows.workflow import EpisodeFailed
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


def test_a_pinned_version_that_has_passed_and_a_long_prompt_are_refused(sampler: Sampler) -> None:
    async def play() -> None:
        with pytest.raises(EpisodeFailed, match="version 2 of policy 0 is asked for, 3 is loaded"):
            await sampler.generate(PROMPT, Sampling(), PolicyBound(policy=0, min_version=2, pinned=True))
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
