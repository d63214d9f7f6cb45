"""The reward ``code``: tests passed, with the verdict of the first that was not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.pipeline.environments import sandbox
from headrace.pipeline.environments.code import CodeEnvironment, CodeEnvironmentOptions
from headrace.pipeline.environments.sandbox import SandboxMissing, SandboxOptions
from headrace.pipeline.rewards.code import program_of
from headrace.pipeline.rewards.reward import Completion, RewardFailed, call_reward, load_reward
from headrace.schemas.records import Prompt

boxed = pytest.mark.skipif(bool(sandbox._problem("/usr/bin/python3", ())), reason="bubblewrap does not work here")
DOUBLES = json.dumps([{"input": f"{i}\n", "output": f"{2 * i}"} for i in range(4)])
ASSERTS = "assert double(2) == 4\nassert double('a') == 'aa'"
SANDBOX = {"wall_seconds": 2, "memory_mb": 128}


def score(text: str, tests: str, **options: Any) -> tuple[float, str]:
    reward = load_reward("code", {"sandbox": SANDBOX, **options})
    prompt = Prompt(prompt_id="p", stream="s", dataset="d", row=0, epoch=0, position=0, columns={"tests": tests})
    found = call_reward("code", reward, prompt, Completion(text, "stop"))
    return found["code"], found.details["code"]


@boxed
def test_the_share_of_tests_that_the_program_passes() -> None:
    assert score("Here:\n```python\nprint(2 * int(input()))\n```\n", DOUBLES) == (1.0, "ok")
    value, said = score("```python\nn = int(input())\nprint(2 * n if n < 2 else n)\n```", DOUBLES)
    assert value == 0.5 and said == "wrong: '2\\n' (test 2 of 4)"
    assert score("print(2)", DOUBLES, partial=False)[0] == 0.0


@boxed
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("while True: pass", "timeout: exit status"),
        ("x = bytearray(9 << 30)", "memory: exit status 1"),
        ("def f(:", "error: exit status 1"),
        ("import os\nwhile True: os.fork()", "processes: "),
        ("while True: print('x' * 999)", "output: "),
        ("import socket; socket.create_connection(('192.0.2.1', 1))", "network: "),
        ("print(open('/etc/passwd').read())", "error: "),
    ],
)
def test_what_a_program_tries_is_its_verdict(program: str, says: str) -> None:
    value, said = score(program, DOUBLES, partial=False)
    assert value == 0.0 and said.startswith(says) and "(test 0 of 4)" in said


@boxed
def test_assertions_after_the_program_and_no_way_around_them() -> None:
    assert score("def double(x): return x + x", ASSERTS) == (1.0, "ok")
    assert score("def double(x): return 4", ASSERTS)[1].startswith("error: exit status 1")
    for cheat in (
        "import os; os._exit(0)",
        "raise SystemExit",
        "import builtins; builtins.print = lambda *a: None",
        "print(input())\nraise SystemExit",
        "import sys\nprint(sys.stdin.read())\nsys.exit(0)",
    ):
        assert score(f"def double(x): return 4\n{cheat}", ASSERTS)[0] == 0.0


@boxed
@pytest.mark.parametrize("tests", ["", "[]", '[{"input": 1}]', "[1]"])
def test_a_prompt_without_tests_is_a_failure_not_a_zero(tests: str) -> None:
    with pytest.raises(RewardFailed, match="prompt p"):
        score("print(1)", tests)


def test_the_last_block_is_the_program() -> None:
    assert program_of("a\n```python\nx\n```\nb\n```py\ny\n```") == "y\n"
    assert program_of("```\nz\n") == "z\n" and program_of("print(1)") == "print(1)"


def test_where_programs_cannot_be_isolated_the_reward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_problem", lambda python, visible: "no leave")
    with pytest.raises(SandboxMissing, match="no leave"):
        load_reward("code", {})
    load_reward("code", {"sandbox": {"allow_unsandboxed": True}})


@boxed
def test_the_environment_shows_what_a_program_printed_and_its_verdict() -> None:
    world = CodeEnvironment(CodeEnvironmentOptions(turns=2, sandbox=SandboxOptions(wall_seconds=2)))
    prompt = Prompt(prompt_id="p", stream="s", dataset="d", row=0, epoch=0, position=0, prompt="2**64?", answer="16")
    assert world.reset(0, prompt).text == "2**64?"
    seen = world.step("I try.\n```python\nprint(4 * 4)\n```")
    assert seen.text == "<output verdict='ok'>\n16\n</output>" and seen.details["isolation"] == "bubblewrap"
    seen = world.step("```python\n1 / 0\n```")
    assert "ZeroDivisionError" in seen.text and seen.details["verdict"].startswith("error: exit status 1")
    assert world.step("<answer> 16 </answer>").reward == 1.0
    world.reset(0, prompt)
    assert world.step("I do not know").details["verdict"] == "neither a program nor an answer"
