"""Trainer processes without their slow imports: one process imports torch and the like once and forks each trainer.

``Nursery()`` in a test; run as a program it is the parent of the trainers, one for all tests of a process: a line of
JSON on standard input starts a trainer, lines on standard output tell of starts and ends.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any


class Trainer:
    """A forked trainer, much like a Popen: ``wait`` gives the exit code, negative for a signal."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.pid = 0
        self.started, self._ended = threading.Event(), threading.Event()
        self.returncode: int | None = None

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def wait(self, timeout: float) -> int:
        """Wait for the end."""
        assert self._ended.wait(timeout), f"still running after {timeout} s:\n{self.log()}"
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def log(self) -> str:
        """What it wrote to standard error."""
        return self._log.read_text()


class _Parent:
    """The process that forks; it ends when its standard input closes, so at the latest with this process."""

    def __init__(self) -> None:
        self._children, self._order = dict[int, Trainer](), list[Trainer]()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, child: Trainer, order: dict[str, Any]) -> None:
        """Start a trainer and wait until it has a process."""
        self._order.append(child)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        assert child.started.wait(180), "no trainer was forked"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        begun = 0
        for line in self._process.stdout:
            what, pid, code = line.split()
            if what == "start":
                child = self._order[begun]
                begun, child.pid = begun + 1, int(pid)
                self._children[child.pid] = child
                child.started.set()
            else:
                self._children[int(pid)].ended(int(code))


@cache
def _parent() -> _Parent:
    return _Parent()


class Nursery:
    """Starts trainers by forking; ``close`` ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[Trainer]()

    def start(
        self,
        *arguments: str,
        trap: tuple[str, int] | None = None,
        program: str = "trainer",
        environment: Mapping[str, str] | None = None,
    ) -> Trainer:
        """A ``trainer``, one ``from_log``, or a ``probe`` (rank_probe.py, shard_probe.py); traps: traps.py."""
        log = self._folder / f"trainer-{len(self._started)}.log"
        child = Trainer(log)
        self._started.append(child)
        order = {
            "arguments": arguments,
            "trap": trap,
            "log": str(log),
            "program": program,
            "environment": dict(environment or {}),
        }
        _parent().fork(child, order)
        return child

    def start_ranks(
        self, count: int, *arguments: str, program: str = "trainer", environment: Mapping[str, str] | None = None
    ) -> list[Trainer]:
        """So many ranks of one program, with the environment that torchrun gives."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environment or {})}
        own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        return [self.start(*arguments, program=program, environment=one) for one in own]

    def close(self) -> None:
        """End the trainers that are left."""
        for child in self._started:
            if child.returncode is None:
                with suppress(ProcessLookupError):  # it may end meanwhile
                    child.send_signal(signal.SIGKILL)
                child.wait(60)


def serve() -> None:
    """Fork trainers until standard input closes, then kill what is left."""
    import deepspeed
    import rank_probe
    import shard_probe
    import torch
    import transformers
    from traps import arm, cut_segments

    from headrace.connectors.lifetime import exit_with
    from headrace.trainers import batch_to_step, from_log
    from headrace.trainers.__main__ import main

    _ = (deepspeed, torch, transformers.Qwen3ForCausalLM, transformers.AutoModelForCausalLM, batch_to_step)
    programs: dict[str, Callable[[Sequence[str]], int | None]] = {
        "trainer": main,
        "from_log": from_log.main,
        "probe": rank_probe.main,
        "shards": shard_probe.main,
    }
    living: set[int] = set()
    rest = b""
    while True:
        for pid in list(living):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                living.discard(pid)
                print("end", pid, os.waitstatus_to_exitcode(status), flush=True)
        if not select.select([0], [], [], 0.02)[0]:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if not pid:
                with open(order["log"], "wb", buffering=0) as log:
                    os.dup2(log.fileno(), 2)
                    os.dup2(log.fileno(), 1)
                os.environ.update(order["environment"])
                if "SEGMENT_BYTES" in order["environment"]:
                    cut_segments(int(os.environ["SEGMENT_BYTES"]))
                if order["trap"]:
                    arm(*order["trap"])
                run = programs[order["program"]]
                code = exit_with(lambda run=run, order=order: run(order["arguments"]))
                sys.stderr.flush()
                os._exit(code)
            living.add(pid)
            print("start", pid, 0, flush=True)
    for pid in living:
        os.kill(pid, 9)
    time.sleep(0.1)


if __name__ == "__main__":
    serve()
