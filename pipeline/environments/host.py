"""Episodes of an environment, each in a process of its own that is killed when it hangs and replaced for the next.

Goes in: calls of a workflow; comes out: observations, or EnvironmentFailed within the time of a call. A process serves
one episode at a time and many one after another; an environment that calls itself ``inline`` runs in the worker.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import Any, Protocol

from headrace.connectors.plugins import load
from headrace.pipeline.environments.environment import (
    EnvironmentFailed,
    Observation,
    guarded,
    make_environment,
    observed,
)
from headrace.pipeline.environments.process_tree import end_group, exit_status
from headrace.pipeline.rewards.child import take_frame, write_frame
from headrace.schemas.records import Prompt

__all__ = ("EnvironmentHost", "Episode")

_LOAD_SECONDS = 60.0
"""Time for a process to start and import an environment, before the time of its own calls counts."""

Tools = Sequence[Mapping[str, Any]]


class Episode(Protocol):
    """One episode as a workflow plays it. Every method raises EnvironmentFailed."""

    async def reset(self, seed: int, prompt: Prompt) -> tuple[Observation, Tools]:
        """Begin; the first observation and the tools that the environment offers."""
        ...

    async def step(self, action: str) -> Observation:
        """Act."""
        ...


class EnvironmentHost:
    """Up to ``processes`` episodes at a time, further ones wait; ``step_seconds`` for each call.

    Raises ConfigurationError when the environment cannot be made with these options: one is made at once, to see.
    """

    def __init__(self, name: str, options: Mapping[str, Any], *, processes: int, step_seconds: float) -> None:
        self.name = name
        self.step_seconds = step_seconds
        self.killed = 0
        """Processes ended because a call hung, or was not wanted any more."""
        self._options = dict(options)
        self._inline = getattr(load("headrace.environments", name), "isolation", "process") == "inline"
        make_environment(name, options)
        self._room = asyncio.Semaphore(processes)
        self._idle: list[_Process] = []
        self._ending: set[asyncio.Task[int]] = set()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """An episode; what it holds is freed at the end, whatever ended it."""
        if self._inline:
            inline = _Inline(self.name, self._options)
            try:
                yield inline
            finally:
                inline.close()
            return
        async with self._room:
            hosted = _Hosted(self, self._idle.pop() if self._idle else None)
            try:
                yield hosted
            finally:
                if (process := hosted.leave()) is not None:
                    self._idle.append(process)

    async def start(self) -> "_Process":
        """A new process with its environment. Raises EnvironmentFailed."""
        process = await _Process.start()
        try:
            await self.call(process, _LOAD_SECONDS, "make", self.name, self._options)
        except (EnvironmentFailed, asyncio.CancelledError):
            self.kill(process)
            raise
        return process

    async def call(self, process: "_Process", seconds: float, what: str, *arguments: Any) -> Any:
        """One call. Raises EnvironmentFailed for what it raised, and when it hung or died: then it is killed."""
        try:
            value, error = await asyncio.wait_for(process.call(what, arguments), seconds)
        except TimeoutError:
            self.kill(process)
            self.killed += 1
            said = f"environment {self.name}: {what} did not return within {seconds:g} s; its process was killed"
            raise EnvironmentFailed(said, "env_timeout") from None
        except (asyncio.IncompleteReadError, OSError):
            status = await process.gone()
            self.kill(process)
            raise EnvironmentFailed(
                f"environment {self.name}: its process died in {what} (exit status {status})"
            ) from None
        if error:
            raise EnvironmentFailed(error)
        return value

    def kill(self, process: "_Process") -> None:
        """End a process now; it is waited for beside."""
        if not process.dead:
            process.kill()
            task = asyncio.create_task(process.gone())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End the processes that no episode holds, and wait until they and those killed before are gone."""
        while self._idle:
            self.kill(self._idle.pop())
        await asyncio.gather(*self._ending)


class _Inline:
    """An environment in the worker's own thread."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._environment = make_environment(name, options)

    async def reset(self, seed: int, prompt: Prompt) -> tuple[Observation, Tools]:
        return self._told("reset", seed, prompt), getattr(self._environment, "tools", ())

    async def step(self, action: str) -> Observation:
        return self._told("step", action)

    def close(self) -> None:
        self._environment.close()

    def _told(self, what: str, *arguments: Any) -> Observation:
        return observed(self._name, what, guarded(self._name, what, getattr(self._environment, what), *arguments))


class _Hosted:
    """An episode in a process; a process that served before is replaced when it fails at the reset."""

    def __init__(self, host: EnvironmentHost, process: "_Process | None") -> None:
        self._host = host
        self._process = process

    async def reset(self, seed: int, prompt: Prompt) -> tuple[Observation, Tools]:
        host = self._host
        if self._process is not None:
            with suppress(EnvironmentFailed):
                return self._first(await host.call(self._process, host.step_seconds, "reset", seed, prompt))
            host.kill(self._process)
        self._process = await host.start()
        return self._first(await host.call(self._process, host.step_seconds, "reset", seed, prompt))

    async def step(self, action: str) -> Observation:
        assert self._process is not None, "reset comes first"
        seen: Observation = await self._host.call(self._process, self._host.step_seconds, "step", action)
        return seen

    def leave(self) -> "_Process | None":
        """The process for the next episode; none when it is dead or still in a call, and then it is killed."""
        process = self._process
        if process is None or process.dead:
            return None
        if process.busy:
            self._host.kill(process)
            self._host.killed += 1
            return None
        process.tell("close")
        return process

    @staticmethod
    def _first(value: Any) -> tuple[Observation, Tools]:
        seen, tools = value
        return seen, tools or ()


class _Process:
    """A child and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.busy = False
        self.dead = False

    @classmethod
    async def start(cls) -> "_Process":
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace.pipeline.environments.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        )

    async def call(self, what: str, arguments: tuple[Any, ...]) -> tuple[Any, str]:
        """The answer. Raises IncompleteReadError and OSError when the process has died."""
        self.busy = True
        self.tell(what, *arguments)
        out = self._process.stdout
        assert out is not None
        head = await out.readexactly(4)
        frame = take_frame(bytearray(head + await out.readexactly(int.from_bytes(head, "little"))))
        assert frame is not None
        self.busy = False
        value, error = frame[0]
        return value, error

    def tell(self, what: str, *arguments: Any) -> None:
        """Send a call and do not wait."""
        assert self._process.stdin is not None
        frame = BytesIO()
        write_frame(frame, (what, arguments))
        self._process.stdin.write(frame.getvalue())

    def kill(self) -> None:
        """End it now, with what it started."""
        if not self.dead:
            self.dead = True
            assert self._process.stdin is not None
            self._process.stdin.close()
            end_group(self._process.pid, waited_for=self._process.returncode is not None)

    async def gone(self) -> int:
        """Exit status of one that has died or was killed, once it has."""
        return await exit_status(self._process)
