"""The trainer: batches of a policy in, Steps and weight versions out (protocol 8).

Reads ``batches.<policy>`` and ``manifests``, writes ``steps`` and ``deltas`` and the object store. Every batch is
trained exactly once in the final lineage: the checkpoint decides where training resumes, the store's head decides what
was published, and nothing is published twice. Order of a step: checkpoint (when due), weights in the store, Step.
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from headrace.connectors.blobs import get_sequences
from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.config import RunConfig
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.schemas.ids import consumer_group, transactional_id
from headrace.schemas.records import End, Item, Manifest, Record, Resumed, Rollback, Step, Stop
from headrace.trainers.backends.backend import Backend, Weights
from headrace.trainers.checkpoint import Checkpoint, CheckpointFolder, Positions
from headrace.trainers.export import export_model
from headrace.trainers.lanes import BatchReader, Stopped, lanes_of
from headrace.trainers.lineage import Announcement, Plan, Point, decide, rollback_base
from headrace.trainers.patience import patiently
from headrace.trainers.ranks import Ranks
from headrace.trainers.step_log import StepLog
from headrace.trainers.update import Learned, Learner
from headrace.trainers.versions import Versions

__all__ = ("Trainer",)


@dataclass(slots=True)
class _Timing:
    """Seconds of one step, by rank 0's clock."""

    wait: float = 0.0
    step: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """``--resume-from``: the version to go back to, and whether everything opened since is discarded."""

    version: int
    discard: bool = False


