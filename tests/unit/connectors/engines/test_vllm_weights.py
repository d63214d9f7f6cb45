"""Hand-over to vLLM: a real engine on CPU serves exactly the weights of the version, tied embeddings included."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from headrace.connectors.engines.engine import WeightsRefused
from headrace.connectors.engines.vllm_weights import (
    HandOver,
    cache_salt,
    engine_arguments,
    install,
    install_async,
    starting,
)

Weights = dict[str, NDArray[np.uint16]]
PROMPTS = [[5, 6, 7, 8] * 10, [9, 4, 11] * 13]


def bits_of(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def moved(weights: Weights, seed: int, share: float) -> Weights:
    rng = np.random.default_rng(seed)
    out = {name: array.copy() for name, array in weights.items()}
    for array in out.values():
        at = rng.random(array.shape) < share
        array[at] = bits_of(rng.standard_normal(int(at.sum())).astype(np.float32) * np.float32(0.2))
    return out


def digests(weights: Weights) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(array.tobytes()) for name, array in weights.items()}


# ---- the files alone ----------------------------------------------------------------------------------------------


@pytest.fixture
def hand_over(tmp_path: Path) -> Iterator[HandOver]:
    hand_over = HandOver(tmp_path, verify="always")
    yield hand_over
    hand_over.close()


def tensors_of(info: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(info["path"]))


def test_an_update_holds_what_changed_and_nothing_else(hand_over: HandOver) -> None:
    old = {"a": np.arange(30, dtype=np.uint16).reshape(5, 6), "b": np.arange(4, dtype=np.uint16)}
    whole = hand_over.prepare(old, 3)
    assert set(tensors_of(whole)) == {"a#new", "b#new"}
    hand_over.installed(old, 3)
    assert not Path(whole["path"]).exists()
    new = {"a": old["a"].copy(), "b": old["b"]}
    new["a"][0, 5], new["a"][4, 5] = 77, 78
    info = hand_over.prepare(new, 4)
    found = tensors_of(info)
    assert set(found) == {"a#at", "a#new"}
    assert found["a#at"].tolist() == [5, 29]
    assert info["digests"] == {"a": digests(new)["a"]}
    assert (info["shapes"]["a"], info["dtypes"]["a"]) == ([5, 6], "bfloat16")


def test_other_tensors_and_nan_are_refused_before_anything_is_sent(hand_over: HandOver) -> None:
    weights = {"a": np.zeros((2, 3), np.uint16)}
    hand_over.installed(weights, 1)
    with pytest.raises(WeightsRefused, match="other tensors"):
        hand_over.prepare({"a": np.zeros((3, 2), np.uint16)}, 2)
    with pytest.raises(WeightsRefused, match="NaN"):
        hand_over.prepare({"a": np.full((2, 3), 0x7FC0, np.uint16)}, 2)
    hand_over.prepare({"a": np.full((2, 3), 0x7F80, np.uint16)}, 2)  # infinity travels


def test_the_folder_of_a_killed_owner_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headrace.connectors.engines.vllm_weights import HandOver\n"
        "HandOver(Path(sys.argv[1])); print('ready', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    (folder,) = tmp_path.iterdir()
    (folder / "7-whole.safetensors").write_bytes(b"left behind")
    os.utime(folder, (1, 1))
    HandOver(tmp_path).close()
    assert folder.exists(), "its owner lives"
    owner.kill()
    owner.wait(10)
    fresh = tmp_path / "headrace-weights-fresh"
    fresh.mkdir()
    HandOver(tmp_path).close()
    assert list(tmp_path.iterdir()) == [fresh], "a young folder may not be locked yet"


def test_salts_differ_by_version() -> None:
    assert cache_salt(3) != cache_salt(4)


class Failing:
    """An engine whose workers fail so many times."""

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self.left, self.updates, self.resets = times, [], 0
        self.error = error or RuntimeError("worker died")

    def collective_rpc(self, name: str, kwargs: dict[str, Any] | None = None) -> None:
        if name == "update_weights":
            assert kwargs is not None
            self.updates.append(Path(kwargs["update_info"]["path"]).stem)
            if self.left:
                self.left -= 1
                raise self.error

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.resets += 1


def test_an_update_that_fails_is_answered_by_a_whole_one(hand_over: HandOver) -> None:
    first, second = {"a": np.zeros(5, np.uint16)}, {"a": np.ones(5, np.uint16)}
    hand_over.installed(first, 0)
    engine = Failing(1)
    install(engine, hand_over, second, 1)
    assert engine.updates == ["1-changed", "1-whole"]
    assert (hand_over.version, engine.resets) == (1, 1)
    engine = Failing(2)
    with pytest.raises(WeightsRefused, match="version 2, changed or whole: worker died"):
        install(engine, hand_over, first, 2)
    assert (hand_over.version, engine.resets) == (-1, 0)
    install(Failing(0), hand_over, first, 2)
    assert hand_over.version == 2


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()], ids=["cancelled", "interrupted"])
def test_an_update_that_is_broken_off_is_followed_by_a_whole_one(hand_over: HandOver, error: BaseException) -> None:
    first, second = {"a": np.zeros(5, np.uint16)}, {"a": np.ones(5, np.uint16)}
    hand_over.installed(first, 0)
    with pytest.raises(type(error)):
        install(Failing(1, error), hand_over, second, 1)
    assert hand_over.version == -1
    engine = Failing(0)
    install(engine, hand_over, first, 2)
    assert engine.updates == ["2-whole"]


QUIET = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "block_size": 32,
}


# ---- a real engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    pytest.importorskip("vllm", reason="needs vLLM (extra rollout-cpu)")
    folder = make(tmp_path_factory.mktemp("model") / "m", tied=request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        # what the kernels of deltas and a local object store load must not be in the way of vLLM's start
        from flask import session  # noqa: F401
        from numba.core import types  # noqa: F401
        from vllm import LLM

        with starting():
            engine = LLM(model=str(folder), **SMALL, **engine_arguments())
        yield engine, folder
        engine.llm_engine.engine_core.shutdown()


def make(folder: Path, *, tied: bool) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=40,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def first_weights(folder: Path) -> Weights:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: bits_of(p.detach().float().numpy()) for name, p in model.named_parameters()}


def scores(engine: Any) -> list[list[float]]:
    """Log-probs of the prompts' tokens; the second time over, the prefix cache would answer."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    out = []
    for answer in engine.generate(given, sampling, use_tqdm=False):
        completion = answer.outputs[0]
        out.append([step[t].logprob for step, t in zip(completion.logprobs, completion.token_ids, strict=True)])
    return out


