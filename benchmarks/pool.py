"""A pool of rollout workers of 100, 60 and 30 % speed: its rate beside the sum of what each makes alone.

One run with real processes on Apache Kafka (or the local broker): operators, source, plain torch trainer, and workers
whose engine samples from a script at a set time a step. Each worker works alone for a while, then all three together,
then the slowest is stopped (SIGSTOP) as if its machine hung: what the others make meanwhile, and whether batches still
come. Rates are sampled tokens per second of finished trajectories, all from one run; about six minutes, `--quick` two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chaos_run import HEADRACE, ROOT, make_data
from benchmarks.form import Figure, main, median
from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_node import KafkaNode, free_port
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.local_broker import live_bootstrap
from headrace.pipeline.run_records import TrajectoryHead, head_of, read_records
from headrace.schemas.config import dump_config, read_config
from headrace.schemas.errors import HeadraceError
from headrace.schemas.records import Closed, Step

SPEEDS = {"fast": 1.0, "medium": 0.6, "slow": 0.3}
STEP_SECONDS = 0.05
"""Time of a decode step at full speed."""
SLOTS = 8
SETTLE_SECONDS = 6.0
"""From a worker's first trajectory to the beginning of a measurement: all slots are busy by then."""
Window = tuple[float, float]


def configuration(folder: Path, bootstrap: str) -> dict[str, Any]:
    """An endless run without workers of its own; batches never wait for a straggler below eight versions."""
    return {
        "run": {"id": "pool", "folder": str(folder), "group_partitions": 4, "inboxes": 8, "lanes": 4},
        "kafka": {"bootstrap": bootstrap},
        "policies": {"main": {"model": str(folder / "model"), "depth": 1.0, "max_staleness": 8}},
        "streams": {"main": {"dataset": str(folder / "prompts.jsonl"), "group_size": 4}},
        "rollout": {
            "engine": "scripted", "workers": 0, "slots": SLOTS, "max_new_tokens": 64,
            "options": {"mean_length": 16.0, "sigma": 0.5},
        },
        "trainer": {"backend": "torch", "precision": "fp32", "batch_groups": 16, "checkpoint_every": 50, "lr": 1e-5},
    }  # fmt: skip


