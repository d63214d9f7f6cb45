"""What every engine must keep, tried by sampling: tokens by seed alone, true versions, aborts that give what there is.

In: a name or ``module:Class`` with the engine's options, and ``model`` for a model's folder with the weights that the
engine is to load. Out: one ``Check`` for every promise of ``engine.Engine``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.conformance import Check, attempt
from headrace.connectors.engines.engine import Engine, Generation, PromptTooLong, Request
from headrace.connectors.plugins import load
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Sampling

__all__ = ("conformance",)

Weights = Mapping[str, npt.NDArray[Any]]
SLOTS = 4
_STEPS = 2000
_LONGEST = 24


def conformance(name: str, settings: Mapping[str, Any]) -> list[Check]:
    """Try an engine. Raises ConfigurationError for an unknown name and options that it refuses."""
    options = {key: value for key, value in settings.items() if key != "model"}
    weights = _weights(Path(settings["model"])) if "model" in settings else {}
    cls = load("headrace.engines", name)

    def make() -> Engine:
        made: Engine = cls(
            settings.get("model", ""), slots=SLOTS, max_prompt_tokens=64, threads=1, options=options
        )  # fmt: skip
        return made

    def ready() -> Engine:
        engine = make()
        engine.load_weights(weights, 3)
        return engine

    return [
        attempt("before_weights", lambda: _closing(make(), _before_weights)),
        attempt("generations", lambda: _closing(ready(), _generations)),
        attempt("seeds", lambda: _seeds(ready)),
        attempt("versions", lambda: _closing(ready(), lambda e: _versions(e, weights))),
        attempt("abort", lambda: _closing(ready(), _abort)),
        attempt("too_long", lambda: _closing(ready(), _too_long)),
    ]


def _weights(folder: Path) -> Weights:
    """The arrays of a model's ``model.safetensors``, bfloat16 as its bits. Raises ConfigurationError without one."""
    try:
        data = (folder / "model.safetensors").read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read the weights of model={folder}: {error.strerror}") from error
    size = int.from_bytes(data[:8], "little")
    head, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kinds = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
    return {
        name: np.frombuffer(body[slice(*part["data_offsets"])], kinds[part["dtype"]]).reshape(part["shape"])
        for name, part in head.items()
        if name != "__metadata__"
    }


def _closing(engine: Engine, trial: Callable[[Engine], str]) -> str:
    try:
        return trial(engine)
    finally:
        engine.close()


def _request(key: int, seed: int, size: int = 3, most: int = _LONGEST) -> Request:
    prompt = np.arange(4, 4 + size, dtype=np.int32)
    return Request(key, prompt, Sampling(temperature=1.0, max_new_tokens=most, seed=seed))


def _run(engine: Engine, requests: Sequence[Request]) -> dict[int, Generation]:
    for request in requests:
        engine.add(request)
    out: dict[int, Generation] = {}
    for _ in range(_STEPS):
        for generation in engine.step():
            assert generation.key not in out, f"request {generation.key} ends twice"
            out[generation.key] = generation
        if len(out) == len(requests):
            return out
    raise AssertionError(f"{len(requests) - len(out)} of {len(requests)} requests have not ended after {_STEPS} steps")


def _before_weights(engine: Engine) -> str:
    assert engine.version == -1, f"before load_weights its version is {engine.version}, not -1"
    assert engine.active == 0, f"a new engine has {engine.active} sequences inside"
    assert engine.capacity >= 1, f"its capacity is {engine.capacity}"
    return f"version -1, nothing inside, {engine.capacity} sequences at once"


