"""Memory of an assemble worker that is fed for minutes: resident size early and late.

In: a broker, a time; out: medians over the second and the last fifth of the time, in MB. The worker sets the pace: at
most so many groups are under way, so that a busy machine makes it slower and not a backlog longer. The watermark
follows what has ended, as `schedule` moves it, so that nothing may pile up.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import TopicPartition

from benchmarks.dataplane_feed import GROUP, Feed, new_run
from benchmarks.form import median
from headrace.connectors.kafka import Connection, RawRecord
from headrace.schemas.records import Kept

ROOT = Path(__file__).resolve().parents[1]
GROUPS_PER_SECOND = 20
UNDER_WAY = 64
"""Groups that are fed and not yet kept, at most."""
BEHIND = 200
"""Groups that have ended and are above the watermark."""
STALLED_SECONDS = 60.0

_CHILD = """
import sys
from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime.__main__ import run_stages
from headrace.schemas.config import RunConfig
config = RunConfig.model_validate_json(sys.argv[1])
connection = Connection.of(config.kafka, config.run.id, sys.argv[2])
run_stages(config, connection, "memory", ["assemble"], StopSignal().listen(with_parent=True))
"""


@dataclass(slots=True)
class Ended:
    """Groups that the worker has kept."""

    watch: Any
    run: str
    count: int = 0
    below: int = 0
    """All groups below this have ended."""
    _early: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, connection: Connection) -> Ended:
        """From the start of the ledger."""
        watch = connection.consumer("memory", fetch_wait_max_ms=100)
        watch.assign([TopicPartition(connection.topic("ledger"), 0, 0)])
        return cls(watch, connection.run)

    def look(self, seconds: float) -> None:
        """Take what has come, waiting for so long when nothing has."""
        while (message := self.watch.poll(seconds)) is not None:
            seconds = 0.0
            if message.error() is None:
                record = RawRecord.of(message, self.run).decoded()
                if isinstance(record, Kept):
                    self.count += 1
                    self._early.add(record.group)
        while self.below in self._early:
            self._early.remove(self.below)
            self.below += 1


@dataclass(frozen=True, slots=True)
class Growth:
    """What was seen: trajectories in groups that were kept, resident MB early and late, and their ratio."""

    trajectories: int
    early_mb: float
    late_mb: float


def growth(bootstrap: str, minutes: float) -> Growth:
    """Feed a worker for so long. Raises RuntimeError when it ends, or keeps nothing for a minute."""
    with new_run(bootstrap) as (config, connection):
        words = [sys.executable, "-c", _CHILD, config.model_dump_json(), bootstrap]
        process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        ended = Ended.of(connection)
        try:
            samples = _fed(Feed(connection), ended, process, 60 * minutes)
        finally:
            process.terminate()
            process.wait(30)
            ended.watch.close()
    early = median(mb for at, mb in samples if 0.2 <= at < 0.4)
    return Growth(ended.count * GROUP, early, median(mb for at, mb in samples if at >= 0.8))


def _fed(feed: Feed, ended: Ended, process: subprocess.Popen[bytes], seconds: float) -> list[tuple[float, float]]:
    """(share of the time, resident MB) as it went."""
    samples: list[tuple[float, float]] = []
    fed, last = 0, time.monotonic()
    began = told = last
    while (passed := time.monotonic() - began) < seconds:
        if process.poll() is not None:
            raise RuntimeError(f"the worker has ended with {process.returncode}")
        before = ended.count
        ended.look(0.1)
        last = time.monotonic() if ended.count > before or fed == ended.count else last
        if time.monotonic() - last > STALLED_SECONDS:
            raise RuntimeError(f"the worker has kept {ended.count} of {fed} groups, and none for a minute")
        wanted = min(int(passed * GROUPS_PER_SECOND), ended.count + UNDER_WAY)
        if wanted > fed:
            feed.admit(range(fed, wanted), watermark=ended.below - 1 - BEHIND)
            feed.flush()  # a trajectory that lies there before its group is admitted is dropped
            feed.trajectories(range(fed, wanted))
            feed.flush()
            fed = wanted
        samples.append((passed / seconds, _resident_mb(process.pid)))
        if time.monotonic() - told > 60:
            told = time.monotonic()
            sys.stderr.write(f"{passed:.0f} s: {ended.count * GROUP} trajectories, {samples[-1][1]:.0f} MB\n")
    return samples


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024
