"""A run as people watch it: one line of figures, and what the run waits for when nothing moves.

In: a Tally, the state of the processes, the clock; out: text. The follower reads the small topics while they grow.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, TopicPartition

from headrace.connectors.kafka import Connection, Consumer, RawRecord
from headrace.pipeline.tally import TALLY_TOPICS, PolicyTally, Tally
from headrace.pipeline.workers import is_suspended
from headrace.schemas.config import RunConfig, TrainerConfig
from headrace.schemas.errors import HeadraceError, UndecodableRecord
from headrace.schemas.records import EvalResult, Step

__all__ = ("Figures", "Follower", "figures_of", "line_of", "waits_for")

_MANY_BATCHES = 4
"""Batches of groups in a row without a kept one that are no chance."""
_SILENT_SECONDS = 10.0
"""A worker without Demand for so long is taken for dead (its lease is lost, protocol 5)."""


class Follower:
    """Reads the topics of a Tally as they grow; ``poll`` never waits longer than told."""

    def __init__(self, connection: Connection, on_record: Callable[[Step | EvalResult], None]) -> None:
        self.tally = Tally()
        self.rollouts = 0
        self.dead_letters = 0
        self.last_progress = time.monotonic()
        self._connection = connection
        self._on_record = on_record
        self._consumer: Consumer = connection.consumer("launcher")
        places = [
            TopicPartition(connection.topic(topic), partition, first)
            for topic in (*TALLY_TOPICS, "dead-letters")
            for partition, first in connection.start_offsets(topic).items()
        ]
        self._consumer.assign(places)
        self.rollouts_per_second = 0.0
        self._counted_at = 0.0
        self._answered = time.monotonic()
        self._counting: threading.Thread | None = None

    def poll(self, seconds: float) -> None:
        """Fold what has come, waiting up to ``seconds`` for the first record."""
        message = self._consumer.poll(seconds)
        while message is not None:
            error = message.error()
            if error is None:
                self._take(RawRecord.of(message, self._connection.run))
            elif error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
                raise HeadraceError(f"{message.topic()}[{message.partition()}] was cut while the run was read")
            message = self._consumer.poll(0)

    def count(self, every_seconds: float) -> None:
        """Ask for the number of trajectories, at most every so many seconds; never waits for the answer.

        Without a broker an answer takes many seconds, and the caller is who starts the broker again.
        """
        asking = self._counting is not None and self._counting.is_alive()
        if not asking and time.monotonic() - self._counted_at >= every_seconds:
            self._counting = threading.Thread(target=self._count, name="count", daemon=True)
            self._counting.start()

    @property
    def address(self) -> str:
        """Where the cluster is asked for."""
        return self._connection.bootstrap

    def silence(self) -> float:
        """Seconds since the cluster last answered ``count``."""
        return time.monotonic() - self._answered

    def _count(self) -> None:
        before, since = self.rollouts, time.monotonic() - self._counted_at
        try:
            self.rollouts = sum(self._connection.end_offsets("trajectories", committed=False).values())
        except HeadraceError:
            self.rollouts_per_second = 0.0  # the broker is away; the other figures stay as they were
            return
        now = self._answered = time.monotonic()
        if self._counted_at:
            self.rollouts_per_second += 0.5 * ((self.rollouts - before) / since - self.rollouts_per_second)
        self._counted_at = now
        if self.rollouts != before:
            self.last_progress = now

    def close(self) -> None:
        """End the consumer."""
        self._consumer.close()

    def _take(self, raw: RawRecord) -> None:
        if raw.topic == "dead-letters":
            self.dead_letters += 1
            return
        try:
            record = raw.decoded()
        except UndecodableRecord:
            return  # stages report it; a picture for people goes on without
        self.tally.fold(record, raw.timestamp_ms)
        if raw.topic in ("steps", "evals", "manifests"):
            self.last_progress = time.monotonic()
        if isinstance(record, Step | EvalResult):
            self._on_record(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one line of progress says of one policy; None where nothing is known yet."""

    policy: str
    version: int
    of_versions: int
    reward: float | None
    accuracy: tuple[int, float] | None
    staleness: float | None
    rolling: int
    kept: int
    waiting_batches: int
    drops: Mapping[str, int] = field(default_factory=dict)
    none_kept: str = ""
    """What drops every group, once so many came in a row that it is no chance."""


def figures_of(config: RunConfig, tally: Tally) -> list[Figures]:
    """The figures of every policy, in the order of their index."""
    return [
        _figures(name, tally.policies[index], config.trainer_of(name)) for index, name in enumerate(config.policies)
    ]


