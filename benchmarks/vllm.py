"""vLLM as a rollout engine: how long an update stops it, whether log-probs and labels are true, what many of them leave
behind, and tokens per second beside the transformers engine.

The model is a random Qwen3 of 0.11 million parameters on CPU. Updates are sparse, as a trainer's are: 2 % of the
weights change. The pause is the time that vLLM stands still, by its own pause and resume; the call, from the worker's
thread, also compares the weights and writes the changes. Labels are checked by weights under which each log-prob says
which version sampled its token.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.engine_truth import Bits, mislabelled, soak, telling_bits
from benchmarks.form import Figure, main, median
from benchmarks.rollout import make_model
from headrace.connectors.engines.engine import Engine, Request, generate
from headrace.schemas.parts import Sampling

SLOTS = 64
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 64 << 20}


def moved(bits: Bits, version: int, share: float = 0.02) -> Bits:
    """The same weights with a share of them one or two steps of bfloat16 off."""
    rng = np.random.default_rng(version)
    out = {name: array.copy() for name, array in bits.items()}
    for array in out.values():
        array[rng.random(array.shape) < share] ^= np.uint16(1)
    return out


def requests(count: int, new: int, first: int = 0) -> list[Request]:
    """Prompts of 4 to 30 tokens, completions of up to ``new``."""
    r = random.Random(first)
    return [
        Request(
            first + key,
            np.array([r.randrange(4, 40) for _ in range(r.randint(4, 30))], np.int32),
            Sampling(max_new_tokens=new, seed=r.randrange(1 << 31)),
        )
        for key in range(count)
    ]


class Pauses:
    """Times between vLLM's pauses and resumes, in seconds, noted around its own calls."""

    def __init__(self, llm: Any) -> None:
        self.seconds: list[float] = []
        pause, resume, began = llm.pause_generation, llm.resume_generation, [0.0]

        async def noted_pause(**how: Any) -> None:
            began[0] = time.perf_counter()
            await pause(**how)

        async def noted_resume() -> None:
            await resume()
            self.seconds.append(time.perf_counter() - began[0])

        llm.pause_generation, llm.resume_generation = noted_pause, noted_resume


def update_times(engine: Any, bits: Bits, rounds: int) -> tuple[list[float], list[float]]:
    """Pauses and whole calls of updates while sequences run, in seconds."""
    pauses, calls = Pauses(engine._llm), []
    weights, keys = bits, itertools.count(step=SLOTS)
    for number in range(rounds):
        if engine.active < SLOTS // 2:
            for request in requests(SLOTS, 200, next(keys)):
                engine.add(request)
        for _ in range(3):
            engine.step()
        weights = moved(weights, number)
        began = time.perf_counter()
        engine.load_weights(weights, engine.version + 1)
        calls.append(time.perf_counter() - began)
    engine.abort_all()
    return pauses.seconds, calls


def logprob_error(engine: Engine, folder: Path, bits: Bits, count: int) -> tuple[float, float]:
    """Mean and largest difference between the engine's log-probs and those of a trainer's forward in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    engine.load_weights(bits, engine.version + 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    todo, errors = requests(count, 40), []
    with torch.inference_mode():
        for request, done in zip(todo, generate(engine, todo), strict=True):
            ids = torch.from_numpy(np.concatenate([request.prompt, done.tokens]).astype(np.int64))[None]
            logp = model(ids).logits[0, request.prompt.size - 1 : -1].log_softmax(-1)
            full = logp[torch.arange(done.tokens.size), ids[0, request.prompt.size :]].numpy()
            errors.append(np.abs(full - done.logprobs))
    every = np.concatenate(errors)
    return float(every.mean()), float(every.max())


def soaked(engine: Any, bits: Bits, rounds: int) -> Iterator[Figure]:
    """Aborts and updates in turn, ``rounds`` of each: wrong labels, what is left behind, growth of memory."""
    memory: dict[int, int] = {}

    def tell(number: int) -> None:
        if number in (rounds // 5, rounds):
            memory[number] = _memory()

    def load(version: int) -> None:
        engine.load_weights(telling_bits(bits, version), version)

    load(engine.version + 1)
    asked, done = soak(engine, load, rounds, first=engine.version + 1, tell=tell)
    states = engine._llm.output_processor
    files = sum(1 for path in engine._hand_over._folder.rglob("*") if path.is_file())
    yield Figure("soak_rounds", rounds, anchor="an abort and an update each")
    yield Figure("soak_tokens", sum(made.tokens.size for made in done.values()))
    wrong = len(mislabelled(bits, asked, done, 1e-3))
    yield Figure("soak_mislabelled", wrong, "", 0, False, "tokens with the log-prob of other weights")
    left = len(states.request_states) + len(states.external_req_ids) + files + engine.active
    yield Figure("soak_left_behind", left, "", 0, False, "requests, ids and files after it")
    yield Figure("soak_grown_mb", (memory[rounds] - memory[rounds // 5]) / 2**20, "MB", anchor="all processes")


def _memory() -> int:
    """Memory of this process and of vLLM's, in bytes."""
    me = psutil.Process()
    return sum(int(process.memory_info().rss) for process in (me, *me.children(recursive=True)))


def speed(engine: Engine, count: int) -> float:
    """Tokens per second of wall time with all slots busy."""
    todo = requests(count, 40)
    began = time.perf_counter()
    tokens = sum(done.tokens.size for done in generate(engine, todo))
    return tokens / (time.perf_counter() - began)


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """In bfloat16, then in float32."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from headrace.connectors.engines.transformers import TransformersEngine
    from headrace.connectors.engines.vllm import VllmEngine

    rounds, aborts, count = (20, 60, 60) if given.quick else (60, 1000, 300)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        bits = make_model(folder)
        began = time.perf_counter()
        engine = VllmEngine(folder, slots=SLOTS, options=OPTIONS)
        engine.load_weights(bits, 0)
        yield Figure("start_seconds", time.perf_counter() - began, "s", anchor="from nothing to the first weights")
        pauses, calls = update_times(engine, bits, rounds)
        yield Figure("pause_ms", median(pauses) * 1e3, "ms", 100, False, "vLLM stands still for an update")
        yield Figure("pause_ms_max", max(pauses) * 1e3, "ms", anchor="the longest")
        yield Figure("update_call_ms", median(calls) * 1e3, "ms", anchor="with comparing and writing")
        mean, worst = logprob_error(engine, folder, bits, 200)
        yield Figure("logprob_mean_bf16", mean, "", 0.02, False, "float32 forward over the same weights")
        yield Figure("logprob_max_bf16", worst)
        tokens = speed(engine, count)
        engine.close()
        plain = TransformersEngine(folder, slots=SLOTS)
        plain.load_weights(bits, 0)
        yield Figure("tokens_per_s", tokens, "tok/s", anchor="one thread")
        yield Figure("tokens_ratio", tokens / speed(plain, count), anchor="transformers engine")
        exact = VllmEngine(folder, slots=SLOTS, options={**OPTIONS, "dtype": "float32"})
        exact.load_weights(bits, 0)
        yield Figure("logprob_max_fp32", logprob_error(exact, folder, bits, 200)[1], "", 1e-4, False, "the same")
        yield from soaked(exact, bits, aborts)
        exact.close()


if __name__ == "__main__":
    main(__doc__, measure)
