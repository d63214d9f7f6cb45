"""What becomes of unfinished sequences when new weights come: keep, abort_resume, finish; labels stay true in each."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.connectors.engines.engine import Generation
from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rollout.episode import Episode
from headrace.pipeline.rollout.sampler import OnNewWeights, Sampler, Session
from headrace.schemas.parts import PolicyBound, Sampling

PROMPT = np.array([5, 6], np.int32)
ANY = PolicyBound(policy=0, min_version=0)


class Logged(ScriptedEngine):
    """Notes for each key the version in force whenever it sampled a token."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.log: dict[int, list[int]] = {}

    def step(self) -> list[Generation]:
        inside = {int(k) for k in self._rows.keys[: self._rows.count]} | {r.key for r in list(self._waiting)[:1000]}
        before = {k: self._made(k) for k in inside}
        ended = {one.key: one for one in super().step()}
        for key in inside:
            now = ended[key].tokens.size if key in ended else self._made(key)
            self.log.setdefault(key, []).extend([self.version] * (now - before[key]))
        return list(ended.values())

    def _made(self, key: int) -> int:
        row = self._rows.find(key)
        return int(self._rows.produced[row]) if row >= 0 else 0


def make(model: Path, mode: OnNewWeights, slots: int = 64, **options: Any) -> Sampler:
    engine = Logged(slots=slots, max_prompt_tokens=8, options={"mean_length": 12, **options})
    made = Sampler(0, engine, ModelFolder(model), on_new_weights=mode)
    made.load({}, 0)
    return made


async def settle(sampler: Sampler, steps: int = 10_000) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)
        if sampler.busy:
            sampler.step()


@pytest.mark.parametrize("mode", ["keep", "abort_resume", "finish"])
@pytest.mark.parametrize("seed", range(4))
def test_labels_are_true_and_tokens_those_of_an_undisturbed_run(
    tiny_model: Path, mode: OnNewWeights, seed: int
) -> None:
    async def play() -> None:
        dice = random.Random(seed)
        sampler, calm = make(tiny_model, mode, slots=6), make(tiny_model, "keep")
        engine = sampler.engine
        assert isinstance(engine, Logged)
        wanted: list[asyncio.Task[Generation]] = []
        episodes = [Episode() for _ in range(20)]
        version = 0
        for number in range(200):
            if len(wanted) < 20 and dice.random() < 0.4:
                episode = episodes[len(wanted)]
                one = Session(0, sampler, ANY, episode).generate(PROMPT, Sampling(max_new_tokens=40, seed=number))
                wanted.append(asyncio.create_task(one, name=str(number)))
            await asyncio.sleep(0)
            if dice.random() < 0.2:
                version += 1
                broken_off = sampler.load({}, version)
                assert not broken_off or mode == "abort_resume"
            sampler.step()
            await asyncio.sleep(0)
            for one, episode in zip(wanted, episodes, strict=False):
                if one.done():
                    sampler.leave(episode)
        await settle(sampler, 300)
        assert len(wanted) == 20
        for number, one in enumerate(wanted):
            made = one.result()
            seeded = Sampling(max_new_tokens=40, seed=int(one.get_name()))
            undisturbed = asyncio.create_task(calm.generate(PROMPT, seeded, ANY))
            await settle(calm, 60)
            assert made.tokens.tolist() == undisturbed.result().tokens.tolist(), (
                "no number is used twice, none left out"
            )
            assert made.end_reason == undisturbed.result().end_reason
            assert made.versions.tolist() == engine.log[number]
            if mode == "finish":
                assert len(set(made.versions.tolist())) == 1
        if mode != "finish":
            assert any(len(set(one.result().versions.tolist())) > 1 for one in wanted)
        assert engine.active == 0
        assert sampler.prefixes() == {}

    asyncio.run(play())


def test_finish_lets_an_episode_play_all_its_turns_under_the_weights_it_began_with(tiny_model: Path) -> None:
    async def play() -> None:
        sampler = make(tiny_model, "finish", sigma=0)
        first, second = Episode(), Episode()
        old = Session(0, sampler, ANY, first)
        turn = asyncio.create_task(old.generate(PROMPT, Sampling(max_new_tokens=40, seed=1)))
        await settle(sampler, 2)
        sampler.load({}, 1)
        sampler.load({}, 2)
        late = asyncio.create_task(Session(0, sampler, ANY, second).generate(PROMPT, Sampling(seed=2)))
        await settle(sampler, 30)
        assert set((await turn).versions.tolist()) == {0}
        assert not late.done(), "whoever comes later waits for the new weights"
        again = asyncio.create_task(old.generate(PROMPT, Sampling(max_new_tokens=40, seed=3)))
        await settle(sampler, 30)
        assert set((await again).versions.tolist()) == {0}
        assert sampler.version == 0
        sampler.leave(first)
        assert sampler.version == 2, "only the newest of those that waited is put in force"
        await settle(sampler, 30)
        assert set((await late).versions.tolist()) == {2}
        sampler.leave(second)
        sampler.load({}, 3)
        assert sampler.version == 3

    asyncio.run(play())


