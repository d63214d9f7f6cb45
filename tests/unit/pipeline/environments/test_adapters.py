"""Environments that live elsewhere: in Gymnasium, and behind HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.pipeline.capture.http import Request
from headrace.pipeline.environments import serve
from headrace.pipeline.environments.environment import make_environment
from headrace.pipeline.environments.remote import prompt_of
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Message
from headrace.schemas.records import Prompt

PROMPT = Prompt(
    prompt_id="1", stream="s", dataset="d", row=0, epoch=0, position=0, prompt="go ☃",
    messages=[Message(role="user", content="x")],
)  # fmt: skip
LAKE = {"id": "FrozenLake-v1", "settings": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
ECHO = """
import gymnasium

class Echo(gymnasium.Env):
    action_space = gymnasium.spaces.Text(100)
    observation_space = gymnasium.spaces.Text(100)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return f"start {seed}", {"note": "hello", "big": "x" * 999}
    def step(self, action):
        return action[::-1], 0.25, False, action == "stop", {}

gymnasium.register("EchoText-v0", entry_point=Echo)
"""


def test_a_gymnasium_environment_with_named_actions() -> None:
    pytest.importorskip("gymnasium")
    world = make_environment("gymnasium", {**LAKE, "instructions": "Reach the goal."})
    assert world.reset(3, PROMPT).text == "go ☃\nReach the goal.\n0"
    nonsense = world.step("swim")
    assert nonsense.text == "That is no action. Actions: left, down, right, up." and not nonsense.done
    seen = nonsense
    for action in ("down", "<think>up?</think>1", "right", "right", "down", "right"):
        assert not seen.done
        seen = world.step(action)
    assert (seen.text, seen.reward, seen.done) == ("15", 1.0, True)
    with pytest.raises(ValueError, match="call reset first"):
        world.step("up")
    world.close()
    assert world.reset(3, PROMPT).text.endswith("0"), "it serves the next episode"


def test_a_gymnasium_environment_with_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "gym_echo.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    world = make_environment("gymnasium", {"id": "EchoText-v0", "module": "gym_echo"})
    first = world.reset(5, PROMPT)
    assert first.text.endswith("start 5") and first.details == {"note": "hello"}
    assert world.step("abc\nü").text == "ü\ncba" and world.step("stop").done


@pytest.mark.parametrize(
    ("options", "says"),
    [({"id": "NoSuch-v0"}, "NoSuch"), ({"id": "FrozenLake-v1", "settings": {"moon": 1}}, "moon"),
     ({"id": "x", "module": "no_such_module"}, "no_such_module"), ({}, "id")],
)  # fmt: skip
def test_a_gymnasium_environment_that_is_none_is_refused(options: dict[str, Any], says: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigurationError, match=says):
        make_environment("gymnasium", options)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of a server with the household."""
    command = [sys.executable, "-m", "headrace.pipeline.environments.serve", "household", "--options", '{"depth": 1}']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().split()[1]}"
        process.terminate()


def test_an_episode_behind_http_is_the_same_episode(served: str) -> None:
    here, there = make_environment("household", {"depth": 1}), make_environment("http_env", {"url": served})
    assert here.reset(11, PROMPT) == there.reset(11, PROMPT)
    for action in ("look", "fly", "delegate make something", "look", "report it is ☃", "report enough"):
        mine, other = here.step(action), there.step(action)
        assert mine == other
    assert other.done
    with pytest.raises(ValueError, match="call reset first"):
        there.step("look")
    there.close()


def test_episodes_of_one_server_are_apart_and_end(served: str) -> None:
    one, two = (make_environment("http_env", {"url": served + "/"}) for _ in range(2))
    assert one.reset(1, PROMPT) != two.reset(2, PROMPT)
    one.close()
    assert two.step("look").text.startswith("You are in")
    with pytest.raises(ValueError, match="call reset first"):
        one.step("look")


class Flaky(BaseHTTPRequestHandler):
    """Does a step, then loses the first answer to it; refuses what it does not know."""

    steps: ClassVar[list[Any]] = []
    lost: ClassVar[bool] = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            return self._say(200, {"episode": 7, "text": "begun", "tools": [{"type": "function"}]})
        if body.get("action") == "refuse":
            return self._say(422, {"error": "no such thing"})
        if (body["turn"], body["action"]) not in Flaky.steps:
            Flaky.steps.append((body["turn"], body["action"]))
            if not Flaky.lost:
                Flaky.lost = True
                self.connection.close()
                return None
        return self._say(200, {"text": "done it", "reward": 0.5})

    def _say(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base class has
        pass


def test_a_lost_answer_is_asked_for_again_by_its_turn() -> None:
    with HTTPServer(("127.0.0.1", 0), Flaky) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        world: Any = make_environment("http_env", {"url": f"http://127.0.0.1:{server.server_port}"})
        world.reset(1, PROMPT)
        assert world.tools == [{"type": "function"}]
        assert world.step("a").text == "done it" and world.step("b").reward == 0.5
        assert Flaky.steps == [(0, "a"), (1, "b")], "the step was done once"
        with pytest.raises(RuntimeError, match=r"status 422: .*no such thing"):
            world.step("refuse")
        server.shutdown()
        thread.join()
    with pytest.raises(RuntimeError, match="Connection refused"):
        world.step("c")
    world.close()


def test_a_step_that_comes_twice_is_done_once(served: str) -> None:
    def call(name: str, body: Any) -> Any:
        with urllib.request.urlopen(f"{served}/{name}", json.dumps(body).encode()) as answer:
            return json.load(answer)

    begun = call("reset", {"seed": 11, "prompt": prompt_of(PROMPT)})
    step = {"episode": begun["episode"], "turn": 0, "action": "delegate x"}
    assert call("step", step) == call("step", step)
    assert call("step", {**step, "turn": 1, "action": "report x"})["agent"] == "end"
    for wrong, status in (({**step, "turn": 9}, 400), ({**step, "episode": "none"}, 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            call("step", wrong)
        assert refused.value.code == status


SERVED = """
from headrace.pipeline.environments.environment import Observation

class Odd:
    def reset(self, seed, prompt): return Observation("start")
    def step(self, action): return Observation("x", float("nan")) if action == "nan" else Observation(action)
    def close(self): raise RuntimeError("cannot close")
"""


def test_a_server_outlives_what_its_environments_and_clients_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served_environments.py").write_text(SERVED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(serve, "_MOST_EPISODES", 1)

    async def told(server: serve.EnvironmentServer, path: str, body: Any) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await server._handle(Request("POST", path, {}, content))
        return answer.status, answer.content

    async def play() -> None:
        server = serve.EnvironmentServer("served_environments:Odd", {})
        begin = {"seed": 1, "prompt": prompt_of(PROMPT)}
        first = (await told(server, "/reset", begin))[1]["episode"]
        status, second = await told(server, "/reset", begin)
        assert status == 200, "the first gave way to it, though it cannot close"
        gone = await told(server, "/step", {"episode": first, "turn": 0, "action": "a"})
        assert gone[0] == 404
        step = {"episode": second["episode"], "turn": 0}
        status, said = await told(server, "/step", {**step, "action": "nan"})
        assert status == 422 and "a reward is a finite number" in said["error"]
        assert (await told(server, "/step", {**step, "action": "a"}))[1]["text"] == "a"
        assert await told(server, "/close", {"episode": second["episode"]}) == (200, {})
        assert (await told(server, "/step", b"[" * 100_000))[0] == 400
        await server.close()

    asyncio.run(play())
