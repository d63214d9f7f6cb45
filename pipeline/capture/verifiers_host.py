"""A verifiers environment in a process of its own, for all episodes of a worker; killed when it hangs, then replaced.

Goes in: rows and base URLs; comes out: what the environment made of them, or EpisodeFailed. An episode that is
cancelled and does not end within a few seconds takes its process with it, and the episodes beside it: they were in the
hands of a program that no longer listens.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from headrace.connectors.verifiers import Played
from headrace.pipeline.environments.process_tree import end_tree, exit_status
from headrace.pipeline.rewards.child import take_frame, write_frame
from headrace.pipeline.workflows.workflow import EpisodeFailed

__all__ = ("VerifiersHost",)

_CANCEL_SECONDS = 5.0
"""Time for a cancelled episode to end."""


class VerifiersHost:
    """start_seconds: for the process to import and make the environment. killed: processes that hung."""

    def __init__(self, description: Path, *, start_seconds: float) -> None:
        self.killed = 0
        self._description = description
        self._start_seconds = start_seconds
        self._starting = asyncio.Lock()
        self._child: _Child | None = None
        self._watching: set[asyncio.Task[None]] = set()

    async def play(self, row: Mapping[str, Any], base_url: str) -> Played:
        """One episode. Raises EpisodeFailed when its process cannot start or dies."""
        child = await self._living()
        number, answer = child.play(row, base_url)
        try:
            return await answer
        except asyncio.CancelledError:
            watching = asyncio.create_task(self._cancel(child, number))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            raise

    async def close(self) -> None:
        """End the process."""
        for watching in self._watching:
            watching.cancel()
        if self._child is not None:
            await self._child.end()

    async def _living(self) -> "_Child":
        async with self._starting:
            if self._child is None or self._child.dead:
                self._child = await _Child.start(self._description, self._start_seconds)
            return self._child

    async def _cancel(self, child: "_Child", number: int) -> None:
        ended = child.cancel(number)
        if not await ended(_CANCEL_SECONDS) and not child.dead:
            self.killed += 1
            sys.stderr.write(f"rollout: {self._description}: an episode hangs; its process is replaced\n")
            await child.end()


class _Child:
    """The process, its pipes, and who waits for which episode."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.dead = False
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Played]] = {}
        self._ended: dict[int, asyncio.Event] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, description: Path, seconds: float) -> "_Child":
        """Raises EpisodeFailed with what the environment said."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.pipeline.capture.verifiers_child", str(description),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"},
        )  # fmt: skip
        child = cls(process)
        try:
            _, error = await asyncio.wait_for(child._frame(), seconds)
        except TimeoutError:
            await child.end()
            raise EpisodeFailed(f"{description}: the environment was not ready within {seconds:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            error = f"its process died at the start (exit status {await exit_status(process)})"
        except asyncio.CancelledError:
            await child.end()
            raise
        if error:
            await child.end()
            raise EpisodeFailed(f"{description}: {error}")
        child._reading = asyncio.create_task(child._read())
        return child

    def play(self, row: Mapping[str, Any], base_url: str) -> tuple[int, "asyncio.Future[Played]"]:
        """Begin an episode: its number, and its result."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._ended[number] = asyncio.Event()
        self._tell("play", number, dict(row), base_url)
        return number, self._waiting[number]

    def cancel(self, number: int) -> Any:
        """Ask for an episode's end; gives a coroutine function that says whether it came within so many seconds."""
        event = self._ended.get(number)
        if event is not None:
            self._tell("cancel", number)

        async def ended(seconds: float) -> bool:
            if event is None:
                return True
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
            return event.is_set()

        return ended

    async def end(self) -> None:
        """Kill it with all that it started, and fail whoever waits."""
        self.dead = True
        if self._reading is not None:
            self._reading.cancel()
        if self._process.returncode is None:
            end_tree(self._process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it left behind in its session
        await exit_status(self._process)
        self._fail("the environment's process was ended: it or an episode beside this one did not listen any more")

    async def _frame(self) -> Any:
        out = self._process.stdout
        assert out is not None
        head = await out.readexactly(4)
        frame = take_frame(bytearray(head + await out.readexactly(int.from_bytes(head, "little"))))
        assert frame is not None
        return frame[0]

    async def _read(self) -> None:
        try:
            while True:
                number, played = await self._frame()
                answer = self._waiting.pop(number)
                self._ended.pop(number).set()
                if not answer.done():
                    answer.set_result(played)
        except (asyncio.IncompleteReadError, OSError):
            self.dead = True
            self._fail(f"the environment's process died (exit status {await exit_status(self._process)})")

    def _fail(self, said: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EpisodeFailed(said))
        for event in self._ended.values():
            event.set()
        self._waiting.clear()
        self._ended.clear()

    def _tell(self, *call: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(_framed(call))


def _framed(call: tuple[Any, ...]) -> bytes:
    frame = BytesIO()
    write_frame(frame, call)
    return frame.getvalue()
