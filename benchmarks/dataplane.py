"""Data plane: the assemble worker against a bare transactional loop over the same 36 KB trajectories in groups of 8;
what dispatch, a sample's way in and out, a restore and a batch's way cost.

On Apache Kafka from jars with `--libs` (or HEADRACE_KAFKA_LIBS), else on the local broker. Worker and bare loop run in
turns, each in a process of its own over a topic that is full before the clock starts; their ratio is the median of the
pairs. `--minutes N` feeds a worker for N minutes and compares its memory early and late.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.dataplane_clock import Cost, measured
from benchmarks.dataplane_feed import Feed, new_run
from benchmarks.dataplane_memory import growth
from benchmarks.dataplane_overhead import fill
from benchmarks.dataplane_stages import decisions_per_second, loop_latency_ms, put_get_cpu_ms, restore_share
from benchmarks.form import Figure, main, median
from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_node import KafkaNode, free_port

Fill = Callable[[Connection, int], None]


@contextmanager
def broker(libs: str | None) -> Iterator[str]:
    """A broker of the benchmark's own; its address."""
    with tempfile.TemporaryDirectory(prefix="headrace-dataplane-") as folder:
        if libs:
            node = KafkaNode(Path(libs), Path(folder) / "kafka", free_port(), heap="1g")
            try:
                node.wait_ready()
                yield node.bootstrap
            finally:
                node.stop()
            return
        command = [sys.executable, "-m", "headrace.connectors.broker", "--data", folder, "--port", "0"]
        process = subprocess.Popen([*command, "--exit-with-parent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith(b"ready "))
            yield f"127.0.0.1:{int(ready.split()[1])}"
        finally:
            process.terminate()
            process.wait(20)


def in_turns(bootstrap: str, kinds: tuple[str, str], count: int, rounds: int, fill: Fill) -> list[tuple[Cost, Cost]]:
    """Costs of two kinds over runs that `fill` has filled; which goes first changes every round."""
    out = []
    for number in range(rounds):
        with new_run(bootstrap) as (config, connection):
            fill(connection, count)
            order = kinds if number % 2 else kinds[::-1]
            costs = {kind: measured(kind, config, bootstrap, count) for kind in order}
        first, second = (costs[kind] for kind in kinds)
        out.append((first, second))
        told = "; ".join(f"{kind} {c.rate:.0f}/s, {c.cpu_us:.0f} us CPU" for kind, c in costs.items())
        sys.stderr.write(f"round {number + 1}: {told}; ratio {first.rate / second.rate:.2f}\n")
    return out


def fill_groups(connection: Connection, groups: int) -> None:
    """Admissions and trajectories of groups, before the clock starts."""
    feed = Feed(connection)
    feed.admit(range(groups))
    feed.flush()
    feed.trajectories(range(groups))
    feed.flush()


def assemble(bootstrap: str, groups: int, rounds: int) -> Iterator[Figure]:
    """The assemble worker against the bare loop."""
    costs = in_turns(bootstrap, ("ours", "bare"), groups, rounds, fill_groups)
    ratios = [ours.rate / bare.rate for ours, bare in costs]
    yield Figure("trajectories_per_s", median(c.rate for c, _ in costs), "1/s", anchor="one worker, 36 KB, groups of 8")
    yield Figure("bare_loop_per_s", median(c.rate for _, c in costs), "1/s")
    yield Figure("bare_loop_ratio", median(ratios), target=0.65, anchor="Kafka Streams EOS v2: 0.67")
    yield Figure("bare_loop_ratio_min", min(ratios))
    yield Figure("assemble_cpu_us", median(c.cpu_us for c, _ in costs), "us", anchor="a trajectory, all threads")
    yield Figure("bare_loop_cpu_us", median(c.cpu_us for _, c in costs), "us")


def overhead(bootstrap: str, records: int, rounds: int) -> Iterator[Figure]:
    """The runtime against a loop that does the same to small records."""
    costs = in_turns(bootstrap, ("worker", "loop"), records, rounds, fill)
    over = [worker.cpu_us - loop.cpu_us for worker, loop in costs]
    yield Figure(
        "overhead_us_per_record", median(over), "us", target=15, at_least=False,
        anchor="CPU of a worker that passes 1 KB on, less that of a loop",
    )  # fmt: skip
    yield Figure("overhead_us_per_record_min", min(over), "us")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures on one broker."""
    libs = options.libs or os.environ.get("HEADRACE_KAFKA_LIBS")
    quick = options.quick
    with broker(None if options.broker == "local" else libs) as bootstrap:
        if options.minutes:
            seen = growth(bootstrap, options.minutes)
            yield Figure("memory_trajectories", seen.trajectories, anchor=f"in {options.minutes:g} minutes")
            yield Figure("memory_early_mb", seen.early_mb, "MB", anchor="assemble worker, second fifth of the time")
            yield Figure("memory_late_mb", seen.late_mb, "MB", anchor="last fifth")
            yield Figure("memory_growth", seen.late_mb / seen.early_mb, target=1.1, at_least=False)
            return
        yield from assemble(bootstrap, 250 if quick else 1500, 2 if quick else 5)
        yield from overhead(bootstrap, 10_000 if quick else 60_000, 2 if quick else 5)
        samples = put_get_cpu_ms(bootstrap, 50 if quick else 300)
        yield Figure("put_get_cpu_ms_per_sample", samples, "ms", target=0.5, at_least=False, anchor="1,024 tokens")
        decisions = [decisions_per_second(bootstrap, 2048 if quick else 8192) for _ in range(1 if quick else 3)]
        yield Figure("decisions_per_s", median(decisions), "1/s", target=2000)
        latency = loop_latency_ms(bootstrap, 15 if quick else 100)
        yield Figure("loop_latency_ms", latency, "ms", anchor="last trajectory of a group to its batch's manifest")
        share = restore_share(bootstrap, 64 if quick else 200)
        yield Figure("restore_ratio", share, target=1, at_least=False, anchor="of 3 x live state + 2 segments")


def options_of(parser: argparse.ArgumentParser) -> None:
    """This benchmark's own options."""
    parser.add_argument("--libs", help="the libs folder of Apache Kafka 4 (HEADRACE_KAFKA_LIBS)")
    parser.add_argument(
        "--broker", choices=("kafka", "local"), default="kafka", help="local: even where Kafka is there"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="only watch a worker's memory for so long")


if __name__ == "__main__":
    main(__doc__, measure, options_of)
