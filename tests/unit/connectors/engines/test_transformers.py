"""The transformers engine: log-probs, version labels, continuous batching, refusals, against plain full forwards."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.connectors.engines.engine import Engine, Generation, PromptTooLong, Request, WeightsRefused, generate
from headrace.connectors.engines.transformers import TransformersEngine
from headrace.schemas.parts import Sampling


def _bits(folder: Path, scale: float = 1.0) -> dict[str, np.ndarray]:
    """The folder's weights as bfloat16 bits, every matrix scaled, tied head left out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    out = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach() * scale if parameter.dim() > 1 else parameter.detach()
        out[name] = value.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
    return out


def _full_logprobs(
    folder: Path, bits: dict[str, np.ndarray], prompt: np.ndarray, done: Generation, t: float
) -> np.ndarray:
    """What a trainer recomputes: one forward without cache over prompt and completion, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(bits[name].view(np.int16)).view(torch.bfloat16))
        ids = torch.from_numpy(np.concatenate([prompt, done.tokens]).astype(np.int64))[None]
        logp = (model(ids).logits[0, prompt.size - 1 : -1] / t).log_softmax(-1)
        return logp.gather(1, torch.from_numpy(done.tokens.astype(np.int64))[:, None])[:, 0].numpy()


def _requests(n: int, seed: int = 0, t: float = 1.0, longest: int = 12, new: int = 20) -> list[Request]:
    r = random.Random(seed)
    return [
        Request(
            i,
            np.array([r.randrange(4, 40) for _ in range(r.randint(1, longest))], np.int32),
            Sampling(temperature=t, max_new_tokens=r.randint(1, new), seed=1000 + i),
        )
        for i in range(n)
    ]


@pytest.fixture
def engine(tiny_model: Path) -> TransformersEngine:
    made = TransformersEngine(tiny_model, slots=8, max_prompt_tokens=32)
    made.load_weights(_bits(tiny_model), 0)
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_trainers_forward(engine: TransformersEngine, tiny_model: Path, temperature: float) -> None:
    requests = _requests(30, t=temperature)
    bits = _bits(tiny_model)
    worst = 0.0
    for request, done in zip(requests, generate(engine, requests), strict=True):
        assert done.tokens.size >= 1
        expected = _full_logprobs(tiny_model, bits, request.prompt, done, temperature)
        worst = max(worst, float(np.abs(expected - done.logprobs).max()))
    assert worst <= 1e-4


def test_continuous_batching_equals_one_by_one(engine: TransformersEngine, tiny_model: Path) -> None:
    requests = _requests(40, seed=3)
    together = generate(engine, requests)
    alone = TransformersEngine(tiny_model, slots=1, max_prompt_tokens=32)
    alone.load_weights(_bits(tiny_model), 0)
    for request, one in zip(requests, together, strict=True):
        other = generate(alone, [request])[0]
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.end_reason == other.end_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_completion_has_as_many_tokens_as_asked_for_unless_it_stops(engine: TransformersEngine) -> None:
    requests = _requests(40, seed=5)
    for request, done in zip(requests, generate(engine, requests), strict=True):
        if done.end_reason == "stop":
            assert done.tokens[-1] == 2
            assert done.tokens.size <= request.sampling.max_new_tokens
        else:
            assert done.tokens.size == request.sampling.max_new_tokens
        assert 2 not in done.tokens[:-1]


def test_same_seed_same_tokens_and_other_seed_other_tokens(engine: TransformersEngine) -> None:
    prompt = np.array([5, 6, 7], np.int32)

    def run(seed: int) -> list[int]:
        return generate(engine, [Request(seed, prompt, Sampling(max_new_tokens=30, seed=seed))])[0].tokens.tolist()

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(8)}) > 1


def test_samples_follow_the_models_distribution(engine: TransformersEngine, tiny_model: Path) -> None:
    prompt = np.array([9, 10], np.int32)
    n = 4000
    done = generate(engine, [Request(i, prompt, Sampling(max_new_tokens=1, seed=i)) for i in range(n)])
    counts = np.bincount([int(d.tokens[0]) for d in done], minlength=41) / n
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        p = model(torch.tensor([[9, 10]])).logits[0, -1].softmax(-1).numpy()
    # total variation of 4,000 draws over 41 tokens is about .04 when the distributions are equal
    assert 0.5 * np.abs(counts - p).sum() < 0.08


def _swapped_log(engine: Engine, folder: Path, seed: int) -> tuple[dict[int, Generation], dict[int, list[int]]]:
    """Run with requests, aborts and weight swaps at random steps; also a log of who was sampled at which version."""
    r = random.Random(seed)
    pending = _requests(25, seed=seed)
    inside: dict[int, list[int]] = {}
    done: dict[int, Generation] = {}
    version = engine.version
    while pending or engine.active:
        for _ in range(r.randint(0, 4)):
            if pending:
                request = pending.pop()
                engine.add(request)
                inside[request.key] = []
        if r.random() < 0.3:
            version += r.randint(1, 3)
            engine.load_weights(_bits(folder, 1 + 0.01 * version), version)
        running = [key for key in inside if key not in done]
        if r.random() < 0.1 and running:
            key = r.choice(running)
            partial = engine.abort(key)
            assert partial is not None
            assert partial.end_reason == "abort"
            done[key] = partial
        before = {key: len(inside[key]) for key in inside}
        for generation in engine.step():
            done[generation.key] = generation
        for key in before:
            if key not in done or done[key].tokens.size > before[key]:
                inside[key].append(version)
    return done, inside


@pytest.mark.parametrize("seed", range(6))
def test_version_labels_are_true_under_swaps_and_aborts(tiny_model: Path, seed: int) -> None:
    engine = TransformersEngine(tiny_model, slots=64, max_prompt_tokens=32)
    engine.load_weights(_bits(tiny_model), 0)
    done, log = _swapped_log(engine, tiny_model, seed)
    assert len(done) == 25
    for key, generation in done.items():
        assert generation.versions.tolist() == log[key][: generation.tokens.size]
        assert generation.tokens.size == generation.logprobs.size == generation.versions.size


def test_tokens_after_a_swap_are_of_the_new_weights_on_kept_keys(tiny_model: Path) -> None:
    engine = TransformersEngine(tiny_model, slots=2, max_prompt_tokens=32)
    old, new = _bits(tiny_model), _bits(tiny_model, 1.5)
    engine.load_weights(old, 0)
    request = Request(1, np.array([5], np.int32), Sampling(max_new_tokens=3, seed=5))
    engine.add(request)
    engine.step()
    engine.load_weights(new, 1)
    second = engine.step()
    partial = second[0] if second else engine.abort(1)
    assert partial is not None
    if partial.tokens.size > 1:
        pure = _full_logprobs(tiny_model, old, request.prompt, partial, 1.0)
        assert abs(pure[1] - partial.logprobs[1]) > 1e-3
        assert partial.versions.tolist() == [0, 1]
    assert all((engine.weights()[name] == bits).all() for name, bits in new.items())


def test_greedy_takes_the_likeliest_and_context_ends_it(tiny_model: Path) -> None:
    engine = TransformersEngine(tiny_model, slots=2, max_prompt_tokens=1024)
    bits = _bits(tiny_model)
    bits["model.embed_tokens.weight"][2] = 0
    engine.load_weights(bits, 0)
    prompt = np.arange(4, 40, dtype=np.int32)
    done = generate(engine, [Request(0, prompt, Sampling(temperature=0, max_new_tokens=1000))])[0]
    assert done.end_reason == "context_full" or done.tokens[-1] == 2
    if done.end_reason == "context_full":
        assert prompt.size + done.tokens.size == 128


def test_top_k_one_is_greedy_and_log_prob_is_of_the_restricted_distribution(engine: TransformersEngine) -> None:
    prompt = np.array([5, 6, 7], np.int32)
    greedy = generate(engine, [Request(0, prompt, Sampling(temperature=0, max_new_tokens=8))])[0]
    top = generate(engine, [Request(1, prompt, Sampling(top_k=1, max_new_tokens=8, seed=3))])[0]
    assert top.tokens.tolist() == greedy.tokens.tolist()
    assert np.abs(top.logprobs).max() < 1e-6


def test_refusals_name_the_cause(engine: TransformersEngine, tiny_model: Path) -> None:
    with pytest.raises(PromptTooLong, match=r"33 tokens, at most 32"):
        engine.add(Request(0, np.zeros(33, np.int32), Sampling()))
    bits = _bits(tiny_model)
    name = "model.layers.0.mlp.up_proj.weight"
    before = engine.weights()
    with pytest.raises(WeightsRefused, match="up_proj"):
        engine.load_weights({k: v for k, v in bits.items() if k != name}, 1)
    with pytest.raises(WeightsRefused, match="shapes"):
        engine.load_weights({**bits, name: bits[name][:3]}, 1)
    assert engine.version == 0
    assert all((before[k] == v).all() for k, v in engine.weights().items())
    with pytest.raises(WeightsRefused, match="no weights"):
        TransformersEngine(tiny_model).step()
