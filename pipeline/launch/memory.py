"""Memory of all processes of a run together: sampled in the background, the peak kept.

PSS (proportional set size, ``/proc/PID/smaps_rollup``) counts a page that n processes share as 1/n in each, so the sum
is what the machine gives. Where it cannot be read the sum is of RSS and counts shared pages several times;
``kind`` says which.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ("MemorySampler", "descendants", "memory_of")

_INTERVAL_SECONDS = 1.0
_BUSY_SHARE = 0.02
"""Reading page tables costs CPU; the pause grows so that sampling takes at most this share of one core."""


class MemorySampler:
    """Samples the memory of processes and their descendants until stopped."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self.peak_bytes = 0
        self.kind = "pss"

    def start(self) -> "MemorySampler":
        """Begin; returns itself."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; the peak stays readable."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            total, self.kind = memory_of(descendants(self._pids()))
            self.peak_bytes = max(self.peak_bytes, total)
            spent = time.monotonic() - began
            if self._stop.wait(max(_INTERVAL_SECONDS, spent / _BUSY_SHARE)):
                return


def descendants(pids: Iterable[int]) -> set[int]:
    """These processes and all their children's children; empty where the system has no ``/proc``."""
    found: set[int] = set()
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid in found:
            continue
        found.add(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            todo += map(int, _read(task).split())
    return found


def memory_of(pids: Iterable[int]) -> tuple[int, str]:
    """Sum over processes in bytes, and its kind: ``pss``, or ``rss`` when one's PSS cannot be read."""
    total, kind = 0, "pss"
    for pid in pids:
        rollup = _read(Path(f"/proc/{pid}/smaps_rollup"))
        line = next((entry for entry in rollup.splitlines() if entry.startswith("Pss:")), "")
        if line:
            total += int(line.split()[1]) * 1024
            continue
        pages = _read(Path(f"/proc/{pid}/statm")).split()
        if pages:
            total, kind = total + int(pages[1]) * os.sysconf("SC_PAGE_SIZE"), "rss"
    return total, kind


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
