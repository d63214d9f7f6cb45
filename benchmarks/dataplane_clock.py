"""A stopwatch for wall and CPU time that the first record starts, and a process of its own for each measurement.

In: a kind of measurement and a run; out: its cost, as the child process printed it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600


@dataclass(frozen=True)
class Cost:
    """What one pass cost."""

    records: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Records per second of wall time."""
        return self.records / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of a record in microseconds, all threads of the process."""
        return self.cpu_seconds / self.records * 1e6


class Clock:
    """Started by the first record."""

    def __init__(self) -> None:
        self.began = 0.0
        self._cpu = 0.0

    def start(self) -> None:
        """Begin, once."""
        if not self.began:
            self._cpu, self.began = cpu_seconds(), time.monotonic()

    def cost(self, records: int) -> Cost:
        """What has passed since."""
        return Cost(records, time.monotonic() - self.began, cpu_seconds() - self._cpu)


def cpu_seconds() -> float:
    """User and system time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(kind: str, config: RunConfig, bootstrap: str, count: int) -> Cost:
    """Measure in a new process. Raises RuntimeError with what it said when it fails."""
    code = "import sys; from benchmarks.dataplane_child import child; child(*sys.argv[1:])"
    words = [sys.executable, "-c", code, kind, config.model_dump_json(), bootstrap, str(count)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-3000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))
