"""``schedule``: prompts, demand, ledger and steps become admissions, credits, tasks and the end of the run.

One task per run. In: Prompt, Demand, the ledger, Step. Out: Admission and Opened with a group's first Task in one
transaction, further Tasks, Cancel, Failed, Trained, End, Stop and the run's end mark. It owns the promise that no more
groups are open than the cap allows, that every credit ends once, and that lost work is given out again (protocol 3, 5,
9). It never reads a trajectory: a result that was reported and excluded is a result, and only lost leases and passed
deadlines lead to another attempt.
"""

from collections.abc import Iterable

from headrace.pipeline.admission import Waiting, WaitingPrompt, openings
from headrace.pipeline.credits import KEPT, ROLLING, Credits, OpenGroup
from headrace.pipeline.dispatch import TaskWriter
from headrace.pipeline.evaluation import EVALUATION_STREAM, Evaluation
from headrace.pipeline.leases import Leases, Loss, Work, Worker
from headrace.pipeline.operators.prompt_operator import Outcome
from headrace.pipeline.prompt_chain import PromptChain, SkippedPrompt
from headrace.pipeline.runtime.stage import Context, Received
from headrace.pipeline.state import read_json, write_json
from headrace.schemas.config import RunConfig
from headrace.schemas.ids import group_partition, inbox_of
from headrace.schemas.parts import AdmittedPolicy, Source
from headrace.schemas.records import (
    Admission,
    Batched,
    Cancel,
    Closed,
    Demand,
    End,
    Failed,
    Kept,
    NeedsScore,
    Opened,
    Prompt,
    Resumed,
    RunEnd,
    Skipped,
    Step,
    Stop,
    Taken,
    Trained,
)

__all__ = ("Schedule",)

SLACK_MS = 2000
"""A lease is given up so long after its deadline: the worker's own report has the right of way."""
_TAKEN_EVERY = 64
"""Prompts of a stream between two Taken records."""


