"""The rollout worker: tasks become trajectories, sampled from the newest weights, in one loop that never blocks on
one.

Goes in: Tasks from its inbox, weights from the object store; comes out: Trajectories, EvalResults and the Demand that
asks for more. In no consumer group (protocol 5): it may join, die and come back at any time without a rebalance.
Between two decode steps it reads the inbox, installs weights, starts and ends episodes and serves acknowledgements.
"""

import argparse
import asyncio
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from headrace.connectors.engines.engine import EngineFailed
from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal, exit_with
from headrace.connectors.model_folder import ModelFolder, tokenizer_digest
from headrace.connectors.plugins import load
from headrace.connectors.schema_ids import take_schema_ids
from headrace.connectors.stores.open import open_store
from headrace.pipeline.rewards.scorer import Scorer
from headrace.pipeline.rollout.delivery import Delivery
from headrace.pipeline.rollout.episodes import Episodes
from headrace.pipeline.rollout.group_scores import read_members
from headrace.pipeline.rollout.holdings import Holdings
from headrace.pipeline.rollout.inbox import Inbox
from headrace.pipeline.rollout.partials import Partials
from headrace.pipeline.rollout.pins import Pins
from headrace.pipeline.rollout.sampler import Sampler
from headrace.pipeline.rollout.weights import WeightFeed
from headrace.schemas.config import RunConfig, read_config
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Sequence, Source
from headrace.schemas.records import Cancel, Resume, RunEnd, RunManifest, Stop, Suspend, Task

__all__ = ("RolloutWorker", "main")

Role = Literal["any", "train", "eval"]

_IDLE_SECONDS = 0.2
"""Longest wait for a record when nothing runs."""
_PENDING_SECONDS = 0.002
"""The same while episodes wait for something else: a reward, a version, an acknowledgement."""
_REPORT_SECONDS = 30.0
_HAND_OVER_SECONDS = 2.0
"""Longest time that a worker which leaves waits for its prefixes to be written."""


