"""Processes for rewards, each with a thread that waits for it: a call that hangs or dies costs its process, no more.

Goes in: a reward's name, options, prompt and completion; comes out: named parts, or RewardFailed within the time given.
A process that was killed is replaced for the next call.
"""

import asyncio
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from headrace.pipeline.environments.process_tree import end_group
from headrace.pipeline.rewards.child import take_frame, write_frame
from headrace.pipeline.rewards.reward import Completion, RewardFailed
from headrace.schemas.records import Prompt

__all__ = ("RewardPool",)

_LOAD_SECONDS = 60.0
"""Time for a process to start and import a reward, before its own time counts."""


class RewardPool:
    """Up to ``size`` processes, started when first needed."""

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(size, "reward")
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._all: list[_Child] = []
        self._closed = False
        for _ in range(size):
            self._idle.put(_Child())
        self.killed = 0
        """Processes ended because a call hung."""

    async def call(
        self,
        name: str,
        options: Mapping[str, Any],
        prompt: Prompt,
        completion: Completion | list[Completion],
        timeout: float,
    ) -> Any:
        """What ``call_reward`` gives, or for a list of completions ``call_group_reward``.

        Raises RewardFailed, also when the process dies or ``timeout`` seconds have passed.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, (name, dict(options), prompt, completion), timeout)

    def _call(self, call: tuple[Any, ...], timeout: float) -> Any:
        child = self._idle.get()
        self._all.append(child)
        name = call[0]
        try:
            child.send(call)
            loaded = child.receive(_LOAD_SECONDS)
            parts, error = loaded if loaded is not None else child.receive(timeout)
        except TimeoutError:
            child.kill()
            self.killed += 1
            raise RewardFailed(f"reward {name} did not return within {timeout:g} s; its process was killed") from None
        except (EOFError, OSError):
            code = child.kill(patience=1.0)
            raise RewardFailed(f"reward {name}: its process died (exit status {code})") from None
        finally:
            self._all.remove(child)
            if not self._closed:
                self._idle.put(child)
        if error:
            raise RewardFailed(error)
        return parts

    def close(self) -> None:
        """End all processes, running calls included."""
        self._closed = True
        for child in list(self._all):
            child.kill()
        while not self._idle.empty():
            self._idle.get().kill()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Child:
    """One process of the pool; started by the first ``send``."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()

    def send(self, call: tuple[Any, ...]) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.pipeline.rewards.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        write_frame(self._process.stdin, call)

    def receive(self, timeout: float) -> Any:
        """The next frame. Raises TimeoutError, EOFError."""
        assert self._process is not None and self._process.stdout is not None
        number = self._process.stdout.fileno()
        end = time.monotonic() + timeout
        while (frame := take_frame(self._buffer)) is None:
            if not select.select([number], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(number, 1 << 16)
            if not data:
                raise EOFError
            self._buffer += data
        return frame[0]

    def kill(self, patience: float = 0.0) -> int | None:
        """End it with what it started, ``patience`` seconds after it was seen to end; its exit status."""
        process, self._process = self._process, None
        self._buffer.clear()
        if process is None:
            return None
        if patience:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        end_group(process.pid, waited_for=process.returncode is not None)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        return process.wait()
