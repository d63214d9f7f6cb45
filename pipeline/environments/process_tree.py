"""What a process and all that it started hold right now: tasks and memory, read from /proc.

Goes in: a pid; comes out: a count of tasks (threads included) and bytes. Everything that a sandbox runs stays below its
first process, because orphans fall to the first process of their pid namespace. Linux only.
"""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ("Usage", "children", "end_group", "end_marked", "end_tree", "exit_status", "tree", "usage")

_HELD = ("RssAnon:", "RssShmem:")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tasks alive, and bytes of memory that belong to them alone or that they share with each other."""

    tasks: int
    memory: int


def tree(pid: int) -> list[int]:
    """The pids of a process and its descendants; one that ends meanwhile may be missing."""
    found, waiting = [pid], [pid]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def usage(pids: list[int]) -> Usage:
    """The sum over these processes; those that have ended count nothing."""
    tasks = memory = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("Threads:"):
                tasks += int(line.split()[1])
            elif line.startswith(_HELD):
                memory += int(line.split()[1]) << 10
    return Usage(tasks, memory)


def end_tree(pid: int) -> None:
    """SIGKILL to a process that has not been waited for, and to all below it."""
    for one in reversed(tree(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def end_group(pid: int, *, waited_for: bool) -> None:
    """SIGKILL to a process that leads a session, to all below it, and to all of its group that it left behind.

    waited_for: it has ended and its status was taken, so that its own number may be another's by now.
    """
    if not waited_for:
        end_tree(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_marked(entry: str) -> None:
    """SIGKILL to every process that was started with this entry (``NAME=value``) in its environment.

    It finds what left the group and the tree of the one that started it. The entry must be a secret of these processes.
    """
    wanted = os.fsencode(entry)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


async def exit_status(process: asyncio.subprocess.Process) -> int:
    """The exit status of a process as soon as it has one.

    ``Process.wait`` also waits for the end of its pipes, which whatever it left behind may hold open.
    """
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=0.05)
    finally:
        waiting.cancel()
    return process.returncode


def children(pid: int) -> list[int]:
    """The pids of a process's children, those that were not waited for included."""
    out: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            out += [int(child) for child in (thread / "children").read_text("ascii").split()]
    except OSError:
        return out
    return out
