"""The promises of an engine, kept by the scripted one: lengths and failures by the script, labels that are true."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from headrace.connectors.engines.engine import (
    Generation,
    PromptTooLong,
    Request,
    WeightsRefused,
    generate,
    neutral,
    options_of,
)
from headrace.connectors.engines.scripted import ScriptedEngine, ScriptedOptions
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Sampling

STOP = 2


def _engine(slots: int = 16, waits: list[float] | None = None, **options: float) -> ScriptedEngine:
    kept: list[float] = [] if waits is None else waits
    engine = ScriptedEngine(slots=slots, max_prompt_tokens=8, options=options, wait=kept.append)
    engine.load_weights({}, 0)
    return engine


def _requests(count: int, new: int = 1_000) -> list[Request]:
    return [Request(i, np.ones(3, np.int32), Sampling(max_new_tokens=new, seed=i)) for i in range(count)]


@pytest.mark.parametrize(("mean", "sigma"), [(8.0, 0.5), (30.0, 0.0), (20.0, 1.0), (1.0, 0.0)])
def test_lengths_have_the_mean_and_the_spread_of_the_script(mean: float, sigma: float) -> None:
    done = generate(_engine(64, mean_length=mean, sigma=sigma), _requests(600))
    lengths = np.array([one.tokens.size for one in done])
    error = 4 * mean * math.sqrt(math.exp(sigma**2) - 1) / math.sqrt(600) + 0.5
    assert abs(lengths.mean() - mean) < error
    assert (lengths.std() == 0) == (sigma == 0)
    assert all(one.tokens[-1] == STOP and STOP not in one.tokens[:-1] for one in done)
    assert {one.end_reason for one in done} == {"stop"}


def test_a_limit_ends_what_the_script_would_go_on_with() -> None:
    done = generate(_engine(mean_length=50, sigma=0), _requests(5, new=7))
    assert [(one.end_reason, one.tokens.size) for one in done] == [("length", 7)] * 5
    assert all(STOP not in one.tokens for one in done)


def test_tokens_depend_on_the_seed_alone_and_log_probs_are_those_of_the_vocabulary() -> None:
    alone = [generate(_engine(1), [request])[0] for request in _requests(20)]
    together = generate(_engine(7), _requests(20))
    for one, other in zip(alone, together, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, -math.log(64), rtol=1e-6)
    assert len({tuple(one.tokens.tolist()) for one in alone}) > 15


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_sequences_ends_with_a_log_prob_that_is_no_number(share: float) -> None:
    done = generate(_engine(64, nan_share=share), _requests(400))
    broken = [bool(np.isnan(one.logprobs).any()) for one in done]
    assert abs(sum(broken) / 400 - share) < 0.08
    assert not any(np.isnan(one.logprobs[:-1]).any() for one in done)


def test_a_step_takes_the_time_that_the_script_says_and_an_empty_one_none() -> None:
    waits: list[float] = []
    engine = _engine(4, waits, step_seconds=0.5, row_seconds=0.25, mean_length=2, sigma=0)
    assert engine.step() == []
    assert waits == []
    generate(engine, _requests(6))
    assert waits == [0.5 + 4 * 0.25] * 2 + [0.5 + 2 * 0.25] * 2


@pytest.mark.parametrize("seed", range(6))
def test_requests_aborts_and_swaps_at_random_lose_and_mix_nothing(seed: int) -> None:
    dice = random.Random(seed)
    engine = _engine(5, mean_length=6)
    waiting, done, log = _requests(30), {}, {}
    version = 0
    while waiting or engine.active:
        for _ in range(dice.randint(0, 4)):
            if waiting:
                request = waiting.pop()
                engine.add(request)
                log[request.key] = []
        if dice.random() < 0.3:
            version += 1
            engine.load_weights({}, version)
        inside = [key for key in log if key not in done]
        if inside and dice.random() < 0.2:
            key = dice.choice(inside)
            partial = engine.abort(key)
            assert partial is not None
            assert partial.end_reason == "abort"
            done[key] = partial
            assert engine.abort(key) is None, "it is not inside any more"
        before = engine.active
        ended = engine.step()
        assert engine.active == before - len(ended)
        done.update({one.key: one for one in ended})
        running = {int(key) for key in engine._rows.keys[: engine._rows.count]}
        for key in running | {one.key for one in ended}:
            log[key].append(version)
    assert sorted(done) == list(range(30))
    whole = {one.key: one for one in generate(_engine(30, mean_length=6), _requests(30))}
    for key, one in done.items():
        assert one.tokens.tolist() == whole[key].tokens.tolist()[: one.tokens.size], (
            "the same tokens, cut where aborted"
        )
        assert one.versions.tolist() == log[key][: one.tokens.size]
        assert one.tokens.size == one.logprobs.size == one.versions.size


def test_refusals_come_before_anything_is_taken() -> None:
    engine = ScriptedEngine(max_prompt_tokens=8)
    with pytest.raises(PromptTooLong, match="9 tokens, at most 8"):
        engine.add(Request(1, np.zeros(9, np.int32), Sampling()))
    assert (engine.active, engine.version) == (0, -1)
    engine.add(_requests(1)[0])
    with pytest.raises(WeightsRefused, match="load_weights comes before step"):
        engine.step()
    engine.load_weights({}, 3)
    assert engine.version == 3
    engine.close()
    assert engine.active == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mean_lenght": 5}, "mean_lenght"),
        ({"mean_length": 0.5}, "mean_length"),
        ({"nan_share": 1.5}, "nan_share"),
        ({"step_seconds": -1}, "step_seconds"),
        ({"sigma": "wide"}, "sigma"),
    ],
)
def test_options_that_an_engine_does_not_have_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"rollout\.options for engine scripted: (.|\n)*{says}"):
        ScriptedEngine(options=options)
    assert options_of(ScriptedOptions, "scripted", None) == ScriptedOptions()


@pytest.mark.parametrize(
    ("sampling", "trained"),
    [
        (Sampling(), True),
        (Sampling(temperature=0.7), True),
        (Sampling(temperature=0), False),
        (Sampling(top_p=0.99), False),
        (Sampling(top_k=50), False),
    ],
)
def test_only_the_policys_own_distribution_may_be_trained_on(sampling: Sampling, trained: bool) -> None:
    assert neutral(sampling) is trained


def test_an_empty_generation_has_arrays_of_the_right_kinds() -> None:
    empty = Generation(1, "abort")
    assert (empty.tokens.dtype, empty.logprobs.dtype, empty.versions.dtype) == (np.int32, np.float32, np.int32)
    assert empty.tokens.size == empty.logprobs.size == empty.versions.size == 0
