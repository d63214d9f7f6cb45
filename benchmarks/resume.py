"""Does a trainer that is killed with -9 again and again end with the weights of one that nobody disturbed?

Trains 60 fixed batches with checkpoints every 10, once undisturbed and once killed at ten random points (in a step, a
publish, a checkpoint, a start or a retraining): on plain torch, and on DeepSpeed with two ranks, where a kill takes one
rank or all. Readers follow the published deltas all the time. `--quick` is 20 batches and three kills on plain torch.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.form import Figure, main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "kit"))

from nursery import Nursery, Trainer  # noqa: E402
from trainer_feed import Feed, local_broker, make_config, make_model, trainer_arguments  # noqa: E402

from headrace.connectors.kafka import Connection  # noqa: E402
from headrace.connectors.stores.chain import Chain  # noqa: E402
from headrace.connectors.stores.image import load_image  # noqa: E402
from headrace.connectors.stores.open import open_store  # noqa: E402
from headrace.pipeline.delta_to_worker import WeightReader, verify_chain  # noqa: E402
from headrace.schemas.config import RunConfig  # noqa: E402
from headrace.schemas.delta_layout import DeltaError  # noqa: E402
from headrace.schemas.records import Step  # noqa: E402

GRACE_SECONDS = 15.0
"""What ranks have to end by themselves once one of them has died."""
LIFE_SECONDS = 600.0
"""A trainer that does not end within this time hangs."""


@dataclass
class Result:
    """What a run came to: weights before and after, how often each batch has a Step, and what happened on the way."""

    start: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    steps: Counter[int]
    kills: int = 0
    retrained: int = 0
    behind: int = 0
    broken: int = 0


@dataclass
class Follower:
    """A worker that reads every version it can get, in a thread."""

    config: RunConfig
    pause: float
    stop: threading.Event = field(default_factory=threading.Event)
    versions: list[int] = field(default_factory=list)
    digest: str = ""

    def run(self) -> None:
        """Follow until told to stop, then once more."""
        reader = WeightReader(open_store(self.config.run_folder() / "store"), self.config.run.id, "main")
        last = False
        while not last:
            last = self.stop.wait(self.pause)
            try:
                loaded = reader.fetch()
            except DeltaError:
                continue  # nothing is published yet, or a version is being written
            self.digest = loaded.version.root_digest
            self.versions.append(loaded.version.version)


class Lives:
    """Starts the trainers of one run and kills them."""

    def __init__(self, config: RunConfig, broker: str, nursery: Nursery, rng: random.Random) -> None:
        self.config, self.broker, self._nursery, self._rng = config, broker, nursery, rng
        self.fed = Feed(Connection.of(config.kafka, config.run.id, broker), config)
        self.ranks = config.trainer_of("main").ranks
        self.retrained = 0

    def _start(self) -> list[Trainer]:
        """All ranks of a trainer, with the environment that torchrun gives them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        arguments = trainer_arguments(self.config, self.broker)
        return [
            self._nursery.start(
                *arguments,
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {},
            )
            for rank in range(self.ranks)
        ]

    def kill_at(self, batch: float) -> bool:
        """Run a trainer and kill it a part of a step after the Step of a batch; False when it ended before.

        One in five dies earlier: while it starts, or while it trains again. Of several ranks one dies, or all.
        """
        ranks = self._start()
        early = time.monotonic() + self._rng.uniform(0.5, 5) if self._rng.random() < 0.2 else float("inf")
        while ranks[0].returncode is None and time.monotonic() < early:
            done = _DONE.findall(said_by(ranks[0]))
            if done and int(done[-1][0]) >= int(batch):
                time.sleep(batch % 1 * float(done[-1][1]))
                break
            time.sleep(0.01)
        victims = ranks if self._rng.random() < 0.5 else [self._rng.choice(ranks)]
        self._send(victims, signal.SIGKILL)
        rest = [rank for rank in ranks if rank not in victims]
        self._send(rest, signal.SIGTERM)  # as torchrun does
        until = time.monotonic() + GRACE_SECONDS
        while any(rank.returncode is None for rank in rest) and time.monotonic() < until:
            time.sleep(0.05)
        self._send([rank for rank in rest if rank.returncode is None], signal.SIGKILL)
        codes = [rank.wait(LIFE_SECONDS) for rank in ranks]
        self.retrained += said_by(ranks[0]).count("trained again")
        return any(code == -signal.SIGKILL for code in codes)

    @staticmethod
    def _send(ranks: list[Trainer], number: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)

    def finish(self) -> None:
        """Run a trainer to the end."""
        ranks = self._start()
        for rank in ranks:
            if rank.wait(LIFE_SECONDS):
                raise RuntimeError(f"a trainer ended with {rank.returncode}:\n{rank.log()[-3000:]}")
        self.retrained += ranks[0].log().count("trained again")


def said_by(rank: Trainer) -> str:
    """What a trainer has written so far; it opens its log a moment after it was started."""
    try:
        return rank.log()
    except FileNotFoundError:
        return ""


