"""Trains a policy from the recorded batches of another run: the loop behind ``python -m headrace.trainers.from_log``.

Starts from the recorded run's newest checkpoint before the first batch asked for (else from its initial weights) and
trains what lies between as the run did. A checkpoint of its own is where it goes on after a kill; every batch has one
line of metrics, with the digest of its weights and whether they are those that the run published.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.open import open_store
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import consumer_group
from headrace.schemas.records import Manifest
from headrace.trainers.backends.backend import Backend
from headrace.trainers.batch_feed import BatchFeed
from headrace.trainers.checkpoint import Checkpoint, Positions
from headrace.trainers.checkpoint_open import open_checkpoints, open_place
from headrace.trainers.checkpoint_saver import Checkpoints
from headrace.trainers.export import export_model
from headrace.trainers.lanes import BatchReader, lanes_of
from headrace.trainers.lineage import Point, ancestry
from headrace.trainers.ranks import Ranks
from headrace.trainers.recorded_run import Recorded, read_recorded, recorded_digest, weights_digest
from headrace.trainers.sinks.fan_out import Sinks, open_sinks
from headrace.trainers.sinks.sink import said
from headrace.trainers.update import Learned, Learner

__all__ = ("LogTrainer",)


class LogTrainer:
    """One rank. config: of this training; recorded: the run's. span: first batch, last batch or 0 for all. back_to: go
    on from a checkpoint of this training at or before this batch; later ones are deleted; -1: from the newest.
    """

    def __init__(
        self,
        config: RunConfig,
        recorded: RunConfig,
        policy: str,
        *,
        connection: Connection,
        backend: Backend,
        ranks: Ranks,
        stop: StopSignal,
        span: tuple[int, int],
        back_to: int = -1,
    ) -> None:
        self._config, self._recorded, self._name, self._span = config, recorded, policy, span
        self._policy = recorded.policy_names().index(policy)
        self._connection, self._backend, self._ranks, self._stop = connection, backend, ranks, stop
        self._folder = config.run_folder()
        self._store = open_store(recorded.store, recorded.run_folder())
        own = open_store(config.store, self._folder)
        self._trainer = config.trainer_of(policy)
        self._reader = BatchReader(
            connection,
            policy=self._policy,
            name=policy,
            lanes=lanes_of(ranks.data_rank, ranks.data_size, connection.partition_count(f"batches.{policy}")),
            manifests=ranks.leads,
            client_id=f"from-log.{config.run.id}.{ranks.rank}",
            group=consumer_group(recorded.run.id, f"from-log.{config.run.id}"),
            stop=stop,
        )
        self._feed = BatchFeed(self._reader, ranks, self._store, stop)
        self._learner = Learner(config, policy, backend, ranks)
        self._checkpoints = open_checkpoints(config, policy, own, self._learner.state, ranks, stop)
        self._batch, self._back_to, self._pruned_at = 0, back_to, -1
        self._metrics: MetricsFile | None = None
        self._sinks = open_sinks(config, policy) if ranks.leads else Sinks({})

    def run(self) -> None:
        """Train the batches asked for, then write the model. Raises ConfigurationError, BrokenBatch, Stopped."""
        found = self._ranks.broadcast(read_recorded(self._connection, self._policy) if self._ranks.leads else None)
        first, last = found.span(*self._span)
        self._start(found, first, last)
        before = self._as_recorded() if self._batch + 1 < first else self._learner
        while self._batch < last:
            learner = self._learner if self._batch + 1 >= first else before
            self._next(learner, found)
            if self._checkpoints.due(self._batch, self._trainer.checkpoint_every) and self._batch < last:
                self._checkpoints.save(self._point(), self._feed.positions())
        self._checkpoints.save_last(self._point(), self._feed.positions())
        weights = self._backend.weights()
        if self._ranks.leads:
            target = self._folder / "model" / self._name
            export_model(weights, Path(self._config.policies[self._name].model), target)
            self._say(f"done at batch {last}: {self._file.summary()}; model: {target}")

    def close(self) -> None:
        """Leave the cluster."""
        self._checkpoints.close()
        self._sinks.close()
        self._reader.close()

    def _start(self, found: Recorded, first: int, last: int) -> None:
        """Load what to go on from: a checkpoint of this training, else one of the run, else the initial weights."""
        if self._ranks.leads:
            self._checkpoints.sweep()
            if self._back_to >= 0:
                self._checkpoints.forget_after(self._back_to)
        own = self._choose(self._checkpoints, lambda point: point.batch <= last)
        if own is not None:
            self._checkpoints.load(own)
            self._say(f"goes on after batch {own.point.batch}")
            self._begin(own.point.batch, own.positions)
            return
        place = open_place(self._recorded, self._name, self._store, self._folder / "checkpoints" / ".recorded")
        theirs = Checkpoints(place, self._learner.state, self._ranks, self._stop, keep=1)
        way = set(ancestry(found.seen, [c.point for c in theirs.listed()])) if self._ranks.leads else set()
        chosen = self._choose(theirs, lambda point: point in way and point.batch < first)
        if chosen is not None:
            theirs.load(chosen)
            self._say(f"begins with the run's checkpoint of batch {chosen.point.batch}")
            self._begin(chosen.point.batch, chosen.positions)
            return
        self._say("begins with the initial weights")
        starts = self._connection.start_offsets("manifests")
        lanes = self._connection.start_offsets(f"batches.{self._name}")
        self._begin(0, Positions(manifests=starts[self._policy], lanes=lanes))

    def _choose(self, kept: Checkpoints, fits: Callable[[Point], bool]) -> Checkpoint | None:
        """The newest whole checkpoint that fits, from rank 0 on every rank."""
        if not self._ranks.leads:
            return self._ranks.broadcast(None)
        fitting = (c for c in reversed(kept.listed()) if fits(c.point))
        return self._ranks.broadcast(next((c for c in fitting if kept.verified(c)), None))

    def _begin(self, batch: int, positions: Positions) -> None:
        self._batch = batch
        self._reader.start(positions)
        if self._ranks.leads:
            self._metrics = MetricsFile(self._folder / "metrics.jsonl", batch)

    def _as_recorded(self) -> Learner:
        """A learner with the recorded settings, for batches before the first one asked for."""
        if self._recorded.trainer_of(self._name) == self._trainer:
            return self._learner
        learner = Learner(self._recorded, self._name, self._backend, self._ranks)
        if learner.state is not self._backend:
            raise ConfigurationError(
                f"with a critic a range has to begin after a checkpoint: this one would begin after batch {self._batch}"
            )
        return learner

    def _point(self) -> Point:
        return Point(lineage=0, batch=self._batch, version=self._batch)

    def _next(self, learner: Learner, found: Recorded) -> None:
        began = time.monotonic()
        order = self._feed.order(self._batch + 1)
        if not isinstance(order, Manifest):
            raise ConfigurationError(
                f"manifests of run {self._recorded.run.id} end after batch {self._batch}, its steps say that it "
                f"trained {found.last}: the topics are of different runs"
            )
        items = self._feed.items(order)
        waited, began = time.monotonic() - began, time.monotonic()
        learned = learner.train(items, order, found.versions.get(self._batch, order.start_version))
        self._batch = order.batch
        weights = self._backend.weights()
        seconds = time.monotonic() - began
        self._checkpoints.poll()
        if self._ranks.leads:
            if self._checkpoints.durable > self._pruned_at:
                self._pruned_at = self._checkpoints.durable
                self._checkpoints.prune(None, 0)
            version = found.versions.get(order.batch)
            recorded = recorded_digest(self._store, self._recorded.run.id, self._name, version)
            self._note(order, learned, waited, seconds, weights_digest(weights), recorded)

    def _note(
        self, order: Manifest, learned: Learned, waited: float, seconds: float, digest: str, recorded: str
    ) -> None:
        equal = digest == recorded if recorded else None
        self._file.write(
            {
                "kind": "step",
                "policy": self._policy,
                "batch": order.batch,
                "updates": learned.updates,
                "loss": learned.loss,
                "tokens": order.tokens,
                "sequences": order.sequences,
                "wait_seconds": round(waited, 4),
                "step_seconds": round(seconds, 4),
                "weights": digest,
                "recorded_weights": recorded,
                "equal": equal,
                "metrics": {**learned.metrics, **self._checkpoints.figures()},
            }
        )
        beside = {"loss": learned.loss, "time/wait_for_batch": waited, "time/step": seconds}
        self._sinks.write(order.batch, said({**learned.metrics, **beside}))
        told = {True: ", as recorded", False: ", weights differ from the recorded", None: ""}[equal]
        reward = learned.metrics.get("reward/mean", 0.0)
        self._say(f"batch {order.batch}: loss {learned.loss:.4f}, reward {reward:.3f}, step {seconds:.2f} s{told}")

    @property
    def _file(self) -> "MetricsFile":
        assert self._metrics is not None, "rank 0 writes, after the start"
        return self._metrics

    def _say(self, text: str) -> None:
        if self._ranks.leads:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {self._name} from the log: {text}\n")
            sys.stderr.flush()


class MetricsFile:
    """``metrics.jsonl`` of a training from the log: a line a batch, none twice, also after a kill."""

    def __init__(self, path: Path, after: int) -> None:
        """Keep the lines up to batch ``after``; what a killed process had beyond its checkpoint comes again."""
        self._lines = [line for line in _lines_of(path) if line["batch"] <= after]
        beside = path.with_suffix(".unfinished")
        beside.write_text("".join(json.dumps(line) + "\n" for line in self._lines), "utf-8")
        beside.replace(path)
        self._out = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Add a batch's line."""
        self._lines.append(line)
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()
        os.fsync(self._out.fileno())

    def summary(self) -> str:
        """How the weights compare with the recorded ones."""
        known = [line for line in self._lines if line["equal"] is not None]
        other = next((line["batch"] for line in known if not line["equal"]), None)
        if not known:
            return f"{len(self._lines)} batches, nothing to compare with in the recorded store"
        if other is None:
            return f"{len(known)} batches, the weights of each are the recorded ones"
        return f"{len(known)} batches, the weights differ from the recorded ones from batch {other} on"


def _lines_of(path: Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        return []
    found: list[Mapping[str, Any]] = []
    for text in path.read_text("utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:  # the last line of a process that was killed
            break
    return found
