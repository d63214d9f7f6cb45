"""``assemble``: trajectories become closed groups; only an Admission opens one (protocol 6).

One task per group partition. In: Trajectory, Score; Admission, Failed, Stop. Out: for every opened policy either the
Members and the Group with Kept, or Closed with a named reason, in one transaction. It owns the promise that a group
ends by its deadline whatever dies, that no finished work is lost to a timer, and that a replica counts once.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.pipeline.judged import judged_members, scores_of
from headrace.pipeline.members import Reported, draft_of, is_usable
from headrace.pipeline.operator_chain import Dropped, OperatorChain
from headrace.pipeline.operators.operator import GroupDraft
from headrace.pipeline.runtime.stage import Context, Received
from headrace.pipeline.state import (
    key_of,
    numbers_of,
    pack,
    pack_received,
    read_json,
    scan_json,
    unpack,
    unpack_received,
    write_json,
)
from headrace.schemas.checks import describe
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import InvalidRecord
from headrace.schemas.records import (
    Admission,
    Closed,
    Failed,
    Kept,
    NeedsScore,
    Score,
    Stop,
    Trajectory,
)

__all__ = ("Assemble",)

SLACK_MS = 2000
"""A group's timer waits so long after its deadline for what was finished before it (protocol 6)."""


@dataclass(slots=True, kw_only=True)
class _Open:
    """An open group: what its replicas reported, by replica in order of arrival; None for a Failed replica."""

    admission: Admission
    reported: dict[int, Reported | None] = field(default_factory=dict)
    asked: bool = False
    score: Score | None = None
    score_failed: bool = False

    def usable(self) -> dict[int, Reported]:
        """Usable replicas in order of arrival."""
        return {r: x for r, x in self.reported.items() if x is not None and is_usable(x[0])}

    def all_reported(self) -> bool:
        """Whether every replica has a result or has failed."""
        return len(self.reported) >= self.admission.group_size + self.admission.extra_replicas


