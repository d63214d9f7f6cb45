"""The engine ``openai`` against an endpoint that is honest, busy, broken, slow or no endpoint at all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai_endpoint import Endpoint

from headrace.connectors.engines.engine import (
    EngineFailed,
    Generation,
    PromptTooLong,
    Request,
    WeightsRefused,
    generate,
)
from headrace.connectors.engines.openai import OpenAIEngine
from headrace.pipeline.workflows.workflow import sequence_of
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Sampling

PROMPT = np.array([8, 9, 10], np.int32)
Make = Callable[..., OpenAIEngine]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as made:
        yield made


@pytest.fixture
def make(tiny_model: Path, endpoint: Endpoint) -> Iterator[Make]:
    made: list[OpenAIEngine] = []

    def engine(slots: int = 4, **options: Any) -> OpenAIEngine:
        given = {"url": endpoint.url, "model": "m", "key_env": "", **options}
        made.append(OpenAIEngine(tiny_model, slots=slots, max_prompt_tokens=16, options=given))
        made[-1].load_weights({}, 3)
        return made[-1]

    yield engine
    for one in made:
        one.close()


def drain(engine: OpenAIEngine) -> dict[int, Generation]:
    """Step until nothing is inside."""
    done: dict[int, Generation] = {}
    while engine.active:
        done.update({one.key: one for one in engine.step()})
    return done


def request(key: int = 0, **sampling: Any) -> Request:
    return Request(key, PROMPT, Sampling(**{"max_new_tokens": 10, "seed": 7, **sampling}))


def test_ids_and_log_probs_of_a_known_version_may_be_trained(make: Make, endpoint: Endpoint) -> None:
    engine = make(version=5)
    assert engine.version == 5
    (done,) = generate(engine, [request()])
    assert done.tokens.tolist() == [5, 6, 7, 2]
    assert done.logprobs.tolist() == [-1.25, -1.5, -1.75, -0.5]
    assert done.versions.tolist() == [5] * 4
    assert (done.end_reason, done.known, done.error) == ("stop", True, "")
    sequence = sequence_of(0, "policy", PROMPT, done, request().sampling)
    assert sequence.trainable
    assert sequence.mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    (body,) = endpoint.asked
    assert body["prompt"] == [8, 9, 10]
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert {name: body[name] for name in neutral} == neutral, "a server's own defaults must not be in force"
    assert body["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    ("options", "sampling", "ids"),
    [
        ({}, {}, True),
        ({"version": 5}, {"temperature": 0.7}, True),
        ({"version": 5}, {}, False),
        ({"version": 5, "api": "text"}, {}, True),
        ({"version": 5, "api": "chat"}, {}, True),
    ],
    ids=["another model", "raw log-probs", "no ids", "text", "chat"],
)
def test_what_is_not_known_is_never_trained(
    make: Make, endpoint: Endpoint, options: dict[str, Any], sampling: dict[str, Any], ids: bool
) -> None:
    endpoint.token_ids = ids
    (done,) = generate(make(**options), [request(**sampling)])
    assert not done.known
    assert set(done.versions.tolist()) == {-1}
    sequence = sequence_of(0, "policy", PROMPT, done, request(**sampling).sampling)
    assert not sequence.trainable
    assert int(sequence.mask.sum()) == 0
    assert sequence.tokens[3:6].tolist() == [5, 6, 7]


def test_processed_log_probs_are_known_at_any_temperature(make: Make) -> None:
    (done,) = generate(make(version=5, processed_logprobs=True), [request(temperature=0.7)])
    assert done.known


def test_text_and_chat_endpoints_are_asked_in_their_own_words(make: Make, endpoint: Endpoint) -> None:
    generate(make(api="text"), [request()])
    generate(make(api="chat"), [request()])
    assert [path.rpartition("/v1")[2] for path in endpoint.paths] == ["/completions", "/chat/completions"]
    assert endpoint.asked[0]["prompt"] == "456"
    assert endpoint.asked[1]["messages"] == [{"role": "user", "content": "456"}]
    assert not {"top_k", "min_p", "return_token_ids"} & {*endpoint.asked[0], *endpoint.asked[1]}


@pytest.mark.parametrize("faults", [[500], [429, 503], ["drop"], ["silent"], ["drop", 502, "drop"]])
def test_a_busy_or_broken_endpoint_is_asked_again_from_where_it_stopped(
    make: Make, endpoint: Endpoint, faults: list[Any]
) -> None:
    endpoint.faults = list(faults)
    (done,) = generate(make(version=5), [request()])
    assert done.tokens.tolist() == [5, 6, 7, 2]
    assert done.error == ""
    if "drop" in faults:
        assert endpoint.asked[-1]["prompt"][:5] == [8, 9, 10, 5, 6]
        assert endpoint.asked[-1]["max_tokens"] <= 8
        assert endpoint.asked[-1]["seed"] != endpoint.asked[0]["seed"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (400, "HTTP 400.*told so.*rollout.options"),
        (404, "HTTP 404"),
        ("garbage", "no OpenAI answer"),
        ([503] * 9, "no answer in 3 tries.*HTTP 503"),
    ],
)
def test_a_refusal_ends_the_request_with_its_reason(make: Make, endpoint: Endpoint, fault: Any, says: str) -> None:
    endpoint.faults = list(fault) if isinstance(fault, list) else [fault]
    engine = make(retries=2)
    (done,) = generate(engine, [request()])
    assert done.end_reason == "abort"
    assert done.error
    assert re.search(says, done.error), done.error
    endpoint.faults.clear()
    assert generate(engine, [request(1)])[0].error == ""


def streams(endpoint: Endpoint, *events: str | dict[str, Any]) -> None:
    """The endpoint answers every request by these events."""
    lines = [e if isinstance(e, str) else json.dumps({"choices": [e]}) for e in events]

    def stream(request: Any, body: Any, fault: Any) -> None:
        request.wfile.write("".join(f"data: {line}\n\n" for line in lines).encode())

    endpoint._stream = stream  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "event",
    [
        {"text": "x", "token_ids": [10**12], "logprobs": {"token_logprobs": [-1.0]}},
        {"text": "x", "token_ids": [-4], "logprobs": {"token_logprobs": [-1.0]}},
        {"text": ["x"], "finish_reason": "stop"},
        {"text": 5, "finish_reason": "stop"},
        {"text": "x" * 30, "token_ids": [5] * 30, "logprobs": {"token_logprobs": [-1.0] * 30}},
        "[" * 100_000,
        "x" * (5 << 20),
    ],
    ids=["large id", "negative id", "list", "number", "too many", "deep", "long"],
)
def test_what_no_endpoint_says_ends_its_request_and_no_other(make: Make, endpoint: Endpoint, event: Any) -> None:
    engine, honest = make(version=5), endpoint._stream
    streams(endpoint, event)
    (done,) = generate(engine, [request()])
    assert done.end_reason == "abort" and "no OpenAI answer" in done.error
    endpoint._stream = honest  # type: ignore[method-assign]
    assert generate(engine, [request(1)])[0].error == ""


def test_half_surrogate_pairs_are_joined_or_marked(make: Make, endpoint: Endpoint) -> None:
    streams(endpoint, {"text": "5\ud83d"}, {"text": "\ude425"}, {"text": "\ud83d", "finish_reason": "stop"}, "[DONE]")
    engine = make(api="text")
    (done,) = generate(engine, [request()])
    assert (done.end_reason, done.error) == ("stop", "")
    assert done.tokens.tolist() == engine._folder.tokenize("5\U0001f6425\ufffd").tolist()


def test_a_wrong_key_is_a_fault_of_the_whole_worker(make: Make, endpoint: Endpoint, monkeypatch: Any) -> None:
    monkeypatch.setenv("SOME_KEY", "abc")
    endpoint.faults = [401]
    engine = make(key_env="SOME_KEY")
    engine.add(request())
    with pytest.raises(EngineFailed, match=r"HTTP 401.*SOME_KEY"):
        drain(engine)
    assert endpoint.keys == ["Bearer abc"]
    with pytest.raises(EngineFailed):
        engine.add(request(1))


def test_an_endpoint_that_is_not_there_is_named(tiny_model: Path) -> None:
    engine = OpenAIEngine(tiny_model, options={"url": "http://127.0.0.1:9/v1", "model": "m", "retries": 1})
    engine.load_weights({}, 0)
    (done,) = generate(engine, [request()])
    assert "127.0.0.1:9" in done.error
    assert "ConnectionRefusedError" in done.error
    engine.close()


def test_an_abort_keeps_what_has_come_and_closes_the_connection(make: Make, endpoint: Endpoint) -> None:
    endpoint.answer, endpoint.pause = [5] * 200, 0.01
    engine = make(slots=2, version=5)
    for key in range(5):
        engine.add(request(key, max_new_tokens=200))
    time.sleep(0.3)
    began = time.monotonic()
    first = engine.abort(0)
    assert first is not None
    assert 1 <= first.tokens.size < 200
    assert (first.end_reason, first.known) == ("abort", True)
    assert engine.abort(0) is None
    rest = engine.abort_all()
    assert sorted(one.key for one in rest) == [1, 2, 3, 4]
    assert [one.tokens.size for one in rest if one.key >= 3][-1] == 0, "it waited for a slot"
    assert time.monotonic() - began < 1
    assert engine.active == 0
    until = time.monotonic() + 5
    while endpoint.cut_off < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert endpoint.cut_off >= 2


def test_new_requests_wait_while_it_is_paused(make: Make, endpoint: Endpoint) -> None:
    engine = make()
    engine.pause()
    engine.add(request())
    time.sleep(0.2)
    assert engine.step() == []
    assert endpoint.asked == []
    engine.resume()
    assert len(drain(engine)) == 1


def test_refusals_before_anything_is_sent(make: Make, endpoint: Endpoint, tiny_model: Path) -> None:
    engine = make()
    with pytest.raises(PromptTooLong, match="17 tokens, at most 16"):
        engine.add(Request(0, np.zeros(17, np.int32), Sampling()))
    with pytest.raises(ValueError, match="cannot apply min_tokens"):
        engine.add(request(extra='{"min_tokens": 3}'))
    assert engine.active == 0
    assert endpoint.asked == []
    options = {"url": "http://me:secret@host/v1", "model": "m"}
    with pytest.raises(ConfigurationError, match=r"holds a login.*key_env"):
        OpenAIEngine(tiny_model, options=options)
    with pytest.raises(ConfigurationError, match="url"):
        OpenAIEngine(tiny_model, options={"url": "host:80", "model": "m"})
    fresh = OpenAIEngine(tiny_model, options={"url": endpoint.url, "model": "m"})
    with pytest.raises(WeightsRefused, match="load_weights comes before step"):
        fresh.step()
    fresh.close()