class RolloutWorker:
    """One incarnation of a worker; ``run`` returns when the run has ended or the process should stop.

    role: the tasks that it asks for, any, train or eval; one that only evaluates loads each version that it is asked
    about, and no other.
    """

    def __init__(
        self, config: RunConfig, connection: Connection, name: str, stop: StopSignal, *, role: Role = "any"
    ) -> None:
        self._config = config
        self._connection = connection
        self._name = name
        self._stop = stop
        self._role = role
        self._ended = False
        self._suspended = False
        self._handing_over = False
        """Suspended by somebody who wants its tasks to go elsewhere."""
        self._fault: BaseException | None = None
        self._writing: set[asyncio.Task[None]] = set()
        """Prefixes on their way."""

    def run(self) -> None:
        """Join the run, work, leave. Raises ConfigurationError for a wrong model, tokenizer, plug-in or store."""
        config = self._config
        manifest = self._manifest()
        if manifest is None:
            return
        self._check_tokenizers(manifest)
        self._store = open_store(config.store, config.run_folder())
        self._scorer = Scorer(config)
        with self._stop.at_once():
            self._samplers = self._make_samplers()
        self._feed = WeightFeed(
            self._store,
            self._connection,
            config.policy_names(),
            self._name,
            poll_seconds=config.rollout.poll_seconds,
            host_copy=config.rollout.host_copy,
            follow=self._role != "eval",
        )
        self._pins = Pins(self._samplers, self._feed.ask)
        partitions = manifest.partitions.get("trajectories", config.run.group_partitions)
        self._delivery = Delivery(
            self._connection,
            self._name,
            partitions=partitions,
            store=self._store,
            offload_bytes=config.rollout.offload_bytes,
            retries=config.store.retries,
        )
        self._partitions = partitions
        self._episodes = Episodes(
            config,
            self._samplers,
            self._scorer,
            self._delivery,
            self._recall,
            members=partial(read_members, self._connection),
        )
        try:
            if self._join():
                asyncio.run(self._work())
        finally:
            self._leave()

    def _manifest(self) -> RunManifest | None:
        """What the run was created with, waiting for it; None when the process should stop first."""
        said = False
        while True:
            for raw in self._connection.read_topic("run"):
                record = raw.decoded_if_ours()
                if isinstance(record, RunManifest):
                    return record
            if not said:
                _say(f"waiting for the manifest of run {self._config.run.id} in {self._connection.topic('run')}")
                said = True
            if self._stop.wait(0.5):
                return None

    def _check_tokenizers(self, manifest: RunManifest) -> None:
        for name, policy in self._config.policies.items():
            digest = tokenizer_digest(policy.model)
            if manifest.tokenizer_digest and digest != manifest.tokenizer_digest:
                raise ConfigurationError(
                    f"policy {name}: {policy.model} tokenises otherwise than the run (digest {digest[:12]}, the run's "
                    f"manifest has {manifest.tokenizer_digest[:12]}): tokenizer, chat template or special tokens "
                    "differ; give this worker the model folder that the run was created with"
                )

    def _make_samplers(self) -> dict[int, Sampler]:
        rollout = self._config.rollout
        make = load("headrace.engines", rollout.engine)
        samplers = {}
        for policy, section in enumerate(self._config.policies.values()):
            engine = make(
                section.model,
                slots=rollout.slots,
                max_prompt_tokens=rollout.max_prompt_tokens,
                threads=rollout.threads,
                options=rollout.options,
            )
            folder = ModelFolder(section.model)
            samplers[policy] = Sampler(
                policy,
                engine,
                folder,
                on_new_weights=rollout.on_new_weights,
                max_prompt_tokens=rollout.max_prompt_tokens,
            )
        return samplers

    def _join(self) -> bool:
        """Load the head weights, then take the inbox's end, then look for the end mark; false when there is no work."""
        snapshots = self._feed.first(self._stop.wait)
        if len(snapshots) < len(self._samplers):
            return False
        for policy, snapshot in enumerate(snapshots):
            self._samplers[policy].load(snapshot.weights, snapshot.version.version)
        incarnation = time.time_ns() // 1_000_000
        self._inbox = Inbox(self._connection, self._name, incarnation)
        if any(isinstance(raw.decoded_if_ours(), RunEnd) for raw in self._connection.read_topic("run")):
            _say("the run has ended")
            return False
        rollout = self._config.rollout
        self._holdings = Holdings(
            self._name,
            incarnation,
            capacity=rollout.slots + 1,
            role=self._role,
            heartbeat_seconds=rollout.heartbeat_seconds,
            send=lambda demand: self._delivery.send("demand", demand, 0),
        )
        self._partials = Partials(
            self._connection, self._delivery, self._holdings, self._partitions, rollout.partial_tokens
        )
        self._feed.start()
        versions = ", ".join(
            f"{n} at version {self._samplers[i].version}" for i, n in enumerate(self._config.policy_names())
        )
        _say(f"{self._name} joins with {rollout.slots} slots, inbox {self._inbox.partition}, policies {versions}")
        return True

    async def _work(self) -> None:
        reported, tokens = time.monotonic(), 0
        while not self._ended and not self._stop.is_set():
            busy = [s for s in self._samplers.values() if s.busy and not self._suspended]
            self._read(0.0 if busy else self._patience())
            if self._handing_over:
                await self._give_up()
            self._take_weights()
            for sampler in busy:
                sampler.step()
            self._delivery.poll(0)
            if self._fault is not None:
                raise self._fault
            # Demand first, so that the next tasks are on their way while these results are
            self._holdings.announce(**self._state())
            await asyncio.sleep(0)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                made = sum(s.tokens for s in self._samplers.values())
                self._report(made - tokens, time.monotonic() - reported)
                reported, tokens = time.monotonic(), made
        if not self._ended:
            await self._hand_over()
        await asyncio.gather(*self._holdings.cancel_all(), return_exceptions=True)
        await self._episodes.close()
        if not self._ended:
            self._holdings.bid_farewell(next_sequence=self._inbox.next_sequence, inbox=self._inbox.partition)

    def _state(self) -> dict[str, Any]:
        """What Demand tells beside the holdings."""
        versions = {policy: sampler.version for policy, sampler in self._samplers.items()}
        return {"next_sequence": self._inbox.next_sequence, "inbox": self._inbox.partition, "versions": versions}

    def _take_weights(self) -> None:
        """Put what has been fetched in force, and write the prefixes that this broke off for others to go on with."""
        broken_off = False
        if self._role == "eval":
            for policy, version, reason in self._feed.refused():
                self._pins.refused(policy, version, reason)
            self._pins.follow(self._holdings.tasks())
        for policy, snapshot in self._feed.take():
            broken_off |= self._samplers[policy].load(snapshot.weights, snapshot.version.version)
            self._holdings.changed()
        if broken_off:
            self._writing.update(self._partials.write(self._samplers.values()))
            self._writing = {one for one in self._writing if not one.done()}

    async def _hand_over(self) -> None:
        """Break off what runs and write its prefixes, for the workers that get these tasks next.

        Under ``finish`` nothing is handed over: it would be finished by other weights.
        """
        if self._config.rollout.on_new_weights == "finish":
            return
        with suppress(EngineFailed):  # whoever stops a group of processes stops the engine's own first
            for sampler in self._samplers.values():
                sampler.break_off()
        self._writing.update(self._partials.write(self._samplers.values()))
        end = time.monotonic() + _HAND_OVER_SECONDS
        while any(not one.done() for one in self._writing) and time.monotonic() < end:
            self._delivery.poll(_PENDING_SECONDS)
            await asyncio.sleep(0)
        self._holdings.announce_now(**self._state())

    async def _give_up(self) -> None:
        """Let others have all that is held, and stay."""
        self._handing_over = False
        await self._hand_over()
        episodes = self._holdings.cancel_all()
        self._inbox.renew(self._holdings.give_up())
        await asyncio.gather(*episodes, return_exceptions=True)
        for sampler in self._samplers.values():
            sampler.engine.pause()
        _say(f"gives up {len(episodes)} tasks")

    async def _recall(self, task: Task) -> list[Sequence]:
        return await self._partials.recall(task)

    def _patience(self) -> float:
        pending = len(self._holdings) > 0 or self._delivery.unacknowledged > 0
        return min(self._holdings.due(), _PENDING_SECONDS if pending else _IDLE_SECONDS)

    def _read(self, seconds: float) -> None:
        for place, record in self._inbox.read(seconds):
            if isinstance(record, Task):
                episode = asyncio.create_task(self._play(record, place))
                episode.add_done_callback(self._episode_done)
                self._holdings.take(record, episode)
            elif isinstance(record, Cancel):
                self._holdings.cancel(record)
            elif isinstance(record, Suspend | Resume):
                self._suspend(record)
            elif isinstance(record, Stop):
                _say(f"the run stops: {record.reason}")
                self._ended = True
        for raw, error in self._inbox.undecodable:
            self._delivery.dead(raw.value, error, raw)
        self._inbox.undecodable.clear()

    def _suspend(self, record: Suspend | Resume) -> None:
        self._suspended = suspended = isinstance(record, Suspend)
        self._handing_over = isinstance(record, Suspend) and record.hand_over
        self._holdings.suspend(suspended)
        for sampler in self._samplers.values():
            if not suspended:
                sampler.engine.resume()
            elif not self._handing_over:  # what runs is broken off first
                sampler.engine.pause()
        _say("suspended" if suspended else "goes on")

    async def _play(self, task: Task, place: Source) -> None:
        await self._episodes.play(task, place)
        self._holdings.drop(task)

    def _episode_done(self, episode: "asyncio.Task[None]") -> None:
        """An episode that ends without a result is a fault of this worker: it must not hold the task for ever."""
        if not episode.cancelled() and (error := episode.exception()) is not None:
            self._fault = self._fault or error

    def _report(self, tokens: int, seconds: float) -> None:
        counts = ", ".join(f"{name} {n}" for name, n in sorted(self._episodes.counts.items()))
        _say(f"{tokens / seconds:,.0f} tokens/s, {len(self._holdings)} tasks held; so far {counts or 'nothing'}")

    def _leave(self) -> None:
        self._feed.close()
        self._scorer.close()
        unsent = self._delivery.close(2.0)
        if unsent:
            _say(f"{unsent} records were not acknowledged; their tasks are issued again")
        if hasattr(self, "_inbox"):
            self._inbox.close()
        for sampler in self._samplers.values():
            sampler.engine.close()


def _say(text: str) -> None:
    sys.stdout.write(f"rollout: {text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """``python -m headrace.pipeline.task_to_trajectory``: run one rollout worker."""
    parser = argparse.ArgumentParser(prog="headrace.pipeline.task_to_trajectory", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved config.json")
    parser.add_argument("--instance", required=True, help="name of this worker")
    parser.add_argument("--role", choices=get_args(Role), default="any", help="tasks that it asks for (default: any)")
    parser.add_argument("--bootstrap", default=None, help="Kafka address, over the configured one")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    options = parser.parse_args(arguments)
    stop = StopSignal().listen(with_parent=options.exit_with_parent)

    def run() -> None:
        config = read_config(options.config)
        connection = Connection.of(config.kafka, config.run.id, options.bootstrap, role="rollout")
        connection.patient(stop.is_set).wait_for_broker()
        take_schema_ids(connection, config.registry)
        RolloutWorker(config, connection, options.instance, stop, role=options.role).run()

    return exit_with(run)


if __name__ == "__main__":
    sys.exit(main())
