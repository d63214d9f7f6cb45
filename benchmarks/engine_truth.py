"""Weights under which a token's log-prob says which weights sampled it, for checking an engine's labels from outside.

Attention and feed-forward add nothing, so the next token depends on the last one and on the weights in force alone,
whatever keys and values the engine keeps.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.connectors.engines.engine import Engine, Generation, Request
from headrace.schemas.parts import Sampling

Bits = dict[str, np.ndarray]


def folder_bits(folder: Path, scale: float = 1.0) -> Bits:
    """The folder's weights as bfloat16 bits, every matrix scaled, tied head left out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    out = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach() * scale if parameter.dim() > 1 else parameter.detach()
        out[name] = value.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
    return out


def telling_bits(bits: Bits, version: int) -> Bits:
    """The weights of a version, of the shapes and names of ``bits``."""
    rng = np.random.default_rng(version)
    out = {name: array.copy() for name, array in bits.items()}
    for name, array in out.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[:] = 0
        elif name in ("model.embed_tokens.weight", "model.norm.weight"):
            drawn = rng.standard_normal(array.shape).astype(np.float32) * (0.5 if array.ndim == 1 else 0.2)
            array[:] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return out


def table_of(bits: Bits, temperature: float = 1.0) -> np.ndarray:
    """Log-prob of every token after every token under telling weights, float32 (vocabulary, vocabulary)."""
    words = (bits["model.embed_tokens.weight"].astype(np.uint32) << 16).view(np.float32)
    norm = (bits["model.norm.weight"].astype(np.uint32) << 16).view(np.float32)
    hidden = words / np.sqrt((words**2).mean(-1, keepdims=True) + 1e-6) * norm
    logits = hidden @ words.T / temperature
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def mislabelled(bits: Bits, asked: Iterable[Request], done: dict[int, Generation], atol: float = 1e-4) -> list[str]:
    """Tokens whose log-prob is not that of the version they are labelled with, in words; none means all are true."""
    labels = {version for made in done.values() for version in made.versions.tolist()}
    tables = {version: table_of(telling_bits(bits, version)) for version in sorted(labels)}
    out = []
    for request in asked:
        made = done[request.key]
        before = [int(request.prompt[-1]), *made.tokens.tolist()][: made.tokens.size]
        for at, (last, token, logprob, version) in enumerate(
            zip(before, made.tokens.tolist(), made.logprobs.tolist(), made.versions.tolist(), strict=True)
        ):
            if abs(tables[version][last, token] - logprob) > atol:
                fits = [v for v, table in tables.items() if abs(table[last, token] - logprob) <= atol]
                out.append(f"request {request.key} token {at} is labelled {version}, its log-prob is of {fits}")
    return out


def requests(count: int, seed: int = 0, *, longest: int = 12, new: int = 20, temperature: float = 1.0) -> list[Request]:
    """Random prompts with random limits, keys from 0."""
    r = random.Random(seed)
    return [
        Request(
            key,
            np.array([r.randrange(4, 40) for _ in range(r.randint(1, longest))], np.int32),
            Sampling(temperature=temperature, max_new_tokens=r.randint(1, new), seed=1000 * seed + key),
        )
        for key in range(count)
    ]


def drain(engine: Engine, seconds: float = 60.0) -> dict[int, Generation]:
    """Step until nothing is inside."""
    done: dict[int, Generation] = {}
    end = time.monotonic() + seconds
    while engine.active:
        assert time.monotonic() < end, f"{engine.active} requests have not ended within {seconds} s"
        done.update({one.key: one for one in engine.step()})
    return done


def soak(
    engine: Engine,
    load: Callable[[int], None],
    rounds: int,
    *,
    first: int,
    seed: int = 0,
    tell: Callable[[int], None] = lambda _: None,
) -> tuple[list[Request], dict[int, Generation]]:
    """Requests enter, are aborted and are overtaken by updates, ``rounds`` times; returns all of them with their ends.

    load: puts a version in force. first: the first version's number. tell: is told the rounds done so far.
    """
    r = random.Random(seed)
    keys = itertools.count()
    asked: list[Request] = []
    done: dict[int, Generation] = {}
    inside: list[int] = []
    for number in range(rounds):
        for _ in range(r.randint(0, 4)):
            prompt = np.array([r.randrange(4, 40) for _ in range(r.randint(1, 30))], np.int32)
            request = Request(next(keys), prompt, Sampling(max_new_tokens=r.randint(1, 60), seed=r.randrange(1 << 31)))
            engine.add(request)
            asked.append(request)
            inside.append(request.key)
        for _ in range(r.randint(0, 3)):
            done.update({one.key: one for one in engine.step()})
        inside = [key for key in inside if key not in done]
        if inside:
            key = inside.pop(r.randrange(len(inside)))
            partial = engine.abort(key)
            assert partial is not None, f"request {key} was lost"
            assert engine.abort(key) is None
            done[key] = partial
        load(first + number)
        tell(number + 1)
    done.update(drain(engine))
    assert len(done) == len(asked), f"{len(asked) - len(done)} requests were lost"
    return asked, done