def loaded(folder: Path, weights: Weights) -> Any:
    """The model in transformers with the given weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    state = {n: torch.from_numpy(a.copy()).view(torch.bfloat16).float() for n, a in weights.items()}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    model.tie_weights()
    return model


def wanted(folder: Path, weights: Weights) -> list[list[float]]:
    import torch

    model = loaded(folder, weights)
    out = []
    for prompt in PROMPTS:
        tokens, values = list(prompt), []
        for _ in range(8):
            logits = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            tokens.append(int(logits.argmax()))
            values.append(float(logits[tokens[-1]]))
        out.append(values)
    return out


def test_every_version_is_served_exactly(served: tuple[Any, Path], tmp_path: Path) -> None:
    engine, folder = served
    hand_over = HandOver(tmp_path, verify="always")
    weights = first_weights(folder)
    before: list[list[float]] = []
    for version, share in enumerate((1.0, 0.01, 0.0, 0.3)):
        weights = moved(weights, version, share) if version else weights
        install(engine, hand_over, weights, version)
        shapes = {name: list(array.shape) for name, array in weights.items()}
        (loaded,) = engine.collective_rpc("loaded_digests", args=(shapes, dict.fromkeys(shapes, "bfloat16")))
        assert loaded == digests(weights), "what is loaded is not what was published"
        found = scores(engine)
        assert np.allclose(found, wanted(folder, weights), atol=2e-5)
        assert found == scores(engine), "from the prefix cache"
        assert share == 0.0 or found != before, "the prefix cache must not give keys of the version before"
        before = found
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "files of installed versions stay"


def test_an_update_that_was_damaged_on_the_way_is_repaired(
    served: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, folder = served
    hand_over = HandOver(tmp_path, verify="always")
    weights = first_weights(folder)
    install(engine, hand_over, weights, 10)
    real, damaged = hand_over.prepare, []

    def prepare(new: Weights, version: int) -> dict[str, Any]:
        info = real(new, version)
        if not damaged:
            damaged.append(1)
            path = Path(info["path"])
            path.write_bytes(path.read_bytes()[:-2] + b"\x12\x34")
        return info

    monkeypatch.setattr(hand_over, "prepare", prepare)
    new = moved(weights, 11, 0.02)
    install(engine, hand_over, new, 11)
    assert hand_over.version == 11
    assert np.allclose(scores(engine), wanted(folder, new), atol=2e-5)


def test_an_engine_in_processes_of_its_own_is_updated_between_two_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ``AsyncLLM`` with a request under way: it goes on, and its tokens name the version that sampled them."""
    pytest.importorskip("vllm", reason="needs vLLM (extra rollout-cpu)")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    folder = make(tmp_path / "m", tied=True)
    first = first_weights(folder)
    second = moved(first, 5, 0.2)

    async def run() -> Any:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        more = {**SMALL, **engine_arguments(), "weight_transfer_config": WeightTransferConfig(backend="headrace")}
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), disable_log_stats=True, **more))
        try:
            hand_over = HandOver(tmp_path, verify="always")
            await install_async(engine, hand_over, first, 0)
            sampling = SamplingParams(
                max_tokens=56,
                temperature=0,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
                output_kind=RequestOutputKind.CUMULATIVE,
            )
            last, sent = None, False
            async for last in engine.generate({"prompt_token_ids": PROMPTS[0][:8]}, sampling, "one"):
                if not sent and len(last.outputs[0].token_ids) > 3:
                    sent = True
                    with pytest.raises(WeightsRefused, match="NaN"):
                        await install_async(engine, hand_over, {n: a | np.uint16(0x7FC1) for n, a in first.items()}, 9)
                    await install_async(engine, hand_over, second, 1)
            return last
        finally:
            engine.shutdown()

    completion = asyncio.run(run()).outputs[0]
    spans = completion.weight_versions
    assert [span.version for span in spans] == ["0", "1"]
    assert 0 < spans[0].end == spans[1].start < 56
    tokens = list(completion.token_ids)
    found = [step[t].logprob for step, t in zip(completion.logprobs, tokens, strict=True)]
    for weights, span in ((first, spans[0]), (second, spans[1])):
        wanted = teacher_forced(folder, weights, PROMPTS[0][:8], tokens)
        part = slice(span.start, span.end)
        assert np.allclose(found[part], wanted[part], atol=2e-5), span


def teacher_forced(folder: Path, weights: Weights, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probs of given tokens, each after all before it."""
    import torch

    logits = loaded(folder, weights)(torch.tensor([prompt + tokens])).logits[0].float().log_softmax(-1)
    return [float(logits[len(prompt) - 1 + at, token]) for at, token in enumerate(tokens)]