class Trainer:
    """One rank of the trainer of one policy. Rank 0 reads manifests, publishes and writes; the others train with it.

    ``rewind`` starts a new lineage from a checkpoint first. Stop requests raise Stopped between the phases of a step.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: str,
        *,
        instance: str,
        connection: Connection,
        store: ObjectStore,
        backend: Backend,
        ranks: Ranks,
        stop: StopSignal,
        rewind: Rewind | None = None,
    ) -> None:
        self._config, self._name = config, policy
        self._trainer = config.trainer_of(policy)
        self._policy = config.policy_names().index(policy)
        self._connection, self._store, self._backend = connection, store, backend
        self._ranks, self._stop, self._rewind = ranks, stop, rewind
        self._learner = Learner(config, policy, backend, ranks)
        folder = config.run_folder()
        self._checkpoints = CheckpointFolder(folder / "checkpoints" / policy, keep=self._trainer.keep_checkpoints)
        self._target = folder / "model" / policy
        self._lanes = connection.partition_count(f"batches.{policy}")
        self._reader = BatchReader(
            connection,
            policy=self._policy,
            name=policy,
            lanes=lanes_of(ranks.rank, ranks.size, self._lanes),
            manifests=ranks.leads,
            client_id=f"{instance}.{ranks.rank}",
            group=consumer_group(config.run.id, f"trainer.{policy}"),
            stop=stop,
        )
        self._log: StepLog | None = None
        self._versions: Versions | None = None
        if ranks.leads:
            self._log = StepLog(
                connection,
                policy=self._policy,
                name=policy,
                transactional_id=transactional_id(config.run.id, "trainer", policy),
                client_id=instance,
                consumer=self._reader.consumer,
                stop=stop,
            )
        self._lineage = 0
        self._batch = 0
        self._version = 0
        self._base: Point | None = None
        self._last_checkpoint = -1
        self._beside = ThreadPoolExecutor(1, "publish") if self._trainer.publish_ahead else None
        self._publishing: Future[CommittedVersion] | None = None
        self._began = time.monotonic()

    def run(self) -> None:
        """Train until the data or ``max_steps`` ends, then stop the policy. Raises what ends a trainer early."""
        plan = self._start()
        if plan.stopped:
            self._say("this policy has stopped; nothing to do")
            return
        self._retrain(plan)
        while True:
            ending = self._next_batch()
            if ending:
                self._finish(ending)
                return

    # start and resume

    def _start(self) -> Plan:
        """Fence predecessors, decide, load, and publish what has to be published; see lineage.decide."""
        weights = self._backend.weights()
        checkpoints = self._checkpoints.all()
        points = [c.point for c in checkpoints]
        plan, self._base = self._ranks.broadcast(self._decide(weights, points) if self._ranks.leads else None)
        if plan.stopped:
            return plan
        chosen = next((c for c in checkpoints if c.point == plan.start), None)
        positions = self._positions(chosen)
        if chosen is not None:
            self._backend.load(chosen.folder)
            self._last_checkpoint = chosen.point.batch
        self._lineage, self._batch = plan.lineage, plan.start_batch
        self._reader.start(positions)
        offsets = self._offsets()
        if plan.first:
            self._publish([], None, self._backend.weights(), offsets)
        elif plan.publish is not None:
            self._publish([], plan.publish, self._backend.weights(), offsets)
        self._say(
            f"start: lineage {plan.lineage}, weights of batch {plan.start_batch}"
            + (f", retraining to batch {plan.retrain_to}" if plan.retrain_to > plan.start_batch else "")
        )
        return plan

    def _decide(self, weights: Weights, points: Sequence[Point]) -> tuple[Plan, Point | None]:
        """Rank 0: fence, then read the head and the steps, roll back if asked to, and decide."""
        log = self._lead_log
        log.open()
        seen = log.seen()
        self._versions = Versions(
            self._store,
            log,
            run=self._config.run.id,
            name=self._name,
            policy=self._policy,
            weights=weights,
            full_every=self._trainer.full_every,
            context=self._trainer.delta_context,
            stop=self._stop,
        )
        head = self._versions.read_head()
        if self._rewind is not None:
            base = rollback_base(seen, points, self._rewind.version)
            record = Rollback(
                policy=self._policy,
                lineage=seen.lineage + 1,
                base_lineage=base.lineage,
                base_batch=base.batch,
                base_version=base.version,
            )
            log.commit([record], self._start_lanes())
            self._say(f"rolled back to batch {base.batch} (version {base.version}) as lineage {record.lineage}")
            seen = log.seen()
        plan = decide(seen, head, points)
        if head is not None and not plan.stopped and plan.publish is None:
            self._lineage = plan.lineage
            late = [self._record(plan.announce, head.batch, head.version)] if plan.announce else []
            self._lead_versions.announce(late, self._start_lanes())
        return plan, seen.base

    def _positions(self, chosen: Checkpoint | None) -> Positions:
        """Where the loaded weights read on: as the checkpoint says, else from the first records."""
        if chosen is not None:
            return chosen.positions
        starts = self._connection.start_offsets("manifests")
        return Positions(manifests=starts[self._policy], lanes=self._start_lanes())

    def _start_lanes(self) -> dict[int, int]:
        return self._connection.start_offsets(f"batches.{self._name}")

    def _retrain(self, plan: Plan) -> None:
        """Train again, without publishing, the batches between the checkpoint and the head: their Steps exist."""
        while self._batch < plan.retrain_to:
            manifest = self._order()
            if not isinstance(manifest, Manifest):
                break
            self._learner.train(self._items(manifest), manifest, manifest.start_version)
            self._batch = manifest.batch
            self._say(f"batch {self._batch} trained again")
        if self._versions is not None and self._versions.head is not None:
            self._version = self._versions.head.version
        self._version = self._ranks.broadcast(self._version if self._ranks.leads else None)

    # a step

    def _next_batch(self) -> str:
        """Train the next batch and publish it; returns the reason when there is none."""
        limit = self._trainer.max_steps
        if limit and self._batch >= limit:
            return "steps"
        timing = _Timing()
        began = time.monotonic()
        order = self._order()
        if isinstance(order, End):
            return order.reason or "data"
        items = self._items(order)
        timing.wait = time.monotonic() - began
        began = time.monotonic()
        learned = self._learner.train(items, order, self._version)
        self._batch = order.batch
        weights = self._backend.weights()
        timing.step = time.monotonic() - began
        self._settle()
        if self._batch % self._trainer.checkpoint_every == 0 or self._batch == limit:
            self._checkpoint()
        self._step(order, learned, timing, weights)
        return ""

    def _order(self) -> Manifest | End:
        """The next Manifest or the End, from rank 0 on every rank. Raises Stopped on all of them."""
        found: Manifest | End | Stopped | None = None
        if self._ranks.leads:
            try:
                found = self._reader.order(self._batch + 1)
            except Stopped as stopped:
                found = stopped
        order = cast(Manifest | End | Stopped, self._ranks.broadcast(found))
        if isinstance(order, Stopped):
            raise order
        return order

    def _items(self, manifest: Manifest) -> list[Item]:
        """This rank's items of a batch, with the arrays of large ones fetched from the store."""
        return [self._whole(item) for item in self._reader.take(manifest)]

    def _whole(self, item: Item) -> Item:
        blob = item.blob
        if blob is None:
            return item
        return replace(item, sequences=patiently(lambda: get_sequences(self._store, blob), self._stop))

    def _checkpoint(self) -> None:
        point = Point(lineage=self._lineage, batch=self._batch, version=self._version + 1)
        positions = Positions(manifests=self._reader.manifest_offset, lanes=self._offsets())
        self._checkpoints.write(point, positions, self._backend.save, self._ranks)
        self._last_checkpoint = self._batch
        if self._ranks.leads:
            self._checkpoints.prune(self._base)

    def _offsets(self) -> dict[int, int]:
        """Offsets of all lanes, from every rank."""
        merged: dict[int, int] = {}
        for part in self._ranks.gather(dict(self._reader.lane_offsets)):
            merged.update(part)
        return merged

    def _step(self, manifest: Manifest, learned: Learned, timing: _Timing, weights: Weights) -> None:
        offsets = self._offsets()
        if self._ranks.leads:
            if self._beside is None:
                self._version = self._publish_step(manifest, learned, timing, weights, offsets).version
            else:
                began = time.monotonic()
                kept = {name: bits.copy() for name, bits in weights.items()}
                held = time.monotonic() - began
                head = self._lead_versions.head
                self._version = head.version + 1 if head else 0
                self._publishing = self._beside.submit(
                    self._publish_step, manifest, learned, timing, kept, offsets, held
                )
        self._version = self._ranks.broadcast(self._version if self._ranks.leads else None)

    def _settle(self) -> None:
        """Wait for a Step that is published beside this one: at most one is under way, and checkpoints follow it."""
        if self._beside is None:
            return
        if self._publishing is not None:
            self._version = self._publishing.result().version
            self._publishing = None
        self._version = self._ranks.broadcast(self._version if self._ranks.leads else None)

    def _publish_step(
        self,
        manifest: Manifest,
        learned: Learned,
        timing: _Timing,
        weights: Weights,
        offsets: dict[int, int],
        held: float | None = None,
    ) -> CommittedVersion:
        """Commit the weights of a batch, then its Step. held: seconds the trainer waited, None: for all of it."""
        began = time.monotonic()
        committed = self._commit(weights, manifest.batch, offsets)
        took = time.monotonic() - began
        record = Step(
            policy=self._policy,
            batch=manifest.batch,
            version=committed.version,
            lineage=self._lineage,
            updates=learned.updates,
            loss=learned.loss,
            tokens=manifest.tokens,
            sequences=manifest.sequences,
            wait_seconds=timing.wait,
            step_seconds=timing.step,
            publish_seconds=took if held is None else held,
            delta_bytes=committed.size,
            changed_share=committed.changed_share,
            finished_ms=int(time.time() * 1000),
            metrics={**learned.metrics, **self._lead_versions.changed(), "publish/seconds": took},
        )
        self._lead_versions.announce([record], offsets)
        m = learned.metrics
        self._say(
            f"batch {manifest.batch} -> version {committed.version}: reward {m.get('reward/mean', 0):.3f}, "
            f"loss {learned.loss:.4f}, staleness {m['staleness/mean']:.2f}, "
            f"wait {timing.wait:.2f} s, step {timing.step:.2f} s, publish {took:.3f} s"
            + ("" if held is None else f", {held:.3f} s of it waited for")
        )
        return committed

    def _commit(self, weights: Weights, batch: int, offsets: dict[int, int]) -> CommittedVersion:
        return self._lead_versions.publish(weights, lineage=self._lineage, batch=batch, offsets=offsets)

    def _publish(
        self, records: list[Record], kind: Announcement | None, weights: Weights, offsets: dict[int, int]
    ) -> None:
        """Publish the loaded weights as they are, with their record if they need one."""
        if self._ranks.leads:
            committed = self._commit(weights, self._batch, offsets)
            self._version = committed.version
            more = [self._record(kind, committed.batch, committed.version)] if kind else []
            self._lead_versions.announce([*records, *more], offsets)
            self._say(f"version {committed.version}: the weights of batch {committed.batch} as they are")

    def _record(self, kind: Announcement, batch: int, version: int) -> Record:
        """A Step without figures, or a Resumed."""
        if kind == "Resumed":
            discard = self._rewind.discard if self._rewind else False
            return Resumed(policy=self._policy, lineage=self._lineage, batch=batch, version=version, discard=discard)
        return Step(
            policy=self._policy,
            batch=batch,
            version=version,
            lineage=self._lineage,
            updates=0,
            loss=0.0,
            tokens=0,
            sequences=0,
            wait_seconds=0.0,
            step_seconds=0.0,
            publish_seconds=0.0,
            delta_bytes=0,
            changed_share=0.0,
            finished_ms=int(time.time() * 1000),
        )

    # the end

    def _finish(self, reason: str) -> None:
        """Final checkpoint, the model as a Hugging Face folder, then Stop."""
        self._settle()
        if self._last_checkpoint != self._batch:
            self._checkpoint()
        weights = self._backend.weights()
        offsets = self._offsets()
        if self._ranks.leads:
            export_model(weights, Path(self._config.policies[self._name].model), self._target)
            self._lead_log.commit([Stop(reason=reason, policy=self._policy)], offsets)
            self._say(f"stopped ({reason}) at batch {self._batch}, version {self._version}; model: {self._target}")

    def close(self) -> None:
        """Leave the cluster."""
        self._reader.close()

    @property
    def _lead_log(self) -> StepLog:
        assert self._log is not None, "only rank 0 writes"
        return self._log

    @property
    def _lead_versions(self) -> Versions:
        assert self._versions is not None, "only rank 0 publishes"
        return self._versions

    def _say(self, text: str) -> None:
        if self._ranks.leads:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} trainer {self._name}: {text}\n")
            sys.stderr.flush()
