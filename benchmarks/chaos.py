"""Chaos: a whole run whose processes are killed with -9 at random moments, then the proofs of `headrace verify`.

A launcher, operators, two rollout workers with the scripted engine, a source, a plain torch trainer and the broker (the
local one, or Apache Kafka from jars) run as they do for a user. Kills go round all of them in a shuffled order, their
gaps are random by a seed, some come as a pair; they also keep up with the run's progress, so that all have happened
when it ends. Counted afterwards: groups lost, items trained twice, batches unlike their manifests, admissions over
their cap, any other broken property, and whether the run ended by itself.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.chaos_run import ChaosRun
from benchmarks.form import Figure, main

MEAN_GAP = 2.6
"""Seconds between two kills on average; a part that died is up again within 0.5 to 5 s on two cores."""
STEPS_PER_KILL = 1.5
PAIR_SHARE = 0.1
"""Kills that follow the one before at once."""
AGAIN_SHARE = 0.3
"""Of the kills that would hit a part again before the run has moved at all, those that do, once for each part; else a
busy machine, on which a start takes longer than a gap, would never see a step."""
START_SECONDS = 400.0
END_SECONDS = 900.0
PROPERTIES = {
    "lost": (
        "every admitted group ended exactly once",
        "no batched group was lost",
        "no prompt was admitted twice or lost",
    ),
    "trained_twice": ("every fresh item was trained once in the final lineage",),
    "wrong_batches": ("lanes hold what their manifests say", "every replayed use has one manifest entry"),
    "over_admission": ("admission stayed within its caps",),
}


def decks(parts: list[str], r: random.Random) -> Iterator[str]:
    """Parts without end, each once in every round, in a new order each round."""
    while True:
        yield from r.sample(parts, len(parts))


def kill_all(run: ChaosRun, kills: int, seed: int, say: Callable[[str], None]) -> Counter[str]:
    """Kill `kills` processes over the run's time; returns how many of each part were killed."""
    r, done = random.Random(seed), Counter[str]()
    targets = decks(run.parts(), r)
    at_death: dict[str, int] = {}
    again: dict[str, int] = {}
    while done.total() < kills and run.running():
        part = next(targets)
        gap = 0.0 if r.random() < PAIR_SHARE else r.expovariate(1 / MEAN_GAP)
        due = time.monotonic() + min(gap, 4 * MEAN_GAP)
        while time.monotonic() < due and run.running():
            if run.steps_done() * kills > run.steps * (done.total() + 1):
                break
            time.sleep(0.02)
        steps = run.steps_done()
        if at_death.get(part) == steps:
            if again.get(part) == steps or r.random() > AGAIN_SHARE:
                continue
            again[part] = steps
        patience = time.monotonic() + 10
        while not (hit := run.kill(part)) and time.monotonic() < patience and run.running():
            time.sleep(0.02)
        if hit:
            done[part] += 1
            at_death[part] = run.steps_done()
            say(f"kill {done.total()} of {kills}: {part}, {run.steps_done()} of {run.steps} steps")
    return done


def wait_for_start(run: ChaosRun) -> None:
    """Return once the first step is done; raises RuntimeError with what the launcher said."""
    end = time.monotonic() + START_SECONDS
    while run.running() and not run.steps_done() and time.monotonic() < end:
        time.sleep(0.05)
    if not run.steps_done():
        raise RuntimeError(f"the run did not start:\n{run.output()}")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """One run with its kills, and its proofs."""
    kills = options.kills or (20 if options.quick else 200)
    steps = max(4, round(kills * STEPS_PER_KILL))
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:6.1f} s  {text}\n")
        sys.stderr.flush()

    folder = options.keep or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    libs = options.libs or os.environ.get("HEADRACE_KAFKA_LIBS")
    with ChaosRun(folder.resolve(), options.broker, steps, Path(libs) if libs else None) as run:
        wait_for_start(run)
        started = time.monotonic()
        done = kill_all(run, kills, options.seed, say)
        killed = time.monotonic() - started
        say(f"{done.total()} kills in {killed:.0f} s; {run.steps_done()} of {steps} steps, waiting for the end")
        finished = run.finished(END_SECONDS)
        if not finished:
            say(f"the run has not finished:\n{run.output()}")
        seconds = time.monotonic() - started
        run.end_launcher()
        breaches = run.breaches()
        steps_done = run.steps_done()
    for name, found in breaches.items():
        for text in found[:5]:
            say(f"BROKEN {name}: {text}")
    if finished and not any(breaches.values()) and options.keep is None:
        import shutil

        shutil.rmtree(folder)
    else:
        say(f"the run is kept in {folder}")
    yield Figure("kills", done.total(), target=kills)
    for name, properties in PROPERTIES.items():
        missing = [p for p in properties if p not in breaches]
        if missing:
            raise RuntimeError(f"headrace verify has no property {missing}")
        yield Figure(name, sum(len(breaches[p]) for p in properties), target=0, at_least=False)
    named = {p for properties in PROPERTIES.values() for p in properties}
    other = sum(len(found) for name, found in breaches.items() if name not in named)
    yield Figure("other_breaches", other, target=0, at_least=False, anchor="all other properties of headrace verify")
    yield Figure("finished", float(finished), target=1)
    yield Figure("seconds", seconds, "s", target=900.0, at_least=False, anchor="first kill to the end of the run")
    yield Figure("steps", steps_done)
    for part, count in sorted(done.items()):
        yield Figure(f"kills_{part.replace('-', '_')}", count)


def options_of(parser: argparse.ArgumentParser) -> None:
    """This benchmark's own options."""
    parser.add_argument("--broker", choices=("local", "kafka"), default="local")
    parser.add_argument("--kills", type=int, help="processes to kill (200; with --quick 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the moments of the kills")
    parser.add_argument("--libs", help="the libs folder of Apache Kafka 4 (HEADRACE_KAFKA_LIBS)")
    parser.add_argument("--keep", type=Path, help="use this folder and keep it")


if __name__ == "__main__":
    main(__doc__, measure, options_of)
