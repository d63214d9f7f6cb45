"""Trainer processes without their slow imports: one process imports torch and the like once and forks each trainer.

``Nursery()`` in a test; run as a program it is the parent of the trainers: a line of JSON on standard input starts one,
lines on standard output tell of starts and ends.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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


class Nursery:
    """Starts trainers by forking; ``close`` ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._children, self._order = folder, dict[int, Trainer](), list[Trainer]()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self,
        *arguments: str,
        trap: tuple[str, int] | None = None,
        program: str = "trainer",
        environment: Mapping[str, str] | None = None,
    ) -> Trainer:
        """A ``trainer``, one ``from_log``, or a ``probe`` (rank_probe.py) with these arguments; traps: traps.py."""
        child = Trainer(self._folder / f"trainer-{len(self._order)}.log")
        self._order.append(child)
        assert self._process.stdin is not None
        order = {
            "arguments": arguments,
            "trap": trap,
            "log": str(child._log),
            "program": program,
            "environment": dict(environment or {}),
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        assert child.started.wait(180), "no trainer was forked"
        return child

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

    def close(self) -> None:
        """End the trainers and their parent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def serve() -> None:
    """Fork trainers until standard input closes, then kill what is left."""
    import deepspeed
    import rank_probe
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
