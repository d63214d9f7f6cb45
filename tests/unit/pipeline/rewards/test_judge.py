"""Judges behind a real HTTP endpoint: marks, pairs and orders, and what happens when the endpoint misbehaves."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.pipeline.rewards.chat_client import ChatClient, ChatOptions, JudgeUnavailable
from headrace.pipeline.rewards.reward import Completion, RewardFailed, call_group_reward, load_reward
from headrace.schemas.records import Prompt

PROMPT = Prompt(
    prompt_id="p", stream="s", dataset="d", row=0, epoch=0, position=0, prompt="Capital {a}?", answer="Oslo"
)
REPLIES = [Completion(text, "stop") for text in ("good 8", "bad 2", "middle 5")]


class Endpoint:
    """An OpenAI-compatible server that says what ``say`` gives for the user's message; an int is a status."""

    def __init__(self) -> None:
        self.say: Callable[[str], Any] = lambda text: "5"
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append(body)
                endpoint.times.append(time.monotonic())
                endpoint.headers.append(dict(self.headers))
                said = endpoint.say(body["messages"][-1]["content"])
                status = said if isinstance(said, int) else 200
                answer = {"choices": [{"message": {"content": said}}],
                          "usage": {"prompt_tokens": 100, "completion_tokens": 10}}  # fmt: skip
                content = said if isinstance(said, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base class has
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.options = {"base_url": f"http://127.0.0.1:{self.server.server_port}/v1", "model": "j", "key_env": "JKEY"}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def scored(endpoint: Endpoint, name: str, replies: list[Completion] = REPLIES, **options: Any) -> tuple[list[Any], Any]:
    reward: Any = load_reward(name, {**endpoint.options, **options})
    return call_group_reward(name, reward, PROMPT, replies), reward


def client(endpoint: Endpoint, **options: Any) -> tuple[ChatClient, list[float]]:
    slept: list[float] = []
    return ChatClient(ChatOptions.model_validate({**endpoint.options, **options}), sleep=slept.append), slept


MESSAGES = [{"role": "user", "content": "hi"}]


def test_marks_become_rewards_from_0_to_1(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JKEY", "k3y")
    endpoint.say = lambda text: "Mark: " + re.findall(r"(\d)\n\nGive", text)[0]
    values, reward = scored(endpoint, "judge", prompt_cost=2.0, completion_cost=30.0)
    assert [v["judge"] for v in values] == [0.8, 0.2, 0.5] and values[0].details == {"judge": "Mark: 8"}
    asked = endpoint.requests[0]["messages"][1]["content"]
    assert "Capital {a}?" in asked and "Oslo" in asked, "braces of a prompt are no places"
    assert endpoint.headers[0]["Authorization"] == "Bearer k3y"
    assert reward.spent == {"judge_requests": 3, "judge_tries": 3, "judge_tokens": 330, "judge_microcost": 1500}


@pytest.mark.parametrize("said", ["no idea", "11", "-3", "", b"not json", 400, 401, 503])
def test_a_judgement_that_fails_excludes_its_member_alone(endpoint: Endpoint, said: Any) -> None:
    endpoint.say = lambda text: said if "bad" in text else "7"
    values, _ = scored(endpoint, "judge", tries=1)
    assert isinstance(values[1], RewardFailed) and "j" in str(values[1])
    assert [v["judge"] for v in (values[0], values[2])] == [0.7, 0.7]


@pytest.mark.parametrize(
    ("said", "mark"),
    [("8/10", 0.8), ("8.5 / 10", 0.85), ("I give it 8 out of 10.", 0.8), ("<think>2? 3?</think>\n8", 0.8), ("8", 0.8)],
)
def test_a_mark_is_found_in_the_ways_that_judges_say_it(endpoint: Endpoint, said: str, mark: float) -> None:
    endpoint.say = lambda text: said
    assert [v["judge"] for v in scored(endpoint, "judge", REPLIES[:1])[0]] == [mark]
    endpoint.say = lambda text: "<think>B is better than A</think> **Reply A**"
    assert [v["pairwise"] for v in scored(endpoint, "pairwise", REPLIES[:2])[0]] == [0.5, 0.5]


ODD_ANSWERS = [
    {"choices": [{"message": {"content": "7"}}], "usage": [1]},
    {"choices": [{"message": {"content": "7"}}], "usage": {"prompt_tokens": float("inf")}},
    {"choices": {}},
    {"choices": ["7"]},
    [],
]


@pytest.mark.parametrize("answer", [*(json.dumps(a).encode() for a in ODD_ANSWERS), b"[" * 100_000])
def test_an_answer_of_another_shape_excludes_its_member_alone(endpoint: Endpoint, answer: bytes) -> None:
    endpoint.say = lambda text: answer if "bad" in text else "7"
    values, _ = scored(endpoint, "judge", tries=1)
    assert isinstance(values[1], RewardFailed) and [v["judge"] for v in (values[0], values[2])] == [0.7, 0.7]


def spoken(pieces: Iterator[bytes]) -> tuple[str, threading.Thread]:
    """A server that takes one connection and says these pieces, a moment apart; its address."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    return f"http://127.0.0.1:{server.getsockname()[1]}/v1", thread


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b" ", 500)), "did not end within 0.3 s"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", *([b" " * (1 << 20)] * 18)], "longer than 16777216 bytes"),
        ([b"HTTP/1.1 400 No\r\nContent-Length: 900\r\n\r\nbut wh"], "status 400"),
    ],
)
def test_an_answer_without_an_end_is_given_up(pieces: Any, says: str) -> None:
    url, thread = spoken(iter(pieces))
    seconds = 0.3 if "0.3" in says else 20
    asks = ChatClient(ChatOptions(base_url=url, model="j", tries=1, call_seconds=seconds))
    with pytest.raises(JudgeUnavailable, match=says):
        asks.ask(MESSAGES)
    thread.join()


def test_pairs_are_asked_in_both_orders(endpoint: Endpoint) -> None:
    def better(text: str) -> str:
        a, b = (int(x) for x in re.findall(r"Reply [AB]:\n\w+ (\d)", text))
        return "tie" if a == b else "A" if a > b else " b."

    endpoint.say = better
    values, _ = scored(endpoint, "pairwise")
    assert [v["pairwise"] for v in values] == [1.0, 0.0, 0.5] and len(endpoint.requests) == 6
    endpoint.say = lambda text: "A"
    values, _ = scored(endpoint, "pairwise")
    assert [v["pairwise"] for v in values] == [0.5, 0.5, 0.5], "liking the first reply earns nobody anything"
    endpoint.say = lambda text: "C" if "bad" in text else "A"
    values, _ = scored(endpoint, "pairwise")
    assert isinstance(values[1], RewardFailed) and [v["pairwise"] for v in (values[0], values[2])] == [0.5, 0.5]
    values, _ = scored(endpoint, "pairwise", [Completion(str(i), "stop") for i in range(6)], pairs=3)
    assert sum(isinstance(v, RewardFailed) for v in values) <= 3


def test_an_order_gives_evenly_spaced_rewards(endpoint: Endpoint) -> None:
    endpoint.say = lambda text: "1, 3, 2"
    values, _ = scored(endpoint, "ranking")
    assert [v["ranking"] for v in values] == [1.0, 0.0, 0.5]
    for said in ("1, 2", "1, 1, 2", "0, 1, 2, 3", 500):
        endpoint.say = lambda text, said=said: said
        with pytest.raises(RewardFailed):
            scored(endpoint, "ranking", tries=1)


def test_an_endpoint_that_stumbles_is_asked_again(endpoint: Endpoint) -> None:
    said = iter([429, 503, b"{", "fine"])
    endpoint.say = lambda text: next(said)
    asks, slept = client(endpoint)
    assert asks.ask(MESSAGES) == "fine" and slept == [0.5, 1.0, 2.0]
    endpoint.say = lambda text: 400
    with pytest.raises(JudgeUnavailable, match=r"judge j at .*: status 400"):
        asks.ask([{"role": "user", "content": "again"}])
    assert len(endpoint.requests) == 5, "what can never succeed is not asked twice"
    endpoint.say = lambda text: 500
    with pytest.raises(JudgeUnavailable, match="status 500"):
        asks.ask([{"role": "user", "content": "and again"}])
    assert asks.spent["judge_tries"] == 9


def test_equal_questions_are_asked_once_and_failures_again(endpoint: Endpoint) -> None:
    answers = iter([400, "yes"])
    endpoint.say = lambda text: next(answers)
    asks, _ = client(endpoint)
    with pytest.raises(JudgeUnavailable):
        asks.ask(MESSAGES)
    assert [asks.ask(MESSAGES) for _ in range(3)] == ["yes"] * 3
    assert len(endpoint.requests) == 2 and asks.spent["judge_cached"] == 2


def test_equal_questions_at_the_same_time_are_one_request(endpoint: Endpoint) -> None:
    gate = threading.Event()
    endpoint.say = lambda text: "yes" if gate.wait(10) else "late"
    asks, _ = client(endpoint)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(asks.ask(MESSAGES))) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    gate.set()
    for thread in threads:
        thread.join()
    assert found == ["yes"] * 4 and len(endpoint.requests) == 1


def test_the_cache_is_bounded_and_can_be_off(endpoint: Endpoint) -> None:
    for cache, requests in ((2, 5), (0, 6)):
        endpoint.requests.clear()
        asks, _ = client(endpoint, cache=cache)
        for text in ("a", "b", "c", "c", "d", "a"):
            asks.ask([{"role": "user", "content": text}])
        assert len(endpoint.requests) == requests


def test_requests_keep_their_distance(endpoint: Endpoint) -> None:
    options = ChatOptions.model_validate({**endpoint.options, "requests_per_minute": 600})
    asks = ChatClient(options)
    threads = [threading.Thread(target=asks.ask, args=([{"role": "user", "content": str(i)}],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = sorted(endpoint.times)
    assert times[-1] - times[0] > 0.25, "three distances of 0.1 s"


def test_nobody_there_is_said() -> None:
    options = ChatOptions(base_url="http://127.0.0.1:9/v1", model="j", tries=2)
    with pytest.raises(JudgeUnavailable, match="Connection refused"):
        ChatClient(options, sleep=lambda seconds: None).ask(MESSAGES)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a b c", "a b c", "x y z"], [0.5, 0.5, 1.0]),
        (["same", "same"], [0.0, 0.0]),
        (["only one"], [0.0]),
        (["", ""], [0.0, 0.0]),
        (["a b", "a b c"], [0.5, 0.5]),
    ],
)
def test_diversity_is_what_nobody_else_says(texts: list[str], expected: list[float]) -> None:
    reward: Any = load_reward("diversity", {"weight": 1.0})
    values = call_group_reward("diversity", reward, PROMPT, [Completion(t, "stop") for t in texts])
    assert [v["diversity"] for v in values if not isinstance(v, RewardFailed)] == expected


@pytest.mark.parametrize("given", [[1.0], "ab", None, [1.0, 2.0, 3.0, 4.0]])
def test_a_group_reward_gives_one_value_for_each(given: Any) -> None:
    with pytest.raises(RewardFailed, match="one for each"):
        call_group_reward("mine", lambda p, c: given, PROMPT, REPLIES[:3] if given != "ab" else REPLIES)


def test_a_value_that_is_no_number_excludes_its_member() -> None:
    values = call_group_reward("mine", lambda p, c: [1.0, float("nan"), {"x": None}], PROMPT, REPLIES)
    assert values[0] == {"mine": 1.0} and isinstance(values[1], RewardFailed) and isinstance(values[2], RewardFailed)