def _figures(name: str, policy: PolicyTally, trainer: TrainerConfig) -> Figures:
    # The newest evaluated version is still coming in; it counts once another version has begun or the policy stopped.
    accuracies = policy.accuracies()
    shown = accuracies if policy.stopped or len(accuracies) < 2 else accuracies[:-1]
    recent = list(policy.manifests.values())[-5:]
    stale = [m.start_version - member.oldest_version for m in recent for member in m.members]
    done = max((step.batch for step in policy.steps), default=0)
    return Figures(
        policy=name,
        version=policy.version,
        of_versions=trainer.max_steps,
        reward=policy.recent_reward(),
        accuracy=shown[-1][:2] if shown else None,
        staleness=sum(stale) / len(stale) if stale else None,
        rolling=len(policy.rolling),
        kept=len(policy.kept),
        waiting_batches=sum(batch > done for batch in policy.manifests),
        drops=dict(policy.closed),
        none_kept=_dropped(policy.filtered_since_kept, "groups", at_least=_MANY_BATCHES * trainer.batch_groups),
    )


def _dropped(by: Counter[str], what: str, *, at_least: int = 1) -> str:
    """How many were dropped, and by what most of them; empty for less than ``at_least``."""
    if by.total() < at_least:
        return ""
    ((most, _),) = by.most_common(1)
    return f"all of the last {by.total()} {what} were dropped, most by {most}"


def line_of(figures: Figures, *, seconds: float, rollouts: int, per_second: float, dead_letters: int) -> str:
    """One line for a log or a terminal."""
    of = f"/{figures.of_versions}" if figures.of_versions else ""
    parts = [f"{seconds:5.0f} s", f"{figures.policy} v{figures.version}{of}"]
    if figures.reward is not None:
        parts.append(f"reward {figures.reward:.3f}")
    if figures.accuracy is not None:
        parts.append(f"held-out {figures.accuracy[1]:.3f} (v{figures.accuracy[0]})")
    if figures.staleness is not None:
        parts.append(f"staleness {figures.staleness:.2f}")
    parts.append(f"groups {figures.rolling} rolling, {figures.kept} kept, {figures.waiting_batches} batches wait")
    parts.append(f"{rollouts} rollouts ({per_second:.0f}/s)")
    if figures.drops:
        parts.append("drops " + ", ".join(f"{reason} {n}" for reason, n in sorted(figures.drops.items())))
    if figures.none_kept:
        parts.append(figures.none_kept)
    if dead_letters:
        parts.append(f"{dead_letters} dead letters")
    return "  ".join(parts)


def waits_for(
    config: RunConfig,
    tally: Tally,
    *,
    now_ms: int,
    troubled: Mapping[str, int],
    running: Sequence[str],
    waiting: Mapping[str, str] | None = None,
    broker: str = "",
) -> str:
    """In words, what a run that does not move is waiting for; names the process or topic to look at.

    troubled: deaths of parts. waiting: what parts say themselves that they wait for. broker: what is wrong with the
    cluster, from which the rest follows, unless the part of that name is what dies.
    """
    if broker and "broker" not in troubled:
        return broker
    if waiting:
        return "; ".join(f"{name} says: {words}" for name, words in sorted(waiting.items()))
    if troubled:
        told = ", ".join(f"{name} ({count} deaths)" for name, count in sorted(troubled.items()))
        return f"parts keep dying: {told}; see their logs"
    alive = {n: d for n, d in tally.workers.items() if now_ms - d.sent_ms < _SILENT_SECONDS * 1000}
    if not alive:
        newest = max((d.sent_ms for d in tally.workers.values()), default=0)
        silence = f"no Demand for {(now_ms - newest) / 1000:.0f} s" if newest else "no Demand yet"
        return f"{silence}: no rollout worker is alive"
    if all(is_suspended(demand) for demand in alive.values()):
        return f"suspended: {', '.join(sorted(alive))}; headrace workers resume --all lets them go on"
    reasons = []
    for index, name in enumerate(config.policies):
        policy = tally.policies[index]
        if policy.stopped:
            continue
        done = max((step.batch for step in policy.steps), default=0)
        composed = max(policy.manifests, default=0)
        if composed > done:
            reasons.append(f"batch {composed} of {name} is composed and has no Step: the trainer is busy or stuck")
        elif policy.rolling:
            reasons.append(
                f"{len(policy.rolling)} groups of {name} are open while {len(alive)} workers hold "
                f"{sum(len(d.held) for d in alive.values())} tasks: rollouts or rewards are slow or stuck"
            )
        elif policy.kept:
            reasons.append(f"{len(policy.kept)} kept groups of {name} are not enough for a batch and nothing is open")
        else:
            why = _dropped(policy.skipped_since_opened, "prompts") or "schedule admits no prompts"
            reasons.append(f"nothing of {name} is open: {why} (is the source alive?)")
    return "; ".join(reasons) or f"all policies have stopped; still running: {', '.join(running)}"
