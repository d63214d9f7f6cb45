"""``batch``: kept groups become batches of bounded staleness (protocol 4, 9).

One task per policy. In: Member, Group; the policy's ledger; its steps. Out: for every batch the Items by lane, its
Manifest and Batched; Closed for what ends untrained; End when nothing can follow. It owns the bound: a trained token is
never older than A versions at the start of its batch, and under ``wait`` nothing but surplus is lost to it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from headrace.pipeline.credits import fresh_groups
from headrace.pipeline.kept_groups import KeptGroups
from headrace.pipeline.lanes import BatchGroup, lay_out
from headrace.pipeline.operators.serving import Candidate, Moment
from headrace.pipeline.runtime.stage import Context, Received
from headrace.pipeline.serving import Serving
from headrace.pipeline.staleness import chosen, fits, stale
from headrace.pipeline.state import key_of, numbers_of, read_json, scan_json, write_json
from headrace.schemas.config import RunConfig
from headrace.schemas.records import (
    Batched,
    Closed,
    End,
    Group,
    Manifest,
    Member,
    Opened,
    Resumed,
    Step,
    Stop,
    Trained,
)

__all__ = ("Batch",)


@dataclass(slots=True)
class _Progress:
    """Where the policy is: batches composed and trained, versions, and what has ended."""

    composed: int = 0
    trained: int = 0
    """Batch of the newest Step or Resumed."""
    shift: int = 0
    """Version less batch of the newest Step or Resumed."""
    since: int = 0
    """Version of the last Resumed."""
    ledger_version: int = 0
    """Version of the newest Trained: what ``schedule`` knew when it opened what follows."""
    purge_until: int = 0
    """Opened groups are evicted until the ledger has reached this version (a discarding Resumed)."""
    replayed: int = 0
    samples: int = 0
    """Trained members of composed batches, replayed ones too."""
    data_ended: bool = False
    stopped: bool = False
    sent_end: bool = False


class Batch:
    """The stage of one policy."""

    def __init__(self, config: RunConfig, partition: int) -> None:
        self.policy = partition
        self.name = config.policy_names()[partition]
        self.settings = config.policies[self.name]
        trainer = config.trainer_of(self.name)
        self.size = trainer.batch_groups
        self.drop_last = trainer.last_batch == "drop"
        self.max_samples = trainer.max_samples
        self.fresh = fresh_groups(self.size, self.settings.replay)
        share = Fraction(repr(self.settings.replay))
        self.replayed_a_batch = self.fresh * share / (1 - share)
        """Replayed groups that a batch is due on average; exact."""
        self.serving = Serving(config, partition)
        self.seed = config.run.seed
        self.lanes = config.run.lanes
        self.bound = self.settings.staleness_bound()
        self.ahead = self.settings.batches_ahead()
        self.at = _Progress(stopped=self.settings.frozen)
        self.held = KeptGroups()
        self.untrained: dict[int, list[int]] = {}
        """Fresh groups of composed batches without a Step."""
        self._judged: tuple[tuple[int, int], set[int]] = ((0, 0), set())
        """Batch and start version that kept groups were last judged for, and those that may be served then."""
        self._changed = True

    # ------------------------------------------------------------------------------------------------ the contract

    def open(self, context: Context) -> None:
        """Build the view from the store."""
        store = context.store()
        saved = read_json(store, b"progress")
        if saved:
            self.at = _Progress(**saved)
        self.held.load(store)
        for key, groups in scan_json(store, "batch"):
            self.untrained[numbers_of(key)[0]] = groups
        self._changed = True

    def process(self, received: Received, context: Context) -> None:
        """Fold one record."""
        record = received.record
        store = context.store()
        self._changed = True
        match record:
            case Member() if self.held.expects(record.group):
                self.held.add_member(record, store)
            case Group() if self.held.expects(record.group):
                self.held.add_group(record, store)
            case Member() | Group():
                context.drop(received, "closed")
            case Opened():
                if self.held.opened(record.group, record.min_version, store) and self.at.purge_until:
                    self._close([record.group], "evicted", context)
            case Closed() if record.by == "assemble" and record.group in self.held.open:
                self.held.discard(record.group, store)
            case Trained():
                self._ledger_reached(record.version, context)
            case End() if received.topic == "ledger":
                self.at.data_ended = True
                self._save(context)
            case Stop() if received.topic == "steps":
                self.at.stopped = True
                self._save(context)
            case Step() | Resumed():
                self._moved(record, context)
            case _:
                pass

    def on_timer(self, key: str, at_ms: int, context: Context) -> None:
        """Nothing: there are no timers."""

    def act(self, context: Context) -> None:
        """Compose what can be composed; end what a stop ends."""
        if not self._changed:
            return
        self._changed = False
        if self.at.stopped:
            self._close_everything(context)
        while not self.at.stopped and not self.at.sent_end and self._compose(context):
            pass
        nothing_left = not self.held.open and not self.held.kept and not self.held.early
        why = "samples" if self._enough() else "data" if self.at.data_ended and nothing_left else ""
        if why and not self.at.sent_end and not self.at.stopped:
            self.at.sent_end = True
            self._save(context)
            end = End(reason=why, count=self.at.composed, policy=self.policy)
            context.emit("manifests", end, partition=self.policy)
        context.metrics.gauge("batch_open", len(self.held.open), policy=self.name)
        context.metrics.gauge("batch_kept", len(self.held.kept), policy=self.name)
        context.metrics.gauge("batch_pool", len(self.held.pool), policy=self.name)

    def finished(self) -> bool:
        """True once the policy has stopped and its ledger has ended."""
        return self.at.stopped and self.at.data_ended

    # ------------------------------------------------------------------------------------------------ folding

    def _moved(self, record: Step | Resumed, context: Context) -> None:
        store, at = context.store(), self.at
        at.trained, at.shift = record.batch, record.version - record.batch
        for batch in [k for k in self.untrained if k <= record.batch]:
            del self.untrained[batch]
            store.delete(key_of("batch", batch))
        if isinstance(record, Resumed):
            at.since = record.version
            if record.discard:
                self._close([*self.held.open, *self.held.kept], "evicted", context)
                self.held.clear_pool(store)
                at.purge_until = record.version if at.ledger_version < record.version else 0
        self._save(context)

    def _ledger_reached(self, version: int, context: Context) -> None:
        self.at.ledger_version = version
        if version >= self.at.purge_until:
            self.at.purge_until = 0
        self._save(context)

    def _close_everything(self, context: Context) -> None:
        composed = [g for groups in self.untrained.values() for g in groups]
        self._close([*self.held.open, *self.held.kept, *composed], "end", context)
        for batch in self.untrained:
            context.store().delete(key_of("batch", batch))
        self.untrained.clear()

    # ------------------------------------------------------------------------------------------------ composing

    def _compose(self, context: Context) -> bool:
        """Compose the next batch, or drop the last short one; false when it has to wait."""
        at, held = self.at, self.held
        batch = at.composed + 1
        if batch > at.trained + 1 + self.ahead or self._enough():
            return False
        start = batch - 1 + at.shift
        moment = Moment(seed=self.seed, policy=self.name, batch=batch, start_version=start, bound=self.bound)
        self._refuse(moment, context)
        flush = at.data_ended and not held.open and not held.early
        take = self._fresh(moment, flush=flush)
        if not take:
            return False
        if len(take) < self.fresh and self.drop_last:
            self._close(take, "end", context)
            return True
        again = self._replayed(moment)
        store = context.store()
        groups = held.take(take, store, pooled=self.settings.replay > 0)
        groups += held.replay(again, store)
        held.trim_pool(self.serving.capacity(self.size, moment), start - self.bound, store)
        at.composed, at.replayed = batch, at.replayed + len(again)
        at.samples += sum(taken.group.trained for taken in groups)
        self.untrained[batch] = take
        write_json(store, key_of("batch", batch), take)
        self._save(context)
        self._emit(moment, groups, len(take), context)
        last_chance = sorted(g for g, version in held.open.items() if version <= start - self.bound)
        unfinished = f"unfinished: its last chance was batch {batch}"
        self._close(last_chance, "stale", context, dict.fromkeys(last_chance, unfinished))
        return True

    def _enough(self) -> bool:
        """Whether composed batches hold the samples that end the policy (protocol 9)."""
        return 0 < self.max_samples <= self.at.samples

    def _refuse(self, moment: Moment, context: Context) -> None:
        """Close what is beyond the bound or refused by the rule in force."""
        beyond = set(stale(self.held.kept, moment.start_version, self.bound))
        told: dict[int, str] = {}
        if self._judged[0] != (moment.batch, moment.start_version):
            self._judged = ((moment.batch, moment.start_version), set())
        passed = self._judged[1]
        for number in sorted(self.held.kept.keys() - passed):
            refusal = self.serving.refusal(self.held.candidate(number), moment)
            if refusal or number in beyond:
                told[number] = refusal or f"too_old: beyond the bound of {self.bound} at {moment.start_version}"
        passed |= self.held.kept.keys() - told.keys()
        self._close(list(told), "stale", context, told)

    def _fresh(self, moment: Moment, *, flush: bool) -> list[int]:
        """Fresh groups for a batch; none when it has to wait. ``flush``: fewer may do, since no more will come."""
        held = self.held
        if not held.kept or (len(held.kept) < self.fresh and not flush):
            return []
        ranked = self.serving.ranked(held.candidates(), moment)
        if self.settings.mode == "drop":
            return ranked[: self.fresh]
        open_bounds, start = list(held.open.values()), moment.start_version
        take = chosen(ranked, held.kept, open_bounds, self.fresh, start, self.bound)
        return take if fits(take, held.kept, open_bounds, self.fresh, start, self.bound) else []

    def _replayed(self, moment: Moment) -> list[int]:
        """Groups of the pool for a batch: as many as the replay share owes, none beyond the bound or refused.

        What the pool lacked before is made up by one group a batch.
        """
        owed = math.floor(moment.batch * self.replayed_a_batch) - self.at.replayed
        count = min(owed, math.ceil(self.replayed_a_batch) + 1)
        if count <= 0:
            return []
        oldest = moment.start_version - self.bound
        pool = [
            x for x in self.held.pooled()
            if x.group.oldest_version >= oldest and not self.serving.refusal(x, moment)
        ]  # fmt: skip
        return self.serving.replayed(pool, count, moment)

    def _emit(self, moment: Moment, groups: list[BatchGroup], fresh: int, context: Context) -> None:
        batch, start = moment.batch, moment.start_version
        lanes = self.serving.lanes([Candidate(group=g.group, uses=g.use) for g in groups], self.lanes, moment)
        laid = lay_out(self.policy, batch, groups, lanes, self.lanes)
        for encoded in laid.items:
            context.emit(
                f"batches.{self.name}", encoded.item, partition=encoded.item.lane, value=encoded.value,
                key=f"{batch}/{encoded.item.group}/{encoded.item.replica}".encode(),
            )  # fmt: skip
        manifest = Manifest(
            policy=self.policy, batch=batch, start_version=start, since_version=self.at.since, fresh_groups=fresh,
            replayed_groups=len(groups) - fresh, tokens=laid.tokens, sequences=laid.sequences,
            trajectories=len(laid.items), groups=len(groups), composed_ms=context.now(), lanes=list(laid.lanes),
            members=list(laid.members),
        )  # fmt: skip
        context.emit("manifests", manifest, partition=self.policy, key=str(batch).encode())
        numbers = [g.group.group for g in groups[:fresh]]
        context.emit("ledger", Batched(policy=self.policy, batch=batch, groups=numbers), partition=self.policy)
        self._measure(start, laid.tokens, groups, context)

    # ------------------------------------------------------------------------------------------------ small things

    def _close(
        self, groups: Iterable[int], reason: str, context: Context, details: Mapping[int, str] | None = None
    ) -> None:
        for number in groups:
            group = self.held.discard(number, context.store())
            state = "kept" if group is not None else "open"
            if group is not None and reason == "stale":
                context.metrics.count("stale_tokens", group.tokens, policy=self.name)
                context.metrics.count("stale_reward", group.raw_mean, policy=self.name)
            context.metrics.count("groups_ended", policy=self.name, reason=reason, state=state)
            closed = self._closed(number, group, reason, (details or {}).get(number, ""))
            context.emit("ledger", closed, partition=self.policy)

    def _closed(self, number: int, group: Group | None, reason: str, detail: str) -> Closed:
        """The end of a credit; of a group that had closed with what it had earned, so that the bias can be told."""
        operator = self.serving.name("staleness") if reason == "stale" else ""
        known: dict[str, Any] = {}
        if group is not None:
            known = {
                "prompt_id": group.prompt_id, "raw_mean": group.raw_mean, "raw_std": group.raw_std,
                "tokens": group.tokens, "complete": not group.short,
            }  # fmt: skip
        return Closed(
            policy=self.policy, group=number, reason=reason, by="batch", operator=operator, detail=detail, **known
        )  # fmt: skip

    def _measure(self, start: int, tokens: int, groups: list[BatchGroup], context: Context) -> None:
        """Figures of a batch; with the ``stale_*`` counters they show the bias of dropping (protocol 4)."""
        metrics = context.metrics
        metrics.count("trained_groups", len(groups), policy=self.name)
        metrics.count("replayed_groups", sum(g.use > 0 for g in groups), policy=self.name)
        metrics.count("trained_tokens", tokens, policy=self.name)
        metrics.count("trained_reward", sum(g.group.raw_mean for g in groups), policy=self.name)
        metrics.gauge("staleness_max", max(start - g.group.oldest_version for g in groups), policy=self.name)

    def _save(self, context: Context) -> None:
        write_json(context.store(), b"progress", asdict(self.at))
