"""Memory of an assemble worker that is fed for minutes: resident size early and late.

In: a broker, a time; out: medians over the second and the last fifth of the time, in MB. The watermark follows behind,
as `schedule` moves it, so that nothing may pile up.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.dataplane_feed import GROUP, Feed, new_run
from benchmarks.form import median

ROOT = Path(__file__).resolve().parents[1]
GROUPS_PER_SECOND = 20
BEHIND = 200

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


def growth(bootstrap: str, minutes: float) -> tuple[float, float]:
    """Resident MB in the second and in the last fifth of the time. Raises RuntimeError when the worker ends."""
    seconds = 60 * minutes
    with new_run(bootstrap) as (config, connection):
        words = [sys.executable, "-c", _CHILD, config.model_dump_json(), bootstrap]
        process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        feed, samples, group = Feed(connection), list[tuple[float, float]](), 0
        began = time.monotonic()
        try:
            while (passed := time.monotonic() - began) < seconds:
                if process.poll() is not None:
                    raise RuntimeError(f"the worker has ended with {process.returncode}")
                wanted = int(passed * GROUPS_PER_SECOND)
                feed.admit(range(group, wanted), watermark=group - BEHIND)
                feed.trajectories(range(group, wanted))
                feed.flush()
                group = wanted
                samples.append((passed / seconds, _resident_mb(process.pid)))
                time.sleep(0.25)
        finally:
            process.terminate()
            process.wait(30)
    sys.stderr.write(
        f"{group * GROUP} trajectories, {samples[0][1]:.0f} MB at the start, {samples[-1][1]:.0f} MB now\n"
    )
    early = median(mb for at, mb in samples if 0.2 <= at < 0.4)
    return early, median(mb for at, mb in samples if at >= 0.8)


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024