class Schedule:
    """The stage; ``filtered`` are the policies whose groups an operator may drop."""

    def __init__(self, config: RunConfig, filtered: frozenset[int] = frozenset()) -> None:
        self.config = config
        self.credits = Credits(config, filtered)
        self.leases = Leases(config.rollout)
        self.waiting = Waiting()
        self.evaluation = Evaluation(config.eval, len(config.policies))
        self.writer = TaskWriter(config)
        self.chain = PromptChain(config)
        self.first_stream = next(iter(config.streams))
        """The stream whose source publishes the held-out prompts before its own."""
        self.ended_streams: set[str] = set()
        self.stop_reasons: dict[int, str] = {}
        self.over = False

    # ------------------------------------------------------------------------------------------------ the contract

    def open(self, context: Context) -> None:
        """Build the view from the store."""
        store = context.store()
        self.credits.load(store)
        self.waiting.load(store)
        self.evaluation.load(store)
        saved = read_json(store, b"run")
        if saved:
            self.ended_streams, self.over = set(saved["ended"]), saved["over"]
            self.stop_reasons = {int(p): reason for p, reason in saved["stops"].items()}
        for work in self.leases.load(store):
            self.leases.queue(work, self._hosts(work))
        self.chain.open(context)
        for group in self.credits.groups.values():
            if group.is_rolling():
                self._queue_replicas(group)
                self.chain.opened(group.group, group.prompt)

    def process(self, received: Received, context: Context) -> None:
        """Fold one record of any input."""
        record = received.record
        match record:
            case Demand():
                for work in self.leases.demand(record, context.now(), context.store()):
                    self._lost(work, "lease", context)
            case Kept():
                self._learn(record, context)
                self._settled(record.policy, [record.group], KEPT, context)
                self._outcome(record.policy, kept=True)
            case Closed():
                self._closed(record, context)
            case Batched():
                for group in self.credits.batched(record.policy, record.batch, record.groups):
                    self._cancel_if_settled(group, context)
            case Step() | Resumed():
                self._moved(record, context)
            case Prompt():
                self._prompt(record, received, context)
            case End() if received.topic == "prompts":
                self._prompts_end(record, context)
            case Stop() if received.topic == "steps":
                self._policy_stopped(received.partition, record.reason, context)
            case NeedsScore():
                self._needs_score(record, context)
            case _:
                pass
        self._flush(context)

    def on_timer(self, key: str, at_ms: int, context: Context) -> None:
        """Nothing: silence and deadlines are judged in ``act``."""

    def act(self, context: Context) -> None:
        """Give up lost leases, admit and dispatch, end the ledgers and the run."""
        if self.over:
            return
        context.set_paused("prompts", self.waiting.wants_pause(self._absent()))
        if context.caught_up("demand", "ledger", "steps"):
            self._give_up(context)
        if context.caught_up("demand"):
            self._dispatch(context)
        self._end_ledgers(context)
        self._end_run(context)
        self._flush(context)
        self._measure(context)

    def finished(self) -> bool:
        """True once Stop has gone to every reader."""
        return self.over

    # ------------------------------------------------------------------------------------------------ prompts

    def _prompt(self, prompt: Prompt, received: Received, context: Context) -> None:
        if prompt.stream == EVALUATION_STREAM:
            self.evaluation.add(prompt, context.store())
            return
        if prompt.stream == self.first_stream:
            self._heldout_complete(context)
        if prompt.stream not in self.config.streams:
            context.drop(received, "unknown_stream")
            return
        self.waiting.add(prompt, received.offset, context.store())

    def _prompts_end(self, record: End, context: Context) -> None:
        if record.stream in ("", EVALUATION_STREAM, self.first_stream):
            self._heldout_complete(context)
        if record.stream == EVALUATION_STREAM:
            return
        self.ended_streams |= {record.stream} if record.stream else set(self.config.streams)
        self._save_run(context)

    def _heldout_complete(self, context: Context) -> None:
        if self.evaluation.close(context.store()):
            for p in self.credits.policies:
                if not p.stopped:
                    self._evaluate(p.index, p.version, context)

    def _evaluate(self, policy: int, version: int, context: Context) -> None:
        tasks = self.evaluation.issue(policy, version, self.credits.next_group, context.store())
        for work in tasks:
            self.leases.queue(work, self._hosts(work), context.store())

    # ------------------------------------------------------------------------------------------------ ledger, steps

    def _settled(self, policy: int, groups: Iterable[int], state: int, context: Context) -> None:
        for group in groups:
            x = self.credits.settle(group, policy, state)
            if x is not None:
                self._cancel_if_settled(x, context)

    def _outcome(self, policy: int, *, kept: bool) -> None:
        self.credits.policies[policy].outcome(kept)
        self.credits.touch(policy)

    def _closed(self, record: Closed, context: Context) -> None:
        if record.reason == "filtered":
            self._outcome(record.policy, kept=False)
        self._learn(record, context)
        x = self.credits.end(record.group, record.policy)
        if x is None:
            return
        if record.reason == "failed":
            x.failed.append(record.policy)
        self._cancel_if_settled(x, context)

    def _learn(self, record: Kept | Closed, context: Context) -> None:
        """Tell the operators before rollout what a group brought a policy, once for each that has a credit of it."""
        x, policy = self.credits.groups.get(record.group), record.policy
        if x is None or policy not in x.opened or policy in x.learned:
            return
        if isinstance(record, Closed) and record.by != "assemble":
            return
        x.learned.append(policy)
        self.credits.touch_group(x.group)
        outcome = Outcome(
            group=x.group, prompt=x.prompt, rewards=tuple(record.raw_rewards), complete=record.complete
        )  # fmt: skip
        self.chain.outcome(outcome, policy, x.opened, context)

    def _failed_group(self, x: OpenGroup, context: Context) -> None:
        """Admit a prompt once more for the policies that its group failed for, or lose it by name (protocol 3)."""
        again = tuple(p for p in x.failed if not self.credits.policies[p].stopped)
        x.failed = []
        self.credits.touch_group(x.group)
        if again and x.retry < self.config.streams[x.stream].retries:
            self.waiting.add(x.prompt, x.offset, context.store(), retry=x.retry + 1, policies=again)
            context.metrics.count("groups_retried", stream=x.stream)
        else:
            place = Received(topic="prompts", partition=0, offset=x.offset, timestamp_ms=-1, record=x.prompt)
            context.drop(place, "prompt_lost")

    def _cancel_if_settled(self, x: OpenGroup, context: Context) -> None:
        """Once no policy waits for the group's trajectories, stop its tasks and see to the policies it failed for."""
        if not x.is_rolling():
            self.chain.ended(x.group, x.prompt)
            if x.failed:
                self._failed_group(x, context)
            for work in self.leases.cancel(x.group, context.store()):
                cancel = Cancel(
                    kind=work.kind, group=work.group, replica=work.replica, attempt=work.attempt, worker=work.worker,
                    incarnation=work.incarnation, reason="settled",
                )  # fmt: skip
                context.emit("tasks", cancel, partition=self._inbox(work.worker), key=work.worker.encode())

    def _moved(self, record: Step | Resumed, context: Context) -> None:
        policy = record.policy
        resumed = isinstance(record, Resumed)
        first, _ = self.credits.moved(policy, record.version, record.batch, resumed=resumed)
        trained = Trained(policy=policy, batch=record.batch, version=record.version, first=first)
        context.emit("ledger", trained, partition=policy)
        if not resumed:
            self.chain.moved(policy, record.version, context)
        if not resumed and self.evaluation.due(record.version):
            self._evaluate(policy, record.version, context)

    def _policy_stopped(self, policy: int, reason: str, context: Context) -> None:
        p = self.credits.policies[policy]
        if p.stopped:
            return
        p.stopped = True
        self.credits.touch(policy)
        self.stop_reasons[policy] = reason
        self._save_run(context)
        self._evaluate(policy, p.version, context)

    def _needs_score(self, record: NeedsScore, context: Context) -> None:
        x = self.credits.groups.get(record.group)
        if x is None or not x.is_rolling() or ("score", record.group, 0) in self.leases.work:
            return
        members = [[m.topic, m.partition, m.offset] for m in record.members]
        work = Work(kind="score", group=record.group, replica=0, order=record.group, detail={"members": members})
        self.leases.queue(work, self._hosts(work), context.store())

    # ------------------------------------------------------------------------------------------------ leases

    def _give_up(self, context: Context) -> None:
        since = context.outage_end_ms()
        for worker in self.leases.silent(context.now(), since):
            for work in self.leases.leases_of(worker.name):
                self._lost(work, "lease", context)
        if context.now() - since > SLACK_MS:
            for work in self.leases.overdue(context.now() - SLACK_MS):
                self._lost(work, "deadline", context)

    def _lost(self, work: Work, loss: Loss, context: Context) -> None:
        store = context.store()
        context.metrics.count("leases_lost", why=loss)
        if work.kind != "eval":
            x = self.credits.groups.get(work.group)
            if x is None or not x.is_rolling():
                self.leases.remove(work, store)
                return
        if self.leases.retry(work, loss, self._hosts(work), store):
            return
        if work.kind == "eval":
            context.metrics.count("evaluations_lost")
            return
        failed = Failed(
            kind=work.kind, group=work.group, replica=work.replica, attempts=work.attempt + 1, lost_leases=work.lost,
            reason=f"{work.failures} deadlines passed, {work.lost} leases lost; last worker {work.worker}",
        )  # fmt: skip
        context.emit("admissions", failed, partition=self._group_partition(work.group))

    # ------------------------------------------------------------------------------------------------ dispatch

    def _dispatch(self, context: Context) -> None:
        free = [w for w in self.leases.workers.values() if w.free() > 0]
        while free:
            found = self.leases.next_waiting(free, self._bounds)
            if found is not None:
                self._issue(*found, context)
            elif not self._admit(free, context):
                return
            free = [w for w in free if w.free() > 0]

    def _issue(self, work: Work, worker: Worker, context: Context) -> None:
        store = context.store()
        deadline = context.now() + int(self.config.rollout.task_deadline_seconds * 1000)
        self.leases.lease(work, worker, deadline, store)
        group = self.credits.groups.get(work.group) if work.kind != "eval" else None
        if group is not None and work.kind == "train" and work.replica >= group.issued:
            group.issued = work.replica + 1
            self.credits.touch_group(group.group)
        task = self.writer.task(work, worker, group, self.evaluation.prompts, context.now())
        context.emit("tasks", task, partition=self._inbox(worker.name), key=worker.name.encode())

    def _admit(self, free: list[Worker], context: Context) -> bool:
        """Admit or skip one prompt whose first task a free worker can take; false when nothing can be admitted."""
        ready: dict[str, list[tuple[int, int]]] = {}
        for waiting in self.waiting.heads():
            stream = waiting.prompt.stream
            hosts = tuple(self.config.stream_policies(stream))
            if self.leases.best_worker("train", hosts, free) is None:
                continue
            if all(self.credits.policies[p].stopped for p in waiting.policies or hosts):
                self._take(stream, context)
                context.metrics.count("prompts_unused")
                return True
            opened = openings(stream, waiting.policies, self.config, self.credits.policies)
            if opened:
                ready[stream] = opened
        chosen = self.chain.select(list(ready), self._absent(), context.metrics)
        if chosen:
            self._admit_or_skip(self._take(chosen[0], context), ready[chosen[0]], context)
        return bool(chosen)

    def _admit_or_skip(self, waiting: WaitingPrompt, opened: list[tuple[int, int]], context: Context) -> None:
        """A retry was let pass when its prompt came first; any other prompt is asked about now (protocol 3)."""
        skipped = self.chain.decide(waiting.prompt, context) if waiting.retry == 0 else None
        if skipped is None:
            self._open_group(waiting, opened, context)
        else:
            self._write_skipped(waiting, skipped, context)

    def _write_skipped(self, waiting: WaitingPrompt, skipped: SkippedPrompt, context: Context) -> None:
        prompt = waiting.prompt
        record = Skipped(
            policy=skipped.policy, stream=prompt.stream, prompt_id=prompt.prompt_id, epoch=prompt.epoch,
            position=prompt.position, operator=skipped.operator, reason=skipped.reason, detail=skipped.detail,
            sources=[Source(topic="prompts", partition=0, offset=waiting.offset)],
        )  # fmt: skip
        context.emit("ledger", record, partition=skipped.policy)

    def _take(self, stream: str, context: Context) -> WaitingPrompt:
        """Take a stream's first prompt; where there are several streams, tell its source how far that is."""
        waiting = self.waiting.take(stream, context.store())
        position = waiting.prompt.position + 1
        if len(self.config.streams) > 1 and waiting.retry == 0 and position % _TAKEN_EVERY == 0:
            key = f"taken/{stream}".encode()
            context.emit("run", Taken(stream=stream, position=position), partition=0, key=key)
        return waiting

    def _absent(self) -> list[str]:
        """Streams that have not ended and of which no prompt is at hand."""
        return [
            name for name in self.config.streams
            if name not in self.ended_streams and name not in self.waiting.by_stream
        ]  # fmt: skip

    def _open_group(self, waiting: WaitingPrompt, opened: list[tuple[int, int]], context: Context) -> None:
        prompt, policies = waiting.prompt, self.credits.policies
        stream = self.config.streams[prompt.stream]
        bounds = {p: policies[p].min_version() for p in self.config.stream_policies(prompt.stream)}
        group = OpenGroup(
            group=self.credits.next_group, stream=prompt.stream, prompt=prompt, offset=waiting.offset,
            states={p: ROLLING for p, _ in opened}, bounds=bounds, retry=waiting.retry,
            opened=tuple(p for p, _ in opened), replicas=stream.group_size + stream.extra_replicas,
        )  # fmt: skip
        self.credits.open(group, context.store())
        self.chain.opened(group.group, prompt)
        sources = [Source(topic="prompts", partition=0, offset=waiting.offset)]
        admission = Admission(
            group=group.group, prompt_id=prompt.prompt_id, stream=prompt.stream, group_size=stream.group_size,
            extra_replicas=stream.extra_replicas, admitted_ms=context.now(),
            deadline_ms=context.now() + self.config.group_deadline_ms(), watermark=self.credits.watermark(),
            retry=waiting.retry, task_type=prompt.task_type, sources=sources,
            policies=[AdmittedPolicy(policy=p, min_version=bounds[p], cap=cap) for p, cap in opened],
        )  # fmt: skip
        context.emit("admissions", admission, partition=self._group_partition(group.group))
        for policy, cap in opened:
            record = Opened(
                policy=policy, group=group.group, stream=prompt.stream, prompt_id=prompt.prompt_id,
                min_version=bounds[policy], cap=cap, sources=sources,
            )  # fmt: skip
            context.emit("ledger", record, partition=policy)
        wanted = [p for p in bounds if not policies[p].stopped and (not waiting.policies or p in waiting.policies)]
        if len(opened) < len(wanted):
            context.metrics.count("unclaimed", len(wanted) - len(opened), stream=prompt.stream)
        self._queue_replicas(group)

    def _queue_replicas(self, group: OpenGroup) -> None:
        hosts = tuple(group.bounds)
        for replica in range(group.issued, group.replicas):
            if ("train", group.group, replica) not in self.leases.work:
                work = Work(kind="train", group=group.group, replica=replica, order=group.group)
                self.leases.queue(work, hosts)

    # ------------------------------------------------------------------------------------------------ ends

    def _end_ledgers(self, context: Context) -> None:
        """End goes to a policy's ledger once nothing can open there any more (protocol 9)."""
        for p in self.credits.policies:
            if not p.told_end and (p.stopped or self._exhausted(p.index)):
                p.told_end = True
                self.credits.touch(p.index)
                reason = "stopped" if p.stopped else "data"
                context.emit("ledger", End(reason=reason, policy=p.index), partition=p.index)

    def _exhausted(self, policy: int) -> bool:
        if not self.ended_streams.issuperset(self.config.streams) or self.waiting.count:
            return False
        groups = self.credits.groups.values()
        return not any(g.is_rolling() and g.retry < self.config.streams[g.stream].retries for g in groups)

    def _end_run(self, context: Context) -> None:
        policies = self.credits.policies
        if self.credits.groups or self.leases.evaluations or not all(p.stopped for p in policies):
            return
        self.over = True
        self._save_run(context)
        reason = ", ".join(sorted(set(self.stop_reasons.values()))) or "data"
        for partition in range(self.config.run.group_partitions):
            context.emit("admissions", Stop(reason=reason), partition=partition)
        for partition in range(self.config.run.inboxes):
            context.emit("tasks", Stop(reason=reason), partition=partition)
        context.emit("run", RunEnd(reason=reason, ended_ms=context.now()), partition=0, key=b"end")

    # ------------------------------------------------------------------------------------------------ small things

    def _hosts(self, work: Work) -> tuple[int, ...]:
        """Policies that a worker must host to take work."""
        return tuple(self._bounds(work))

    def _bounds(self, work: Work) -> dict[int, int]:
        """Min version per policy of work."""
        if work.kind == "eval":
            return self.writer.evaluation_bounds(work)
        group = self.credits.groups.get(work.group)
        return group.bounds if group is not None and work.kind == "train" else {}

    def _inbox(self, worker: str) -> int:
        return inbox_of(worker, self.config.run.inboxes)

    def _group_partition(self, group: int) -> int:
        return group_partition(group, self.config.run.group_partitions)

    def _save_run(self, context: Context) -> None:
        saved = {"ended": sorted(self.ended_streams), "over": self.over, "stops": self.stop_reasons}
        write_json(context.store(), b"run", saved)

    def _flush(self, context: Context) -> None:
        self.credits.flush(context.store())
        self.leases.flush(context.store())

    def _measure(self, context: Context) -> None:
        for p in self.credits.policies:
            for name, value in (("rolling", p.rolling), ("kept", p.kept), ("untrained", p.untrained)):
                context.metrics.gauge(f"groups_{name}", value, policy=str(p.index))
        context.metrics.gauge("prompts_waiting", self.waiting.count)
        context.metrics.gauge("tasks_leased", sum(len(keys) for keys in self.leases.of_worker.values()))