_DONE = re.compile(r"batch (\d+) -> version \d+: .* step ([\d.]+) s")


def run(
    name: str,
    parent: Path,
    broker: str,
    nursery: Nursery,
    kills: int,
    batches: int,
    rng: random.Random,
    **trainer: object,
) -> Result:
    """Train fixed batches to the end, killed so many times at random points, and look at what came of it."""
    config = make_config(parent / "model", parent, name, checkpoint_every=10, **trainer)
    config.run_folder().mkdir(parents=True)
    lives = Lives(config, broker, nursery, rng)
    for batch in range(1, batches + 1):
        lives.fed.batch(batch, groups=8, size=8)
    lives.fed.end()
    followers = [Follower(config, pause) for pause in (0.05, 1.0)]
    threads = [threading.Thread(target=follower.run, daemon=True) for follower in followers]
    for thread in threads:
        thread.start()
    points = sorted(rng.uniform(0, batches) for _ in range(kills))
    done = sum(lives.kill_at(point) for point in points)
    lives.finish()
    for follower, thread in zip(followers, threads, strict=True):
        follower.stop.set()
        thread.join(60)
    store = open_store(config.run_folder() / "store")
    head = Chain(store, name, "main").head()
    assert head is not None, "nothing was published"
    steps = [record for record in lives.fed.records("steps") if isinstance(record, Step)]
    last = max(steps, key=lambda step: step.version)
    return Result(
        start=published(config, 0),
        weights=published(config, last.version),
        steps=Counter(step.batch for step in steps),
        kills=done,
        retrained=lives.retrained,
        behind=sum(follower.digest != head.root_digest for follower in followers),
        broken=sum(bool(one.problem) for one in verify_chain(store, name, "main")),
    )


def published(config: RunConfig, version: int) -> dict[str, np.ndarray]:
    """The weights of a version, bf16 bits."""
    chain = Chain(open_store(config.run_folder() / "store"), config.run.id, "main")
    image = load_image(chain, version)
    return {name: bits.copy() for name, bits in image.layout.views(image.data).items()}


def floats(weights: dict[str, np.ndarray]) -> np.ndarray:
    """bf16 bits as one flat float32 array."""
    return np.concatenate([(bits.astype(np.uint32) << 16).view(np.float32).ravel() for bits in weights.values()])


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Both backends, undisturbed and killed."""
    rng = random.Random(given.seed)
    batches, kills = (20, 3) if given.quick else (60, given.kills)
    kinds: dict[str, dict[str, object]] = {"": {"backend": "torch"}}
    if not given.quick:
        kinds["deepspeed_"] = {"backend": "deepspeed", "zero_stage": 2, "ranks": 2}
    with tempfile.TemporaryDirectory() as folder, local_broker(Path(folder) / "broker") as broker:
        parent = Path(folder)
        make_model(parent / "model", hidden=64)
        nursery = Nursery(parent)
        for prefix, trainer in kinds.items():
            name = str(trainer["backend"])
            calm = run(f"{name}-calm", parent, broker, nursery, 0, batches, rng, **trainer)
            killed = run(f"{name}-killed", parent, broker, nursery, kills, batches, rng, **trainer)
            yield from figures(prefix, calm, killed, batches, exact=not prefix)
        nursery.close()


def figures(prefix: str, calm: Result, killed: Result, batches: int, *, exact: bool) -> Iterator[Figure]:
    """The figures of one backend."""
    yield Figure(f"{prefix}kills", killed.kills, anchor=f"kill -9 at random points of {batches} steps")
    equal = all(np.array_equal(calm.weights[name], killed.weights[name]) for name in calm.weights)
    yield Figure(
        f"{prefix}bit_equal", float(equal), target=1 if exact else None, anchor="the undisturbed run's weights"
    )
    apart, moved = (np.linalg.norm(floats(calm.weights) - floats(other)) for other in (killed.weights, calm.start))
    if not exact:
        yield Figure(
            f"{prefix}distance", float(apart / moved), target=0.02, at_least=False, anchor="way that training went"
        )
    twice = sum(count - 1 for count in killed.steps.values())
    lost = batches - len(set(killed.steps) & set(range(1, batches + 1)))
    yield Figure(f"{prefix}batches_twice", twice, target=0, at_least=False, anchor="Steps beyond one a batch")
    yield Figure(f"{prefix}batches_lost", lost, target=0, at_least=False, anchor="batches without a Step")
    yield Figure(f"{prefix}retrained", killed.retrained, "batches", anchor="trained again between checkpoint and head")
    yield Figure(
        f"{prefix}workers_behind", killed.behind + calm.behind, target=0, at_least=False, anchor="of 4 readers"
    )
    yield Figure(f"{prefix}versions_broken", killed.broken + calm.broken, target=0, at_least=False)


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seed", type=int, default=0, help="of the points at which trainers are killed")
    parser.add_argument("--kills", type=int, default=10, help="kills of each run")


if __name__ == "__main__":
    main(__doc__, measure, options)
