"""The workflow ``program``: any program that talks to an OpenAI-compatible server plays the episode.

Goes in: a task; comes out: a trajectory of all that the program sampled through the capture endpoint. The program finds
its base URL in OPENAI_BASE_URL and the prompt as one JSON object on standard input; it is killed with all that it
started when it ends, and when the episode does.
"""

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.pipeline.capture.episode import CapturedEpisode
from headrace.pipeline.environments.process_tree import end_group, end_marked, exit_status
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.captured import Captured, CapturedOptions, Outcome
from headrace.pipeline.workflows.multi_turn import episode_seed
from headrace.pipeline.workflows.workflow import EpisodeFailed, Scoring
from headrace.schemas.parts import Reward
from headrace.schemas.records import Task

__all__ = ("Program", "ProgramOptions")

_KEPT_OUTPUT = 1 << 20
_SAID = 1500
_NO_PROXY = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


class ProgramOptions(CapturedOptions):
    """Options of ``program``: one of ``command`` and ``call``."""

    command: list[str] = Field(default_factory=list)
    """Program and arguments."""
    call: str = ""
    """``module:function``, called with the prompt as a dictionary in a process of its own; what it returns is the
    result."""
    reward: Literal["stream", "program"] = "stream"
    """``stream``: the stream's reward of the last reply, or of the result's ``completion``; ``program``: the result's
    ``reward``, a number or named numbers."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the program."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "ProgramOptions":
        if bool(self.command) == bool(self.call):
            raise ValueError("set one of command and call")
        return self


class Program(Captured):
    """See the module."""

    Options = ProgramOptions

    def __init__(self, options: ProgramOptions) -> None:
        super().__init__(options)
        self._options = options

    async def play(self, task: Task, episode: CapturedEpisode, url: str, key: str, rewards: Scoring) -> Outcome:
        """Run the program once. Raises EpisodeFailed when it fails, samples nothing, or gives no reward."""
        result = await self._result(task, url, key)
        self.sampled(episode)
        text = str(result.get("completion", episode.last_text))
        return Outcome(completion=text, rewards=await self._scores(task, text, episode, result, rewards))

    async def _result(self, task: Task, url: str, key: str) -> dict[str, Any]:
        options = self._options
        command = options.command or [sys.executable, "-m", "headrace.pipeline.capture.caller", options.call]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **_NO_PROXY, **options.environment, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        output, errors = _Tail(process.stdout), _Tail(process.stderr)
        try:
            process.stdin.write(json.dumps(_prompt(task)).encode("ascii"))
            process.stdin.close()
            status = await exit_status(process)
        finally:
            # with what it started and left behind, which may hold its output open
            end_group(process.pid, waited_for=process.returncode is not None)
            end_marked(f"OPENAI_API_KEY={key}")
            await output.end()
            await errors.end()
        if status != 0:
            said = errors.kept.decode("utf-8", "replace").strip()[-_SAID:]
            raise EpisodeFailed(f"the program ended with exit status {status}: {said}", "tool_error")
        return _last_object(bytes(output.kept))

    async def _scores(
        self, task: Task, text: str, episode: CapturedEpisode, result: Mapping[str, Any], rewards: Scoring
    ) -> list[Reward]:
        if self._options.reward == "stream":
            last = episode.last
            assert last is not None
            return await rewards.score(task.prompt, Completion(text, last.end_reason, last.ids))
        given = result.get("reward")
        parts: dict[str, Any] = given if isinstance(given, dict) else {"program": given}
        if not parts or not all(isinstance(v, int | float) and math.isfinite(v) for v in parts.values()):
            raise EpisodeFailed(
                f'the program gave no reward: its last line must be a JSON object with "reward", a finite number or '
                f"named ones, and was {str(result)[:200]}",
                "tool_error",
            )
        return [Reward(name=str(name), value=float(value)) for name, value in parts.items()]


def _prompt(task: Task) -> dict[str, Any]:
    prompt = task.prompt
    return {
        "prompt": prompt.prompt,
        "messages": [{"role": m.role, "content": m.content} for m in prompt.messages],
        "answer": prompt.answer,
        "columns": prompt.columns,
        "prompt_id": prompt.prompt_id,
        "seed": episode_seed(task),
    }


class _Tail:
    """The end of what a stream says."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self.kept = bytearray()
        self._reading = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            self.kept += data
            if len(self.kept) > 2 * _KEPT_OUTPUT:
                del self.kept[:-_KEPT_OUTPUT]

    async def end(self) -> None:
        """Take what is there still; a process that left the program's group may hold the stream open for ever."""
        _, waiting = await asyncio.wait([self._reading], timeout=0.5)
        for task in waiting:
            task.cancel()


def _last_object(output: bytes) -> dict[str, Any]:
    """The JSON object in the last line that is not empty; none: an empty one."""
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
