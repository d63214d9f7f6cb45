"""Agent programs that know nothing of this project: what they sample through their base URL is trained exactly."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_policy import RecordingPolicy, assert_sampled_in_context, chat_model

from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.program import Program
from headrace.pipeline.workflows.workflow import EpisodeFailed, make_workflow
from headrace.schemas.checks import check_record
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Reward, Sampling
from headrace.schemas.records import Prompt, Record, Task, Trajectory

END = "<|im_end|>"

AGENT = '''
import json, os, sys
given = json.load(sys.stdin)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}]
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": given["prompt"]}]
def ask(messages):
    """CLIENT"""
for question in (None, "And tomorrow?"):
    if question:
        messages.append({"role": "user", "content": question})
    while True:
        reply = ask(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            place = json.loads(call["function"]["arguments"])["place"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"sunny in {place}"})
print("thinking aloud")
print(json.dumps({"reward": {"length": float(len(messages)), "style": 0.5}, "completion": messages[-1]["content"]}))
'''
RAW_CLIENT = """
    import urllib.request
    body = json.dumps({"model": "m", "messages": messages, "tools": TOOLS}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    return {k: v for k, v in message.items() if k != "reasoning_content"}
"""
OPENAI_CLIENT = """
    from openai import OpenAI
    answer = OpenAI().chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0.2)
    return answer.choices[0].message.model_dump(exclude_none=True, exclude={"reasoning_content"})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return chat_model(tmp_path_factory.mktemp("chat"))