class Assemble:
    """The stage of one group partition; ``scored`` are the streams whose reward is of group scope."""

    def __init__(self, config: RunConfig, partition: int, scored: frozenset[str] = frozenset()) -> None:
        self.config = config
        self.partition = partition
        self.scored = scored
        self.policies = config.policy_names()
        self.chain = OperatorChain(config)
        self.groups: dict[int, _Open] = {}
        self.closed: set[int] = set()
        self.closed_order: list[int] = []
        self.watermark = -1
        self.parked: dict[int, tuple[Received, Trajectory | Score]] = {}
        self.over = False

    # ------------------------------------------------------------------------------------------------ the contract

    def open(self, context: Context) -> None:
        """Build the view from the store."""
        store = context.store()
        saved = read_json(store, b"run")
        if saved:
            self.watermark, self.over = saved
        for key, value in store.scan(b"group/"):
            _, admission = unpack(value)
            assert isinstance(admission, Admission)
            flags = read_json(store, key_of("flags", *numbers_of(key))) or (False, False)
            self.groups[admission.group] = _Open(admission=admission, asked=flags[0], score_failed=flags[1])
        members = []
        for key, value in store.scan(b"member/"):
            members.append((numbers_of(key), unpack_received(value)))
        for (group, replica), received in sorted(members, key=lambda m: m[1].offset):
            record = received.record
            if group in self.groups and isinstance(record, Trajectory):
                self.groups[group].reported[replica] = (record, received.source)
            elif group in self.groups and isinstance(record, Failed):
                self.groups[group].reported[replica] = None
            elif group in self.groups and isinstance(record, Score):
                self.groups[group].score = record
        for key, _ in scan_json(store, "closed"):
            self._remember_closed(numbers_of(key)[0])
        for _, value in store.scan(b"parked/"):
            received = unpack_received(value)
            assert isinstance(received.record, Trajectory | Score)
            self.parked[received.offset] = (received, received.record)
        self.chain.open(context)

    def close(self) -> None:
        """Close the operators."""
        self.chain.close()

    def process(self, received: Received, context: Context) -> None:
        """Fold one record."""
        record = received.record
        match record:
            case Admission():
                self._admitted(record, context)
            case Failed():
                self._failed(record, received, context)
            case Trajectory() | Score():
                self._result(record, received, context)
            case Stop():
                self.over = True
                self._save(context)
            case _:
                pass

    def on_timer(self, key: str, at_ms: int, context: Context) -> None:
        """Everything that was in the topics when the timer became due has been read."""
        kind, _, rest = key.partition("/")
        if kind == "operator":
            self.chain.on_timer(key, context)
        elif kind == "parked":
            found = self.parked.get(int(rest))
            if found is not None:
                self._unpark(found[0], context)
                context.drop(found[0], "not_open")
        elif kind == "reported" and int(rest) in self.groups:
            x = self.groups[int(rest)]
            if x.all_reported():
                self._close_if_done(x, context, final=True)
        elif kind == "deadline" and int(rest) in self.groups:
            x = self.groups[int(rest)]
            due = max(x.admission.deadline_ms, context.outage_end_ms()) + SLACK_MS
            if context.now() < due:
                context.schedule(key, due)
            else:
                self._close_if_done(x, context, final=True, late=True)

    def act(self, context: Context) -> None:
        """Measure; every decision is made where its record or timer is handled."""
        context.metrics.gauge("groups_open", len(self.groups))
        context.metrics.gauge("trajectories_parked", len(self.parked))

    def finished(self) -> bool:
        """True once Stop has been read."""
        return self.over

    # ------------------------------------------------------------------------------------------------ folding

    def _admitted(self, record: Admission, context: Context) -> None:
        self._refuse_foreign(record)
        store = context.store()
        if record.watermark > self.watermark:
            self.watermark = record.watermark
            self._save(context)
            while self.closed_order and self.closed_order[0] <= self.watermark:
                group = heapq.heappop(self.closed_order)
                self.closed.discard(group)
                store.delete(key_of("closed", group))
        if record.group in self.groups or record.group in self.closed:
            return
        self.groups[record.group] = _Open(admission=record)
        store.put(key_of("group", record.group), pack(None, record))
        context.schedule(f"deadline/{record.group}", record.deadline_ms + SLACK_MS)
        for received, parked in list(self.parked.values()):
            if parked.group == record.group:
                self._unpark(received, context)
                self._result(parked, received, context)

    def _refuse_foreign(self, record: Admission) -> None:
        """What cannot close would end the worker at its deadline, again and again. Raises InvalidRecord."""
        stream = self.config.streams.get(record.stream)
        hosts = self.config.stream_policies(record.stream) if stream is not None else ()
        if not record.policies or any(p.policy not in hosts for p in record.policies) or record.group_size < 1:
            raise InvalidRecord(
                f"{describe(record)}: {record.group_size} members of stream {record.stream!r} for policies "
                f"{[p.policy for p in record.policies]}, which this run does not have"
            )

    def _failed(self, record: Failed, received: Received, context: Context) -> None:
        x = self.groups.get(record.group)
        if x is None:
            return
        if record.kind == "score":
            x.score_failed = True
            write_json(context.store(), key_of("flags", record.group), (x.asked, True))
        elif record.replica not in x.reported:
            x.reported[record.replica] = None
            self._save_member(x, record.replica, received, context)
        self._close_if_done(x, context)

    def _result(self, record: Trajectory | Score, received: Received, context: Context) -> None:
        x = self.groups.get(record.group)
        if x is None:
            if record.group in self.closed or record.group <= self.watermark:
                context.drop(received, "late")
            else:
                self._park(record, received, context)
            return
        if isinstance(record, Score):
            if x.score is None:
                x.score = record
                x.score_failed = x.score_failed or bool(record.error)
                for name, amount in record.metrics.items():
                    context.metrics.count(name, amount, stream=x.admission.stream)
                self._save_member(x, x.admission.group_size + x.admission.extra_replicas, received, context)
        else:
            known = x.reported.get(record.replica)
            if known is not None and (is_usable(known[0]) or not is_usable(record)):
                context.drop(received, "duplicate")
                return
            x.reported.pop(record.replica, None)
            x.reported[record.replica] = (record, received.source)
            self._save_member(x, record.replica, received, context)
        self._close_if_done(x, context)

    def _park(self, record: Trajectory | Score, received: Received, context: Context) -> None:
        """Keep a result of an unknown group until ``admissions`` has been read to its present end (protocol 6)."""
        self.parked[received.offset] = (received, record)
        context.store().put(key_of("parked", received.offset), pack_received(received))
        context.schedule(f"parked/{received.offset}", context.now())

    def _unpark(self, received: Received, context: Context) -> None:
        del self.parked[received.offset]
        context.store().delete(key_of("parked", received.offset))
        context.unschedule(f"parked/{received.offset}")

    # ------------------------------------------------------------------------------------------------ closing

    def _close_if_done(self, x: _Open, context: Context, *, final: bool = False, late: bool = False) -> None:
        """Close a group that is complete, or (``final``: the inputs were read to their end) one that cannot grow.

        Short and failed groups wait for the timer ``reported``, because a Failed may overtake a Trajectory.
        """
        admission = x.admission
        if not final and len(x.reported) < admission.group_size:
            return
        usable = x.usable()
        full = len(usable) >= admission.group_size
        if not full and not final:
            if x.all_reported():
                context.schedule(f"reported/{admission.group}", context.now())
            return
        stream = self.config.streams[admission.stream]
        good = len(usable) >= min(stream.min_members, admission.group_size)
        if good and admission.stream in self.scored:
            if x.score is None and not x.score_failed and not late:
                self._ask_score(x, usable, context)
                return
            good = x.score is not None and not x.score_failed
        self._close(x, usable, good, "deadline" if late else "attempts", context)

    def _ask_score(self, x: _Open, usable: Mapping[int, Reported], context: Context) -> None:
        if x.asked:
            return
        x.asked = True
        group, policy = x.admission.group, x.admission.policies[0].policy
        write_json(context.store(), key_of("flags", group), (True, x.score_failed))
        members = [usable[r][1] for r in sorted(list(usable)[: x.admission.group_size])]
        context.emit("ledger", NeedsScore(policy=policy, group=group, members=members), partition=policy)

    def _close(self, x: _Open, usable: dict[int, Reported], good: bool, why: str, context: Context) -> None:
        admission = x.admission
        surplus = set(list(usable)[admission.group_size :])
        reported = {r: v for r, v in x.reported.items() if v is not None and r not in surplus}
        scores = scores_of(x.score)
        if admission.stream in self.scored:
            reported = judged_members(reported, x.score)
            least = min(self.config.streams[admission.stream].min_members, admission.group_size)
            good = good and sum(is_usable(trajectory) for trajectory, _ in reported.values()) >= least
        for opened in admission.policies:
            name = self.policies[opened.policy]
            draft = draft_of(opened.policy, name, admission, reported, scores, context.now())
            if not good or not draft.trained():
                self._emit_failed(draft, len(usable), admission, why, context)
                continue
            result = self.chain.run(draft, context)
            if isinstance(result, Dropped):
                reason = "failed" if result.broken else "filtered"
                self._emit_closed(draft, reason, result.operator, result.detail, context)
            else:
                self._emit_kept(result, draft, context)
        self._forget(x, context)

    def _emit_kept(self, draft: GroupDraft, earned: GroupDraft, context: Context) -> None:
        """Write a group; ``earned`` is what it was before operators chose among its members: that is to be learned."""
        group = draft.group
        key = str(group.group).encode()
        for member in draft.members:
            context.emit("groups", member, partition=group.policy, key=key)
        context.emit("groups", group, partition=group.policy, key=key)
        kept = Kept(
            policy=group.policy, group=group.group, reward_mean=group.reward_mean, reward_std=group.reward_std,
            raw_mean=earned.group.raw_mean, complete=not earned.group.short, raw_rewards=_raw_rewards(earned),
        )  # fmt: skip
        context.emit("ledger", kept, partition=group.policy)
        context.metrics.count("groups_kept", policy=str(group.policy), short=str(group.short).lower())

    def _emit_failed(self, draft: GroupDraft, usable: int, admission: Admission, why: str, context: Context) -> None:
        errors = sorted({m.error for m in draft.members if m.error})
        detail = f"{why}: {usable} of {admission.group_size} usable"
        if errors:
            detail += f"; {'; '.join(errors)[:500]}"
        if usable and not draft.trained():
            detail += "; no member has tokens to train"
        self._emit_closed(draft, "failed", "", detail, context)

    def _emit_closed(self, draft: GroupDraft, reason: str, operator: str, detail: str, context: Context) -> None:
        group = draft.group
        closed = Closed(
            policy=group.policy, group=group.group, reason=reason, by="assemble", operator=operator, detail=detail,
            prompt_id=group.prompt_id, raw_mean=group.raw_mean, raw_std=group.raw_std, complete=not group.short,
            raw_rewards=_raw_rewards(draft),
        )  # fmt: skip
        context.emit("ledger", closed, partition=group.policy)
        context.metrics.count("groups_closed", policy=str(group.policy), reason=reason, operator=operator)

    # ------------------------------------------------------------------------------------------------ state

    def _forget(self, x: _Open, context: Context) -> None:
        group, store = x.admission.group, context.store()
        del self.groups[group]
        store.delete(key_of("group", group))
        store.delete(key_of("flags", group))
        for replica in x.reported:
            store.delete(key_of("member", group, replica))
        if x.score is not None:
            store.delete(key_of("member", group, x.admission.group_size + x.admission.extra_replicas))
        context.unschedule(f"deadline/{group}")
        context.unschedule(f"reported/{group}")
        self._remember_closed(group)
        write_json(store, key_of("closed", group), 1)

    def _remember_closed(self, group: int) -> None:
        self.closed.add(group)
        heapq.heappush(self.closed_order, group)

    def _save_member(self, x: _Open, slot: int, received: Received, context: Context) -> None:
        context.store().put(key_of("member", x.admission.group, slot), pack_received(received))

    def _save(self, context: Context) -> None:
        write_json(context.store(), b"run", (self.watermark, self.over))


def _raw_rewards(draft: GroupDraft) -> list[float]:
    """Raw rewards of counted members, by replica."""
    return [m.raw_reward for m in draft.counted()]
