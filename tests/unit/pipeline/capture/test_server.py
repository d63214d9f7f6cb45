"""The capture endpoint over real sockets: what a client of OpenAI's API sees, and what it must not be able to break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from chat_policy import RecordingPolicy, assert_sampled_in_context, chat_model

from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.capture.episode import CapturedEpisode
from headrace.pipeline.capture.server import CaptureServer
from headrace.schemas.parts import Sampling

END = "<|im_end|>"
HELLO = {"model": "any", "messages": [{"role": "user", "content": "the weather?"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return chat_model(tmp_path_factory.mktemp("chat"))


async def raw(url: str, request: bytes) -> bytes:
    """What a server says to these bytes until it closes."""
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def post(url: str, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    place = "/" + url.split("/", 3)[3]
    head = f"{method} {place}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    answer = await raw(url, head.encode() + content)
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    status = int(head_bytes.split()[1])
    return status, json.loads(rest) if b"application/json" in head_bytes else rest.decode()


def serve(episode: CapturedEpisode, play: Callable[[str, CaptureServer, str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        server = CaptureServer()
        await server.start()
        url, key = server.open(episode)
        try:
            return await asyncio.wait_for(play(url, server, key), 30)
        finally:
            await server.close()

    return asyncio.run(run())


def episode_of(folder: ModelFolder, *replies: str, **more: Any) -> tuple[CapturedEpisode, RecordingPolicy]:
    said = iter(replies)
    policy = RecordingPolicy(folder, lambda text: next(said, f"that{END}"), context=more.pop("context", 1 << 20))
    return CapturedEpisode({0: policy}, more.pop("sampling", Sampling(max_new_tokens=40)), **more), policy


def test_a_chat_is_answered_in_the_shape_of_the_api(folder: ModelFolder) -> None:
    episode, policy = episode_of(folder, f"<think>hm</think>\n\nIt is{END}")

    async def play(url: str, server: CaptureServer, key: str) -> Any:
        return await post(url, "/chat/completions", {**HELLO, "logprobs": True})

    status, answer = serve(episode, play)
    assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == "any"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It is", "reasoning_content": "hm"}
    assert choice["finish_reason"] == "stop"
    (context, made) = policy.calls[0]
    assert answer["usage"] == {
        "prompt_tokens": len(context), "completion_tokens": len(made), "total_tokens": len(context) + len(made)
    }  # fmt: skip
    assert [round(c["logprob"], 2) for c in choice["logprobs"]["content"]][:2] == [-0.01, -0.02]
    assert len(choice["logprobs"]["content"]) == len(made)
    assert assert_sampled_in_context(episode.sequences(), policy) == 1


def test_a_stream_says_the_same_in_chunks(folder: ModelFolder) -> None:
    episode, _ = episode_of(
        folder, f"so{END}", f"It is{END}", f'<tool_call>{{"name": "look", "arguments": {{}}}}</tool_call>{END}'
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def play(url: str, server: CaptureServer, key: str) -> Any:
        odd = {**HELLO, "stream": True, "stream_options": 5}
        assert (await post(url, "/chat/completions", odd))[0] == 200
        body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
        return [await post(url, "/chat/completions", b) for b in (body, {**body, "tools": tools})]

    for (status, text), delta, reason in zip(
        serve(episode, play),
        ({"role": "assistant", "content": "It is"}, None),
        ("stop", "tool_calls"),
        strict=True,
    ):
        assert status == 200
        *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert last == "[DONE]"
        first, second, usage = map(json.loads, events)
        assert first["object"] == "chat.completion.chunk" and second["choices"][0]["finish_reason"] == reason
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
        if delta is not None:
            assert first["choices"][0]["delta"] == delta
        else:
            assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5), ("presence_penalty", 1), ("logit_bias", {"5": 3}), ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "x"}}), ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3), ("min_tokens", 4), ("min_p", 0.1), ("guided_json", {}), ("structured_outputs", {}),
        ("function_call", {"name": "x"}), ("ignore_eos", True), ("stop_token_ids", [5]),
    ],
)  # fmt: skip
def test_what_would_change_the_distribution_unseen_is_refused(folder: ModelFolder, field: str, value: Any) -> None:
    episode, policy = episode_of(folder)
    status, answer = serve(episode, lambda url, s, k: post(url, "/chat/completions", {**HELLO, field: value}))
    assert status == 400 and answer["error"]["code"] == "unsupported_parameter" and field in answer["error"]["message"]
    assert policy.calls == []


def test_neutral_values_of_the_same_fields_are_taken(folder: ModelFolder) -> None:
    episode, _ = episode_of(folder)
    body = {**HELLO, "frequency_penalty": 0, "logit_bias": None, "tool_choice": "auto", "seed": 4, "user": "me",
            "response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False}  # fmt: skip
    assert serve(episode, lambda url, s, k: post(url, "/chat/completions", body))[0] == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "cannot be used"),
        (b"[1]", "must be a JSON object"),
        ({}, "messages must be a list"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is no text"),
        ({**HELLO, "n": 99}, "n is 99"),
        ({**HELLO, "max_tokens": -4}, "max_tokens is -4"),
        ({**HELLO, "max_tokens": 0}, "max_tokens is 0"),
        ({**HELLO, "max_tokens": 3, "max_completion_tokens": 0}, "max_tokens is 0"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "surrogates not allowed"),
        ({**HELLO, "tools": 5}, "tools must be a list"),
        ({**HELLO, "tools": [{}]}, "tools must be a list"),
        ({**HELLO, "tools": [1]}, "tools must be a list"),
        ({**HELLO, "chat_template_kwargs": "x"}, "chat_template_kwargs must be"),
        ({**HELLO, "stop": 5}, "stop must be"),
    ],
)
def test_a_request_that_is_none_is_answered_with_its_fault(folder: ModelFolder, body: Any, says: str) -> None:
    episode, _ = episode_of(folder)
    status, answer = serve(episode, lambda url, s, k: post(url, "/chat/completions", body))
    assert status == 400 and says in answer["error"]["message"]


@pytest.mark.parametrize("prompt", [[-1], [2**31], [2**70]])
def test_ids_that_are_none_are_refused(folder: ModelFolder, prompt: list[int]) -> None:
    episode, policy = episode_of(folder)
    status, answer = serve(episode, lambda url, s, k: post(url, "/completions", {"prompt": prompt}))
    assert status == 400 and "no token id" in answer["error"]["message"] and policy.calls == []


@pytest.mark.parametrize(
    "given", [b'"temperature": NaN', b'"temperature": -1', b'"temperature": Infinity', b'"top_p": 0', b'"top_p": 1.5',
              b'"top_k": Infinity', b'"top_k": 1e30', b'"top_k": "many"']
)  # fmt: skip
def test_a_client_that_decides_the_sampling_decides_within_bounds(folder: ModelFolder, given: bytes) -> None:
    episode, policy = episode_of(folder, rule="client")
    body = json.dumps(HELLO).encode()[:-1] + b", " + given + b"}"
    status, answer = serve(episode, lambda url, s, k: post(url, "/chat/completions", body))
    assert status == 400 and given.split(b'"')[1].decode() in answer["error"]["message"] and policy.calls == []


def test_what_fails_unforeseen_is_answered_and_the_endpoint_goes_on(
    folder: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    episode, policy = episode_of(folder)
    working = policy.generate

    async def play(url: str, server: CaptureServer, key: str) -> Any:
        policy.generate = None  # type: ignore[assignment, method-assign]
        broken = await post(url, "/chat/completions", HELLO)
        policy.generate = working  # type: ignore[method-assign]
        return broken, await post(url, "/chat/completions", HELLO)

    broken, after = serve(episode, play)
    assert broken[0] == 500 and broken[1]["error"]["code"] == "internal_error" and after[0] == 200
    assert "capture: chat/completions failed: TypeError" in capsys.readouterr().err


def test_a_context_that_is_too_long_has_the_code_that_agents_look_for(folder: ModelFolder) -> None:
    episode, _ = episode_of(folder, context=5)
    status, answer = serve(episode, lambda url, s, k: post(url, "/chat/completions", HELLO))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_only_the_episode_with_the_key_is_served_and_only_while_it_lives(folder: ModelFolder) -> None:
    episode, policy = episode_of(folder)

    async def play(url: str, server: CaptureServer, key: str) -> Any:
        wrong = url.replace(key, "x" * len(key))
        found = [(await post(u, "/chat/completions", HELLO))[0] for u in (wrong, url)]
        found += [(await post(url, "/embeddings", {}))[0], (await post(url, "/chat/completions", b"", "GET"))[0]]
        models = await post(url, "/models", b"", "GET")
        server.close_episode(key)
        return found, models, (await post(url, "/chat/completions", HELLO))[0]

    found, models, after = serve(episode, play)
    assert found == [404, 200, 404, 405] and after == 404 and len(policy.calls) == 1
    assert models[1]["data"][0]["id"] == "policy0"


def test_the_run_decides_the_sampling_unless_the_client_may(folder: ModelFolder) -> None:
    body = {**HELLO, "temperature": 0.3, "top_p": 0.5, "max_tokens": 7}
    for rule, expected in (("task", (0.9, 1.0)), ("client", (0.3, 0.5))):
        base = Sampling(max_new_tokens=40, temperature=0.9)
        episode, policy = episode_of(folder, sampling=base, rule=rule)
        assert serve(episode, lambda url, s, k: post(url, "/chat/completions", body))[0] == 200
        used = policy.samplings[0]
        assert (used.temperature, used.top_p, used.max_new_tokens) == (*expected, 7)
        assert episode.sequences()[0].trainable == (rule == "task")


def test_several_choices_and_token_ids(folder: ModelFolder) -> None:
    episode, policy = episode_of(folder)

    async def play(url: str, server: CaptureServer, key: str) -> Any:
        several = await post(url, "/chat/completions", {**HELLO, "n": 3})
        ids = [int(i) for i in (*policy.calls[1][0], *policy.calls[1][1])]
        more = await post(url, "/completions", {"model": "policy0", "prompt": [*ids, 5], "return_token_ids": True})
        text = await post(url, "/completions", {"prompt": "the", "stop": ["a"], "max_tokens": 9})
        return several, more, text

    several, more, text = serve(episode, play)
    assert [c["index"] for c in several[1]["choices"]] == [0, 1, 2]
    assert more[1]["choices"][0]["token_ids"] == list(policy.calls[3][1])
    assert text[1]["choices"][0] == {"index": 0, "text": "th", "finish_reason": "stop", "logprobs": None}
    assert len(episode.sequences()) == 4, "token ids that extend a call go on in its sequence"


def test_log_probs_are_told_in_the_tokens_of_their_own_policy(folder: ModelFolder) -> None:
    policies = {p: RecordingPolicy(folder, lambda text: f"that{END}", policy=p) for p in (0, 1)}
    policies[0].detokenize = lambda tokens: "another tokenizer"  # type: ignore[method-assign]
    episode = CapturedEpisode(policies, Sampling(max_new_tokens=40))
    body = {**HELLO, "model": "policy1", "logprobs": True}
    _, answer = serve(episode, lambda url, s, k: post(url, "/chat/completions", body))
    said = "".join(c["token"] for c in answer["choices"][0]["logprobs"]["content"])
    assert said == f"that{END}"


def test_two_policies_are_told_apart_by_the_model(folder: ModelFolder) -> None:
    policies = {p: RecordingPolicy(folder, lambda text, p=p: f"I am {p}{END}", policy=p) for p in (2, 5)}
    episode = CapturedEpisode(policies, Sampling(max_new_tokens=40))

    async def play(url: str, server: CaptureServer, key: str) -> Any:
        return [await post(url, "/chat/completions", {**HELLO, "model": m}) for m in ("policy5", "gpt-x", "policy2")]

    said = [answer["choices"][0]["message"]["content"] for _, answer in serve(episode, play)]
    assert said == ["I am 5", "I am 2", "I am 2"]
    assert [(s.policy, s.role) for s in episode.sequences()] == [(2, "policy2"), (2, "policy2"), (5, "policy5")]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /x HTTP/1.1\r\n" + b"A: b\r\n" * 20000 + b"\r\n", 413),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_bytes_that_are_no_request_end_their_connection_only(
    folder: ModelFolder, request_bytes: bytes, status: int
) -> None:
    episode, _ = episode_of(folder)

    async def play(url: str, server: CaptureServer, key: str) -> Any:
        first = await raw(url, request_bytes)
        return first, (await post(url, "/chat/completions", HELLO))[0]

    first, after = serve(episode, play)
    assert first.split()[1] == str(status).encode() and after == 200


def test_a_chunked_body_and_a_kept_connection_work(folder: ModelFolder) -> None:
    episode, policy = episode_of(folder)

    async def play(url: str, server: CaptureServer, key: str) -> bytes:
        body = json.dumps(HELLO).encode()
        place = f"/{key}/v1/chat/completions".encode()
        parts = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:9], body[9:]))
        chunked = b"POST " + place + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n" + parts
        plain = b"POST %s HTTP/1.1\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (place, len(body), body)
        return await raw(url, chunked + b"0\r\n\r\n" + plain)

    answer = serve(episode, play)
    assert answer.startswith(b"HTTP/1.1 100") and answer.count(b"HTTP/1.1 200 OK") == 2
    assert len(policy.calls) == 2


def test_a_client_that_leaves_takes_its_request_with_it(folder: ModelFolder) -> None:
    episode, policy = episode_of(folder)
    ended = []

    async def forever(*_: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(True)
            raise

    policy.generate = forever  # type: ignore[method-assign]

    async def play(url: str, server: CaptureServer, key: str) -> None:
        host, port = url.split("/")[2].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(HELLO).encode()
        writer.write(b"POST /%s/v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
                     % (key.encode(), len(body), body))  # fmt: skip
        await asyncio.sleep(0.1)
        writer.close()
        for _ in range(100):
            if ended:
                return
            await asyncio.sleep(0.05)

    serve(episode, play)
    assert ended == [True] and episode.sequences() == []


def test_text_that_is_no_text_travels(folder: ModelFolder, tmp_path: Path) -> None:
    episode, policy = episode_of(folder, "\U0001f642"[:1])
    body = {**HELLO, "max_tokens": 1}
    status, answer = serve(episode, lambda url, s, k: post(url, "/chat/completions", body))
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert assert_sampled_in_context(episode.sequences(), policy) == 1