def _generations(engine: Engine) -> str:
    assert engine.version == 3, f"after load_weights of version 3 its version is {engine.version}"
    requests = [_request(key, seed=key) for key in range(3 * SLOTS)]
    found = _run(engine, requests)
    for key, made in found.items():
        sizes = {made.tokens.size, made.logprobs.size, made.versions.size}
        assert len(sizes) == 1, f"request {key} has arrays of lengths {sorted(sizes)}"
        assert 1 <= made.tokens.size <= _LONGEST, f"request {key} has {made.tokens.size} tokens, asked for {_LONGEST}"
        assert made.tokens.dtype == np.int32 and made.versions.dtype == np.int32, "tokens and versions are int32"
        assert np.isfinite(made.logprobs).all() and (made.logprobs <= 1e-6).all(), f"request {key} has odd log-probs"
        assert (made.versions == 3).all(), f"request {key} is labelled {sorted(set(made.versions.tolist()))}, not 3"
        assert made.end_reason in ("stop", "length", "context_full"), f"request {key} ends by {made.end_reason!r}"
        full = made.end_reason == "length"
        assert not full or made.tokens.size == _LONGEST, f"request {key} ends by length after {made.tokens.size} tokens"
    assert engine.active == 0, f"{engine.active} sequences are inside when all have ended"
    return f"{len(found)} requests in {SLOTS} slots ended with whole arrays and finite log-probs"


def _seeds(ready: Callable[[], Engine]) -> str:
    wanted = [_request(key, seed=100 + key) for key in range(2 * SLOTS)]
    together = _closing_run(ready(), wanted)
    for request in (wanted[0], wanted[-1]):
        alone = _closing_run(ready(), [request])[request.key]
        among = together[request.key]
        assert alone.tokens.tolist() == among.tokens.tolist(), f"seed {request.sampling.seed} gives other tokens alone"
        near = np.allclose(alone.logprobs, among.logprobs, atol=1e-4)
        assert near, f"seed {request.sampling.seed} has other log-probs alone"
    distinct = {tuple(made.tokens.tolist()) for made in together.values()}
    assert len(distinct) > 1, "all seeds give the same tokens"
    return "a seed gives the same tokens alone and among others, and others another"


def _closing_run(engine: Engine, requests: Sequence[Request]) -> dict[int, Generation]:
    try:
        return _run(engine, requests)
    finally:
        engine.close()


def _versions(engine: Engine, weights: Weights) -> str:
    """New weights between two steps label what comes after them, and nothing before."""
    for key in range(SLOTS):
        engine.add(_request(key, seed=7 + key))
    ended: list[Generation] = []
    for step in range(_STEPS):
        if step == 2:
            engine.load_weights(weights, 5)
        ended += engine.step()
        if len(ended) == SLOTS:
            break
    for made in ended:
        versions = made.versions.tolist()
        assert versions == sorted(versions) and set(versions) <= {3, 5}, f"tokens are labelled {versions}"
    mixed = sum(len(set(made.versions.tolist())) == 2 for made in ended)
    crossing = [made for made in ended if made.tokens.size > 2]
    assert mixed or not crossing, "sequences that went on with new weights are labelled with one version"
    later = _run(engine, [_request(99, seed=1)])[99]
    assert set(later.versions.tolist()) == {5}, "a later request is not labelled with the version in force"
    return f"weights were swapped within {mixed} of {SLOTS} sequences, whose tokens say so"


def _abort(engine: Engine) -> str:
    for key in range(2 * SLOTS):
        engine.add(_request(key, seed=key, most=1000))
    before: list[Generation] = engine.step()
    gone = {made.key for made in before}
    running, waiting = (next(k for k in keys if k not in gone) for keys in (range(SLOTS), range(SLOTS, 2 * SLOTS)))
    partial = engine.abort(running)
    assert partial is not None, "abort of a running request gives nothing"
    assert partial.tokens.size == partial.logprobs.size == partial.versions.size, "the partial has uneven arrays"
    never = engine.abort(waiting)
    assert never is not None, "abort of a waiting request gives nothing"
    assert engine.abort(12345) is None, "abort of an unknown request gives something"
    rest = {made.key for _ in range(_STEPS) for made in engine.step()} if engine.active else set()
    assert not rest & {running, waiting}, "an aborted request ends once more"
    return f"an aborted request gives its {partial.tokens.size} tokens and does not come back"


def _too_long(engine: Engine) -> str:
    try:
        engine.add(_request(1, seed=0, size=1 << 16))
    except PromptTooLong:
        assert engine.active == 0, "a prompt that was refused is inside"
        return "a prompt over the limit is refused before it is taken"
    raise AssertionError("a prompt of 65,536 tokens is taken where 64 are allowed")