def test_an_episode_that_is_cancelled_holds_no_weights_back(tiny_model: Path) -> None:
    async def play() -> None:
        sampler = make(tiny_model, "finish")
        episode = Episode()
        turn = asyncio.create_task(Session(0, sampler, ANY, episode).generate(PROMPT, Sampling(max_new_tokens=40)))
        await settle(sampler, 2)
        sampler.load({}, 1)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        sampler.leave(episode)
        assert (sampler.version, sampler.engine.active) == (1, 0)

    asyncio.run(play())


def test_a_saved_prefix_is_taken_over_by_another_worker(tiny_model: Path) -> None:
    """A turn that was finished, one that was broken off, and one that nobody asks for again."""

    async def play() -> None:
        here, there = make(tiny_model, "abort_resume"), make(tiny_model, "keep")
        there.load({}, 9)
        first = Episode()
        mine = Session(0, here, ANY, first)
        sampling = Sampling(max_new_tokens=40, seed=4)
        done = asyncio.create_task(mine.generate(PROMPT, sampling))
        await settle(here, 60)
        longer = np.append(PROMPT, 8).astype(np.int32)
        running = asyncio.create_task(mine.generate(longer, Sampling(max_new_tokens=40, seed=5)))
        await settle(here, 4)
        assert here.load({}, 1)
        (prefix,) = here.prefixes()[first]
        assert prefix.end_reason == "abort"
        assert 1 <= prefix.tokens.size - prefix.prompt_length < 40
        saved = first.sequences([prefix])
        assert [s.end_reason for s in saved] == [(await done).end_reason, "abort"]
        running.cancel()

        second = Episode(saved=saved)
        other = Session(0, there, ANY, second)
        other_seed = Sampling(max_new_tokens=40, seed=777)
        served = await other.generate(PROMPT, other_seed)
        assert served.tokens.tolist() == (await done).tokens.tolist()
        assert served.versions.tolist() == (await done).versions.tolist()
        rest = asyncio.create_task(other.generate(longer, other_seed))
        await settle(there, 60)
        made, n = await rest, prefix.tokens.size - prefix.prompt_length
        assert made.tokens[:n].tolist() == prefix.tokens[prefix.prompt_length :].tolist()
        assert set(made.versions[:n].tolist()) == {0}
        assert set(made.versions[n:].tolist()) == {9}
        assert made.tokens.size <= 40
        assert second.served == (await done).tokens.size + n
        assert [s.tokens.size for s in second.sequences([])] == [
            s.tokens.size + e for s, e in zip(saved, (0, made.tokens.size - n), strict=True)
        ]
        fresh = asyncio.create_task(other.generate(PROMPT, other_seed))
        await settle(there, 60)
        assert set((await fresh).versions.tolist()) == {9}, "each is served once"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("bound", "sampling", "prompt"),
    [
        (PolicyBound(policy=0, min_version=1), Sampling(max_new_tokens=40), PROMPT),
        (PolicyBound(policy=1, min_version=0), Sampling(max_new_tokens=40), PROMPT),
        (ANY, Sampling(max_new_tokens=40, temperature=0.5), PROMPT),
        (ANY, Sampling(max_new_tokens=41), PROMPT),
        (ANY, Sampling(max_new_tokens=40), np.array([5], np.int32)),
    ],
    ids=["older than allowed", "another policy", "another temperature", "another length", "another prompt"],
)
def test_a_prefix_that_does_not_fit_is_left_out(
    tiny_model: Path, bound: PolicyBound, sampling: Sampling, prompt: np.ndarray
) -> None:
    async def saved() -> Episode:
        sampler = make(tiny_model, "abort_resume")
        episode = Episode()
        one = Session(0, sampler, ANY, episode).generate(PROMPT, Sampling(max_new_tokens=40, seed=2))
        running = asyncio.create_task(one)
        await settle(sampler, 3)
        sampler.break_off()
        found = Episode(saved=episode.sequences(sampler.prefixes()[episode]))
        running.cancel()
        return found

    episode = asyncio.run(saved())
    assert episode.take(prompt, sampling, bound) is None
    assert episode.served == 0
    assert episode.take(PROMPT, Sampling(max_new_tokens=40, seed=99), ANY) is not None
    assert episode.take(PROMPT, Sampling(max_new_tokens=40, seed=99), ANY) is None


def test_what_may_not_travel_is_not_saved(tiny_model: Path) -> None:
    async def play() -> None:
        sampler = make(tiny_model, "keep", nan_share=1.0, sigma=0)
        episode = Episode()
        one = asyncio.create_task(Session(0, sampler, ANY, episode).generate(PROMPT, Sampling(max_new_tokens=40)))
        await settle(sampler, 60)
        assert np.isnan((await one).logprobs).any()
        assert episode.sequences([]) == []

    asyncio.run(play())
