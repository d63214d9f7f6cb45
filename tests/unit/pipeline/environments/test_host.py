"""Environments in processes: what hangs or dies is killed and replaced, and everybody else goes on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headrace.pipeline.environments.environment import EnvironmentFailed
from headrace.pipeline.environments.host import EnvironmentHost
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

PROMPT = Prompt(prompt_id="1", stream="s", dataset="d", row=0, epoch=0, position=0, prompt="go")
SOURCE = """
import asyncio, os, subprocess, sys, time
from headrace.pipeline.environments.environment import Observation

ODD = {
    "reward nan": ("x", float("nan")), "reward none": ("x", None), "reward text": ("x", "5"), "text none": (None,),
    "text half": ("a\\ud800",), "text long": ("w" * 5000000,), "agent": ("x", 0.0, False, {}, "boss"),
}

class Odd:
    tools = [{"type": "function", "function": {"name": "look"}}]
    def __init__(self, start="", closes="well"):
        self.closes = closes
        if start == "raises": raise RuntimeError("no licence")
        if start == "hangs" and os.environ.get("HERE") != str(os.getpid()):
            open(os.environ["HANGS"], "w").write(str(os.getpid()))
            time.sleep(3600)
    def reset(self, seed, prompt):
        print("noise on standard output")
        self.seed = seed
        if prompt.prompt == "raises": raise ValueError("bad seed")
        return Observation(f"{prompt.prompt} {seed}", details={"pid": str(os.getpid())})
    def step(self, action):
        if action == "hang":
            open(os.environ["HANGS"], "w").close()
            time.sleep(3600)
        if action == "die": os._exit(5)
        if action == "raise": raise KeyError("gone \\ud800")
        if action == "nothing": return None
        if action == "slow": time.sleep(0.5)
        if action.startswith("leave"):
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            with open(os.environ["HANGS"].replace("hangs", "left"), "w") as file: file.write(str(left.pid))
        if action == "leave and hang": time.sleep(3600)
        if action == "leave and die": os._exit(5)
        if action == "read": return Observation(f"read {len(sys.stdin.buffer.read())} bytes")
        if action in ODD: return Observation(*ODD[action])
        if action == "objects": return Observation("", details={"list": [1, 2], "own": self})
        if action == "exit": raise SystemExit(3)
        if action == "cancel": raise asyncio.CancelledError
        return Observation(action * 2, float(self.seed), done=action == "end", details={"pid": str(os.getpid())})
    def close(self):
        if self.closes == "raises": raise RuntimeError("cannot close")
        if self.closes == "hangs": time.sleep(3600)

class Inline(Odd):
    isolation = "inline"
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host_environments.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HANGS", str(tmp_path / "hangs"))
    monkeypatch.syspath_prepend(tmp_path)


def run(
    play: Callable[[EnvironmentHost], Coroutine[Any, Any, Any]],
    processes: int = 2,
    seconds: float = 4.0,
    **options: Any,
) -> Any:
    async def all_of_it() -> Any:
        name = options.pop("name", "Odd")
        host = EnvironmentHost(f"host_environments:{name}", options, processes=processes, step_seconds=seconds)
        try:
            return await play(host)
        finally:
            await host.close()

    return asyncio.run(all_of_it())


async def episode(host: EnvironmentHost, *actions: str, seed: int = 3) -> list[Any]:
    async with host.episode() as one:
        first = await one.reset(seed, PROMPT)
        return [first, *[await one.step(action) for action in actions]]


def test_an_episode_runs_elsewhere_and_its_process_serves_the_next() -> None:
    async def play(host: EnvironmentHost) -> Any:
        return await episode(host, "a", "end"), await episode(host, "b", seed=4)

    first, second = run(play)
    (seen, tools), one, two = first
    assert seen.text == "go 3" and tools[0]["function"]["name"] == "look"
    assert (one.text, one.reward, one.done, two.done) == ("aa", 3.0, False, True)
    pids = {o.details["pid"] for o in (seen, one, two, second[0][0], second[1])}
    assert len(pids) == 1 and pids != {str(os.getpid())} and second[1].reward == 4.0


@pytest.mark.parametrize(
    ("action", "says", "reason"),
    [
        ("hang", "step did not return within 4 s; its process was killed", "env_timeout"),
        ("die", r"its process died in step \(exit status 5\)", "env_error"),
        ("raise", "step raised KeyError", "env_error"),
        ("nothing", "returned None, no Observation", "env_error"),
    ],
)
def test_what_an_environment_does_ends_its_episode_and_no_other(action: str, says: str, reason: str) -> None:
    async def play(host: EnvironmentHost) -> Any:
        both = await asyncio.gather(episode(host, action), episode(host, "a", "slow", "b"), return_exceptions=True)
        return both, await episode(host, "c"), host.killed

    (failed, fine), after, killed = run(play)
    assert isinstance(failed, EnvironmentFailed) and failed.end_reason == reason
    assert re.search(says, str(failed))
    assert [o.text for o in fine[1:]] == ["aa", "slowslow", "bb"] and after[1].text == "cc"
    assert killed == (1 if action == "hang" else 0)