class Pool:
    """The run and its workers; leaving it ends every process."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self.folder, self._bootstrap = folder, bootstrap
        self.path = folder / "pool"
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Pool:
        make = "import sys; from benchmarks.chaos_run import make_model; make_model(sys.argv[1])"  # torch stays there
        subprocess.run(
            [sys.executable, "-c", make, str(self.folder / "model")], cwd=ROOT, check=True, capture_output=True
        )
        make_data(self.folder / "prompts.jsonl")
        file = self.folder / "run.json"
        file.write_text(json.dumps(configuration(self.folder, self._bootstrap)))
        with (self.folder / "launcher.log").open("wb") as log:
            self._launcher = subprocess.Popen(
                [HEADRACE, "run", "@", str(file)], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        _until(self._head, 240, "version 0 was not published")
        self.config = read_config(self.path / "config.json")
        address = self._bootstrap or live_bootstrap(RunFolder(self.path))
        self.connection = Connection.of(self.config.kafka, self.config.run.id, address)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._workers):
            self.leave(name)
        self._launcher.send_signal(signal.SIGINT)
        self._launcher.wait(120)

    def _head(self) -> bool:
        if self._launcher.poll() is not None:
            raise HeadraceError((self.folder / "launcher.log").read_text()[-2000:])
        return (self.path / "config.json").exists() and any((self.path / "store").rglob("*manifest/*.json"))

    def join(self, name: str) -> None:
        """Start a worker; returns when its first trajectory is there and it has settled."""
        options = {**self.config.rollout.options, "step_seconds": STEP_SECONDS / SPEEDS[name]}
        rollout = self.config.rollout.model_copy(update={"options": options})
        file = self.folder / f"{name}.json"
        dump_config(self.config.model_copy(update={"rollout": rollout}), file)
        words = ["--config", str(file), "--instance", name, "--bootstrap", self.connection.bootstrap]
        began = time.time() * 1000
        with (self.folder / f"{name}.log").open("ab") as log:
            self._workers[name] = subprocess.Popen(
                [sys.executable, "-m", "headrace.pipeline.task_to_trajectory", *words, "--exit-with-parent"],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        _until(lambda: any(h.worker == name and h.finished_ms > began for h in self.heads(began)), 120, f"{name} idles")
        time.sleep(SETTLE_SECONDS)

    def leave(self, name: str) -> None:
        """End a worker."""
        process = self._workers.pop(name)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)

    def stand(self, name: str) -> None:
        """Stop a worker where it is."""
        self._workers[name].send_signal(signal.SIGSTOP)

    def heads(self, since_ms: float) -> list[TrajectoryHead]:
        """Trajectories that have finished since a time."""
        raws = self.connection.read_topic("trajectories", self.connection.offsets_since("trajectories", int(since_ms)))
        return [head for head in map(head_of, raws) if head is not None and head.finished_ms > since_ms]

    def rate(self, window: Window, *workers: str) -> float:
        """Tokens per second in a window (milliseconds) of the workers named, of all without a name."""
        begin, end = window
        made = [h for h in self.heads(begin) if h.finished_ms <= end and (not workers or h.worker in workers)]
        return 1000 * sum(head.tokens for head in made) / (end - begin)

    def steps(self, window: Window) -> list[int]:
        """Times of the Steps in a window, in milliseconds."""
        found = (record for _, record in read_records(self.connection, "steps") if isinstance(record, Step))
        return [step.finished_ms for step in found if window[0] < step.finished_ms <= window[1]]


def _until(done: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise HeadraceError(f"{what} within {seconds:g} s")
        time.sleep(0.2)


def _measured(seconds: float) -> Window:
    begin = time.time() * 1000
    time.sleep(seconds)
    return begin, time.time() * 1000


def phases(pool: Pool, seconds: float) -> dict[str, Window]:
    """Each worker alone, all together, and all while the slow one stands; the window of each."""
    windows: dict[str, Window] = {}
    for name in SPEEDS:
        pool.join(name)
        windows[name] = _measured(seconds)
        pool.leave(name)
    for name in SPEEDS:
        pool.join(name)
    windows["pool"] = _measured(seconds)
    pool.stand("slow")
    windows["stopped"] = _measured(seconds / 2)
    return windows


def figures(pool: Pool, windows: dict[str, Window]) -> Iterator[Figure]:
    """Rates, their shares, and the batches that came meanwhile."""
    alone = {name: pool.rate(windows[name]) for name in SPEEDS}
    for name, rate in alone.items():
        yield Figure(f"alone_{name}", rate, "tok/s", anchor=f"{SPEEDS[name]:.0%} of {SLOTS / STEP_SECONDS:g}, at most")
    together = pool.rate(windows["pool"])
    yield Figure("pool", together, "tok/s", anchor="all three together")
    yield Figure("pool_share", together / sum(alone.values()), "", 0.95, anchor="of the sum of the single rates")
    others = pool.rate(windows["stopped"], "fast", "medium")
    yield Figure(
        "others_share", others / (alone["fast"] + alone["medium"]), "", 0.95, anchor="while the slow one stands"
    )
    steps = pool.steps(windows["pool"])
    gaps = [(b - a) / 1000 for a, b in pairwise(steps)]
    yield Figure("step_seconds", median(gaps) if gaps else float("nan"), "s", anchor="between two Steps of the pool")
    while_stopped = [windows["stopped"][0], *pool.steps(windows["stopped"]), windows["stopped"][1]]
    longest = max((b - a) / 1000 for a, b in pairwise(while_stopped))
    yield Figure("steps_stopped", len(while_stopped) - 2, "", anchor="Steps while the slow one stands")
    yield Figure("longest_stopped", longest, "s", anchor="between two of them; its tasks go elsewhere after 10 s")
    ledger = [record for _, record in read_records(pool.connection, "ledger") if isinstance(record, Closed)]
    failed = sum(record.reason in ("failed", "stale") for record in ledger)
    yield Figure("groups_lost", failed, "", 0, False, "failed or stale over the whole run")


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """The whole of it."""
    libs = Path(given.libs or os.environ.get("HEADRACE_KAFKA_LIBS", ""))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = ""
        if given.broker == "kafka":
            node = KafkaNode(libs, folder / "kafka", free_port())
            stack.callback(node.stop)
            node.wait_ready()
            bootstrap = node.bootstrap
        pool = stack.enter_context(Pool(folder, bootstrap))
        yield from figures(pool, phases(pool, 15.0 if given.quick else 60.0))


def options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own."""
    parser.add_argument("--broker", choices=("kafka", "local"), default="kafka", help="what carries the topics")
    parser.add_argument("--libs", default="", help="jars of Apache Kafka; else HEADRACE_KAFKA_LIBS")


if __name__ == "__main__":
    main(__doc__, measure, options)