class Judge:
    """Remembers what it was asked to score."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        self.seen.append(completion.text)
        return [Reward(name="judge", value=2.0)]


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    prompt = replace(found.prompt, prompt="What is the weather?", messages=[], columns={"seed": "7"})
    return replace(found, sources=[], prompt=prompt, sampling=Sampling(max_new_tokens=200, seed=1))


def weatherman(text: str) -> str:
    """Thinks, calls the tool once for a question, then answers."""
    last = text.rpartition("<|im_start|>user\n")[2]
    if "<tool_response>" in last:
        return f"<think>\nthat is it\n</think>\n\nIt is sunny.{END}"
    place = "Rome" if "tomorrow" in last else "Oslo"
    # not the spacing that a template would choose
    call = f'{{"name":"weather",  "arguments":{{"place": "{place}"}}}}'
    return f"<think>\nlook\n</think>\n\n<tool_call>\n{call}\n</tool_call>{END}"


def play(program: Program, task: Task, policy: RecordingPolicy, judge: Judge | None = None) -> Trajectory:
    async def run() -> Trajectory:
        try:
            return await program.run(task, {0: policy}, judge or Judge())
        finally:
            await program.close()

    made = asyncio.run(run())
    check_record(made)
    return made


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "agent.py"
    path.write_text(text)
    return [sys.executable, str(path)]


@pytest.mark.parametrize("client", ["raw", "openai"])
def test_an_agent_with_tools_and_a_template_that_drops_thinking(
    folder: ModelFolder, task: Task, tmp_path: Path, client: str
) -> None:
    if client == "openai":
        pytest.importorskip("openai")
    body = OPENAI_CLIENT if client == "openai" else RAW_CLIENT
    command = script(tmp_path, AGENT.replace('    """CLIENT"""', body.strip("\n")))
    policy = RecordingPolicy(folder, weatherman, seed=3)
    made = play(make_workflow("program", {"command": command, "reward": "program"}), task, policy)  # type: ignore[arg-type]
    assert assert_sampled_in_context(made.sequences, policy) == 4
    # the tool's turn extends what was sampled; the next question drops the thinking of the first answer
    assert len(made.sequences) == 2
    first, second = (folder.detokenize(s.tokens) for s in made.sequences)
    assert first.count("<think>") == 2 and "tomorrow" not in first
    assert "And tomorrow?" in second and second.count("<think>") == 2
    assert "that is it" not in second.partition("tomorrow")[0]
    assert '{"name":"weather",  "arguments":{"place": "Oslo"}}' in second, "a call stands as it was sampled"
    for sequence in made.sequences:
        ends = sequence.tokens == folder.stop_token_ids[0]
        sampled = ends & (sequence.mask == 1)
        assert sampled.sum() == 2 and ends.sum() > 2, "ends of turns are trained where they were sampled"
    assert [(r.name, r.value) for r in made.rewards] == [("length", 9.0), ("style", 0.5)]
    assert (made.status, made.reward, made.completion_text) == ("train", 9.5, "It is sunny.")
    assert all(s.temperature == 1.0 for s in policy.samplings)
    assert made.metrics == {"calls": 4.0, "sequences_per_trajectory": 2.0}


def test_the_streams_reward_scores_the_last_reply(folder: ModelFolder, task: Task, tmp_path: Path) -> None:
    command = script(tmp_path, AGENT.replace('    """CLIENT"""', RAW_CLIENT.strip("\n")))
    judge = Judge()
    made = play(Program(Program.Options(command=command)), task, RecordingPolicy(folder, weatherman), judge)
    assert judge.seen == ["It is sunny."] and made.reward == 2.0


def test_a_callable_is_a_program_too(
    folder: ModelFolder, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_agent.py").write_text(
        "import json, os, urllib.request\n"
        "async def play(prompt):\n"
        "    body = json.dumps({'prompt': prompt['prompt'], 'max_tokens': 5}).encode()\n"
        "    url = os.environ['OPENAI_BASE_URL'] + '/completions'\n"
        "    json.load(urllib.request.urlopen(urllib.request.Request(url, body)))\n"
        "    return prompt['seed'] / 2\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    policy = RecordingPolicy(folder, lambda text: f"sunny{END}")
    made = play(Program(Program.Options(call="my_agent:play", reward="program")), task, policy)
    assert made.reward == 3.5 and assert_sampled_in_context(made.sequences, policy) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys; sys.stderr.write('no key\\n'); sys.exit(3)", "exit status 3: no key"),
        ("print('done')", "without one call"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11"),
    ],
)
def test_a_program_that_fails_says_why(folder: ModelFolder, task: Task, tmp_path: Path, text: str, says: str) -> None:
    program = Program(Program.Options(command=script(tmp_path, text)))
    with pytest.raises(EpisodeFailed, match=says) as failed:
        play(program, task, RecordingPolicy(folder, weatherman))
    assert failed.value.end_reason == "tool_error"


ONE_CALL = AGENT.split("for question")[0].replace('    """CLIENT"""', RAW_CLIENT.strip("\n")) + "\nask(messages)\n"


@pytest.mark.parametrize("last", ["", "print('{\"reward\": NaN}')", 'print(\'{"reward": "high"}\')', "print('[1]')"])
def test_no_finite_reward_is_no_zero(folder: ModelFolder, task: Task, tmp_path: Path, last: str) -> None:
    program = Program(Program.Options(command=script(tmp_path, ONE_CALL + last), reward="program"))
    with pytest.raises(EpisodeFailed, match="gave no reward"):
        play(program, task, RecordingPolicy(folder, weatherman))


def test_a_hung_program_is_killed_with_all_that_it_started(folder: ModelFolder, task: Task, tmp_path: Path) -> None:
    child, place = tmp_path / "child.py", tmp_path / "child"
    child.write_text(f"import os, time\nopen({str(place)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    start = f"subprocess.Popen([sys.executable, {str(child)!r}], start_new_session=True)"
    command = script(tmp_path, f"import subprocess, sys, time\n{start}\ntime.sleep(600)")
    program = Program(Program.Options(command=command))

    async def run() -> float:
        playing = asyncio.create_task(program.run(task, {0: RecordingPolicy(folder, weatherman)}, Judge()))
        while not (place.exists() and place.read_text()):
            assert not playing.done(), playing.result()
            await asyncio.sleep(0.02)
        began = time.monotonic()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await program.close()
        return time.monotonic() - began

    assert asyncio.run(run()) < 5
    pid = int(place.read_text())
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.02)
    os.kill(pid, 9)
    raise AssertionError("the grandchild lives")


def test_what_a_program_left_in_a_session_of_its_own_ends_with_it(
    folder: ModelFolder, task: Task, tmp_path: Path
) -> None:
    place = tmp_path / "child"
    start = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    source = f"import subprocess, sys\nleft = {start}\nopen({str(place)!r}, 'w').write(str(left.pid))"
    program = Program(Program.Options(command=script(tmp_path, source)))
    with pytest.raises(EpisodeFailed, match="without one call"):
        play(program, task, RecordingPolicy(folder, weatherman))
    status = Path("/proc") / place.read_text() / "stat"
    for _ in range(50):
        if not status.exists() or "Z" in status.read_text().split()[2]:
            return
        time.sleep(0.1)
    raise AssertionError("it lives on")


def test_output_without_end_and_a_child_that_stays_block_nobody(
    folder: ModelFolder, task: Task, tmp_path: Path
) -> None:
    more = "import subprocess\nprint('x' * 5_000_000)\nsubprocess.Popen(['sleep', '60'])\nprint('{\"reward\": 1}')\n"
    program = Program(Program.Options(command=script(tmp_path, ONE_CALL + more), reward="program"))
    began = time.monotonic()
    assert play(program, task, RecordingPolicy(folder, weatherman)).reward == 1.0
    assert time.monotonic() - began < 20


def test_an_agent_that_rewrites_its_history_is_bounded(folder: ModelFolder, task: Task, tmp_path: Path) -> None:
    text = ONE_CALL + "\nfor i in range(5):\n    ask([{'role': 'user', 'content': f'{i} {i}'}])\n"
    options = {"command": script(tmp_path, text), "max_sequences": 4}
    with pytest.raises(EpisodeFailed, match="6 calls made 6 sequences"):
        play(Program(Program.Options(**options)), task, RecordingPolicy(folder, weatherman))


@pytest.mark.parametrize("options", [{}, {"command": ["x"], "call": "a:b"}, {"comand": ["x"]}])
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="workflow 'program'"):
        make_workflow("program", options)


def test_the_prompt_arrives_whole(folder: ModelFolder, task: Task, tmp_path: Path) -> None:
    out = tmp_path / "given.json"
    keeps = f"given = json.load(sys.stdin); json.dump(given, open({str(out)!r}, 'w'))"
    text = ONE_CALL.replace("given = json.load(sys.stdin)", keeps)
    odd = replace(task, prompt=replace(task.prompt, prompt="naïve ☃", answer="42"))
    play(Program(Program.Options(command=script(tmp_path, text))), odd, RecordingPolicy(folder, weatherman))
    given = json.loads(out.read_text())
    assert (given["prompt"], given["answer"], given["seed"]) == ("naïve ☃", "42", 7)