def test_episodes_overlap_and_those_beyond_the_processes_wait() -> None:
    async def play(host: EnvironmentHost) -> tuple[float, int]:
        await asyncio.gather(episode(host), episode(host))
        began = time.monotonic()
        made = await asyncio.gather(*(episode(host, "slow") for _ in range(4)))
        return time.monotonic() - began, len({m[1].details["pid"] for m in made})

    seconds, pids = run(play)
    assert 0.95 < seconds < 1.9 and pids == 2, "two at a time, two after each other"


def test_a_cancelled_episode_frees_its_process_at_once() -> None:
    async def play(host: EnvironmentHost) -> Any:
        playing = asyncio.create_task(episode(host, "hang"))
        while not Path(os.environ["HANGS"]).exists():
            await asyncio.sleep(0.01)
        playing.cancel()
        began = time.monotonic()
        await asyncio.gather(playing, return_exceptions=True)
        after = await episode(host, "a")
        return time.monotonic() - began, after, host.killed

    took, after, killed = run(play, processes=1)
    assert after[1].text == "aa" and killed == 1 and took < 30


def test_an_episode_that_is_cancelled_while_its_environment_is_made_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HERE", str(os.getpid()))
    told = Path(os.environ["HANGS"])

    async def play(host: EnvironmentHost) -> None:
        playing = asyncio.create_task(episode(host, "a"))
        while not (told.exists() and told.read_text()):
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    run(play, start="hangs")
    assert not Path(f"/proc/{told.read_text()}").exists()


@pytest.mark.parametrize("closes", ["raises", "hangs"])
def test_a_close_that_fails_costs_the_next_episode_nothing(closes: str) -> None:
    async def play(host: EnvironmentHost) -> Any:
        return await episode(host, "a"), await episode(host, "b")

    first, second = run(play, processes=1, closes=closes)
    assert (first[1].text, second[1].text) == ("aa", "bb")
    assert (first[1].details["pid"] == second[1].details["pid"]) == (closes == "raises")


def test_an_environment_that_cannot_be_made_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="no_such"):
        EnvironmentHost("no_such", {}, processes=1, step_seconds=1)
    with pytest.raises(ConfigurationError, match="options for environment 'household'"):
        EnvironmentHost("household", {"romms": 3}, processes=1, step_seconds=1)
    with pytest.raises(ConfigurationError, match="unexpected keyword"):
        EnvironmentHost("host_environments:Odd", {"stat": 3}, processes=1, step_seconds=1)


def test_inline_environments_run_here_with_the_same_failures() -> None:
    async def play(host: EnvironmentHost) -> Any:
        made = await episode(host, "a")
        failed = await asyncio.gather(episode(host, "raise"), return_exceptions=True)
        return made, failed[0]

    made, failed = run(play, name="Inline")
    assert made[1].details["pid"] == str(os.getpid())
    assert isinstance(failed, EnvironmentFailed) and "step raised KeyError" in str(failed)


@pytest.mark.parametrize("action", ["leave and hang", "leave and die", "leave and end"])
def test_what_an_environment_started_ends_with_its_process(action: str, tmp_path: Path) -> None:
    async def play(host: EnvironmentHost) -> None:
        await asyncio.gather(episode(host, action), return_exceptions=True)

    run(play, seconds=2.0)
    pid = int((tmp_path / "left").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("a process of an environment lives on")


def test_what_an_environment_reads_is_empty_and_no_call_is_taken_from_it() -> None:
    async def play(host: EnvironmentHost) -> Any:
        return await episode(host, "read", "b")

    assert [o.text for o in run(play)[1:]] == ["read 0 bytes", "bb"]


@pytest.mark.parametrize("name", ["Odd", "Inline"])
@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("reward nan", "returned reward nan: a reward is a finite number"),
        ("reward none", "the answer of step raised TypeError"),
        ("reward text", "the reward is '5'"),
        ("text none", "the text is None"),
        ("text half", "the answer of step raised UnicodeEncodeError"),
        ("text long", "returned a text of 5000000 characters"),
        ("agent", "returned agent 'boss'"),
        ("exit", "step raised SystemExit: 3"),
        ("cancel", "step raised CancelledError"),
    ],
)
def test_an_answer_that_is_none_ends_its_episode_and_no_other(name: str, action: str, says: str) -> None:
    async def play(host: EnvironmentHost) -> Any:
        failed = await asyncio.gather(episode(host, action), return_exceptions=True)
        return failed[0], await episode(host, "c"), host.killed

    failed, after, killed = run(play, name=name)
    assert isinstance(failed, EnvironmentFailed) and says in str(failed)
    assert after[1].text == "cc" and killed == 0


def test_objects_in_details_travel_as_text() -> None:
    async def play(host: EnvironmentHost) -> Any:
        return await episode(host, "objects")

    details = run(play)[1].details
    assert details["list"] == [1, 2] and details["own"].startswith("<host_environments.Odd")


def test_an_environment_that_raises_while_it_is_made_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'host_environments:Odd' cannot be made: RuntimeError: no licence"):
        EnvironmentHost("host_environments:Odd", {"start": "raises"}, processes=1, step_seconds=1)
