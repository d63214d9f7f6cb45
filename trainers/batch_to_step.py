"""The trainer: batches of a policy in, Steps and weight versions out (protocol 8).

Reads ``batches.<policy>`` and ``manifests``, writes ``steps`` and ``deltas`` and the object store. Every batch is
trained exactly once in the final lineage: the checkpoint decides where training resumes, the store's head decides what
was published, and nothing is published twice. Order of a step: checkpoint (when due), weights in the store, Step.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.connectors.kafka import Connection, Consumer
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.config import RunConfig
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.schemas.ids import consumer_group, transactional_id
from headrace.schemas.records import End, Manifest, Record, Resumed, Rollback, Step, Stop
from headrace.trainers.backends.backend import Backend, Outgoing
from headrace.trainers.batch_feed import BatchFeed
from headrace.trainers.checkpoint import Checkpoint, Positions
from headrace.trainers.checkpoint_open import open_checkpoints
from headrace.trainers.export import export_model
from headrace.trainers.lanes import BatchReader, lanes_of
from headrace.trainers.lineage import Announcement, Plan, Point, check_version, decide, rollback_base
from headrace.trainers.ranks import Ranks
from headrace.trainers.sinks.fan_out import Sinks, open_sinks
from headrace.trainers.sinks.sink import metrics_of
from headrace.trainers.step_log import StepLog
from headrace.trainers.torch_kernels import kernels_on
from headrace.trainers.update import Learned, Learner
from headrace.trainers.versions import Versions, copied

__all__ = ("Trainer",)


@dataclass(slots=True)
class _Timing:
    """Seconds of one step; the wait is that of the rank that waited longest, the rest by rank 0's clock."""

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
        self._frozen = config.policies[policy].frozen
        self._connection, self._store, self._backend = connection, store, backend
        self._ranks, self._stop, self._rewind = ranks, stop, rewind
        self._learner = Learner(config, policy, backend, ranks)
        folder = config.run_folder()
        self._checkpoints = open_checkpoints(config, policy, store, self._learner.state, ranks, stop)
        self._target = folder / "model" / policy
        self._lanes = connection.partition_count(f"batches.{policy}")
        self._reader = BatchReader(
            connection,
            policy=self._policy,
            name=policy,
            lanes=lanes_of(ranks.data_rank, ranks.data_size, self._lanes),
            manifests=ranks.leads,
            client_id=f"{instance}.{ranks.rank}",
            group=consumer_group(config.run.id, f"trainer.{policy}"),
            stop=stop,
            ahead=self._trainer.prefetch_mb << 20,
        )
        self._sinks = open_sinks(config, policy) if ranks.leads else Sinks({})
        self._feed = BatchFeed(self._reader, ranks, store, stop)
        self._log: StepLog | None = None
        self._offsets: Consumer | None = None
        self._versions: Versions | None = None
        if ranks.leads:
            self._log = StepLog(
                connection,
                policy=self._policy,
                name=policy,
                transactional_id=transactional_id(config.run.id, "trainer", policy),
                client_id=instance,
                # Not the reader's: a client serves one call at a time, and that one polls without end.
                consumer=self._offsets_of(instance),
                stop=stop,
            )
        self._lineage = 0
        self._batch = 0
        self._version = 0
        self._base: Point | None = None
        self._discard = False
        self._pruned_at = -1
        self._told: dict[int, int] = {}
        self._beside = ThreadPoolExecutor(1, "publish") if self._trainer.publish_ahead else None
        self._publishing: Future[CommittedVersion] | None = None
        self._began = time.monotonic()

    def run(self) -> None:
        """Train until the data or ``max_steps`` ends, then stop the policy. Raises what ends a trainer early."""
        plan = self._start()
        if plan.stopped:
            self._say("this policy has stopped; nothing to do")
            return
        while True:
            ending = self._next_batch()
            if ending:
                self._finish(ending)
                return

    # start and resume

    def _start(self) -> Plan:
        """Fence predecessors, decide, load, and publish what has to be published; see lineage.decide."""
        self._versions = self._open_versions()
        plan, chosen, self._base = self._ranks.broadcast(self._decide() if self._ranks.leads else None)
        if plan.stopped:
            return plan
        if self._versions is not None:
            self._versions.share_head()
        positions = self._positions(chosen)
        if chosen is not None:
            self._checkpoints.load(chosen)
        self._lineage, self._batch = plan.lineage, plan.start_batch
        self._reader.start(positions)
        self._say(
            f"start: lineage {plan.lineage}, weights of batch {plan.start_batch}"
            + (f", retraining to batch {plan.retrain_to}" if plan.retrain_to > plan.start_batch else "")
        )
        self._retrain(plan)
        if plan.first or plan.publish is not None:
            self._publish([], plan.publish, self._outgoing(), self._feed.offsets())
            self._version = self._ranks.broadcast(self._version if self._ranks.leads else None)
        return plan

    def _open_versions(self) -> Versions | None:
        """This rank's part in publishing: rank 0's alone, or every rank's where each holds shards of its own."""
        shared = self._backend.shards() is not None
        if not shared and not self._ranks.leads:
            return None
        together = self._ranks if self._beside is None or not shared else self._ranks.beside()
        return Versions(
            self._store,
            self._log,
            run=self._config.run.id,
            name=self._name,
            policy=self._policy,
            shapes=self._backend.shapes(),
            full_every=self._trainer.full_every,
            context=self._trainer.delta_context,
            stop=self._stop,
            ranks=together if shared else None,
            kernels=kernels_on(self._ranks.device),
            fenced=self._config.store.conditional_writes == "fence",
            kind="full" if self._trainer.lora.rank else None,
        )

    def _outgoing(self) -> Outgoing:
        """The weights to publish: this rank's shards, else all of them on rank 0; collective."""
        shards = self._backend.shards()
        return self._backend.weights() if shards is None else shards

    def _decide(self) -> tuple[Plan, Checkpoint | None, Point | None]:
        """Rank 0: fence, then read the head and the steps, roll back if asked to, and decide."""
        log = self._lead_log
        log.open()
        seen = log.seen()
        head = self._lead_versions.read_head()
        if head is not None and head.lineage > seen.lineage:
            log.commit([], self._start_lanes())  # a successor went back between the readings: it has fenced this one
        self._checkpoints.sweep()
        kept = {checkpoint.point: checkpoint for checkpoint in self._checkpoints.listed()}
        if self._rewind is not None:
            trained = sum(not policy.frozen for policy in self._config.policies.values())
            check_version(head, self._rewind.version, alone=trained == 1)
            base = self._whole_one(kept, lambda: rollback_base(seen, list(kept), self._rewind_to.version))
            assert base is not None
            record = Rollback(
                policy=self._policy,
                lineage=seen.lineage + 1,
                base_lineage=base.lineage,
                base_batch=base.batch,
                base_version=base.version,
                discard=self._rewind_to.discard,
            )
            log.commit([record], self._start_lanes())
            self._say(f"rolled back to batch {base.batch} (version {base.version}) as lineage {record.lineage}")
            seen = log.seen()
        start = self._whole_one(kept, lambda: decide(seen, head, list(kept)).start)
        plan = decide(seen, head, list(kept))
        # Of the record, not of this process: it may be the one after the process that was asked to go back.
        self._discard = seen.rollback.discard if seen.rollback else False
        if head is not None and not plan.stopped and plan.publish is None:
            self._lineage = plan.lineage
            late = [self._record(plan.announce, head.batch, head.version)] if plan.announce else []
            self._lead_versions.announce(late, self._start_lanes())
        return plan, kept[start] if start else None, seen.base

    def _whole_one(self, kept: dict[Point, Checkpoint], choose: Callable[[], Point | None]) -> Point | None:
        """The checkpoint that ``choose`` takes out of ``kept``, with all its bytes; broken ones are taken out of it."""
        while True:
            point = choose()
            if point is None or point not in kept or self._checkpoints.verified(kept[point]):
                return point
            del kept[point]

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
            manifest = self._feed.order(self._batch + 1)
            if not isinstance(manifest, Manifest):
                break
            self._learner.train(self._feed.items(manifest), manifest, manifest.start_version)
            self._batch = manifest.batch
            self._say(f"batch {self._batch} trained again")
        if self._versions is not None and self._versions.head is not None:
            self._version = self._versions.head.version
        self._version = self._ranks.broadcast(self._version if self._ranks.leads else None)

    # a step

    def _next_batch(self) -> str:
        """Train the next batch and publish it; returns the reason when there is none."""
        limit = self._trainer.max_steps
        if self._frozen:
            return "frozen"
        if limit and self._batch >= limit:
            return "steps"
        timing = _Timing()
        began = time.monotonic()
        order = self._feed.order(self._batch + 1)
        if isinstance(order, End):
            return order.reason or "data"
        items = self._feed.items(order)
        timing.wait = self._ranks.largest({"wait": time.monotonic() - began})["wait"]
        began = time.monotonic()
        learned = self._learner.train(items, order, self._version)
        self._batch = order.batch
        weights = self._outgoing()
        timing.step = time.monotonic() - began
        self._settle()
        self._prune()
        if self._checkpoints.due(self._batch, self._trainer.checkpoint_every) or self._batch == limit:
            self._checkpoints.save(*self._state(self._version + 1))
        self._step(order, learned, timing, weights)
        return ""

    def _state(self, version: int) -> tuple[Point, Positions]:
        """What the weights stand for, of this version, and where to read on."""
        return Point(lineage=self._lineage, batch=self._batch, version=version), self._feed.positions()

    def _prune(self) -> None:
        """Delete old checkpoints once a newer one is durable and a commit has shown that nobody has taken over."""
        self._checkpoints.poll()
        if self._checkpoints.durable <= self._pruned_at or not self._told:
            return
        self._pruned_at = self._checkpoints.durable
        if self._ranks.leads:
            self._lead_log.commit([], self._told)
            self._checkpoints.prune(self._base, self._lineage)

    def _step(self, manifest: Manifest, learned: Learned, timing: _Timing, weights: Outgoing) -> None:
        offsets = self._told = self._feed.offsets()
        if self._versions is not None:
            if self._beside is None:
                self._version = self._publish_step(manifest, learned, timing, weights, offsets).version
            else:
                began = time.monotonic()
                kept = copied(weights)
                held = time.monotonic() - began
                head = self._versions.head
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
        weights: Outgoing,
        offsets: dict[int, int],
        held: float | None = None,
    ) -> CommittedVersion:
        """Commit the weights of a batch, then its Step. held: seconds the trainer waited, None: for all of it."""
        began = time.monotonic()
        committed = self._commit(weights, manifest.batch, offsets)
        took = time.monotonic() - began
        if not self._ranks.leads:
            return committed
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
            metrics={**learned.metrics, **self._beside_learning(), "publish/seconds": took},
        )
        self._lead_versions.announce([record], offsets)
        self._sinks.write(record.version, metrics_of(record))
        m = learned.metrics
        skipped = m.get("optim/skipped", 0.0)
        self._say(
            f"batch {manifest.batch} -> version {committed.version}: reward {m.get('reward/mean', 0):.3f}, "
            f"loss {learned.loss:.4f}, staleness {m['staleness/mean']:.2f}, "
            f"wait {timing.wait:.2f} s, step {timing.step:.2f} s, publish {took:.3f} s"
            + ("" if held is None else f", {held:.3f} s of it waited for")
            + (f"; {skipped:.0f} updates left out, whose gradient is not finite" if skipped else "")
        )
        return committed

    def _beside_learning(self) -> dict[str, float]:
        """Figures of a Step that the learner does not know: of checkpoints, sinks, and what its version changed."""
        return {**self._checkpoints.figures(), **self._sinks.figures(), **self._lead_versions.changed()}

    def _commit(self, weights: Outgoing, batch: int, offsets: dict[int, int]) -> CommittedVersion:
        assert self._versions is not None, "this rank has no part in publishing"
        return self._versions.publish(weights, lineage=self._lineage, batch=batch, offsets=offsets)

    def _publish(
        self, records: list[Record], kind: Announcement | None, weights: Outgoing, offsets: dict[int, int]
    ) -> None:
        """Publish the loaded weights as they are, with their record if they need one."""
        if self._versions is None:
            return
        committed = self._commit(weights, self._batch, offsets)
        self._version = committed.version
        if self._ranks.leads:
            more = [self._record(kind, committed.batch, committed.version)] if kind else []
            self._lead_versions.announce([*records, *more], offsets)
            self._say(f"version {committed.version}: the weights of batch {committed.batch} as they are")

    def _record(self, kind: Announcement, batch: int, version: int) -> Record:
        """A Step without figures, or a Resumed."""
        if kind == "Resumed":
            return Resumed(
                policy=self._policy, lineage=self._lineage, batch=batch, version=version, discard=self._discard
            )
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
        """Final checkpoint, the model as a Hugging Face folder, then Stop. Of a frozen policy only Stop is new."""
        if self._frozen:
            offsets = self._feed.offsets()
            if self._ranks.leads:
                self._lead_log.commit([Stop(reason=reason, policy=self._policy)], offsets)
                self._say("frozen: version 0 is published, and there is nothing to train")
            return
        self._settle()
        self._checkpoints.save_last(*self._state(self._version))
        # Where ranks hold shards nobody gathers them: the store has the same weights.
        weights = self._backend.weights() if self._backend.shards() is None else None
        offsets = self._feed.offsets()
        if self._ranks.leads:
            weights = self._lead_versions.weights() if weights is None else weights
            export_model(weights, Path(self._config.policies[self._name].model), self._target)
            self._lead_log.commit([Stop(reason=reason, policy=self._policy)], offsets)
            self._say(f"stopped ({reason}) at batch {self._batch}, version {self._version}; model: {self._target}")

    def _offsets_of(self, instance: str) -> Consumer:
        """A consumer that reads nothing: its group takes the offsets of the lanes, for other tools to see the lag."""
        group = consumer_group(self._config.run.id, f"trainer.{self._name}")
        self._offsets = self._connection.consumer(f"{instance}.offsets", group=group)
        return self._offsets

    def close(self) -> None:
        """Leave the cluster."""
        if self._offsets is not None:
            self._offsets.close()
        self._checkpoints.close()
        self._sinks.close()
        self._reader.close()

    @property
    def _rewind_to(self) -> Rewind:
        assert self._rewind is not None, "nobody asked to go back"
        return self._rewind

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
