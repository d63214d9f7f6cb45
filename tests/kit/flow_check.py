"""What must be true of the topics that a run in a ``flow_world.World`` leaves, whatever went wrong in it.

``violations(world)`` gives one line per breach; each line starts with the name of the invariant. Everything is read
from the topics; the world is asked only for what no topic can know (who was alive, what the weights are made of).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from flow_world import World

from headrace.schemas.digests import lane_digest
from headrace.schemas.ids import group_partition
from headrace.schemas.records import (
    Admission,
    Batched,
    Closed,
    Group,
    Item,
    Kept,
    Manifest,
    Member,
    Opened,
    Resumed,
    Step,
    Task,
    Trained,
    Trajectory,
)


def violations(world: World, *, once: bool = True) -> list[str]:
    """Every breach of an invariant; ``once``: prompts come once, and nothing skips them."""
    bad = list(world.bad)
    if not world.finished():
        bad.append(f"not finished: {[key for key, t in world.driver.tasks.items() if not t.stage_is_over()]}")
    bad += [f"dead letter: {error!r}" for _, error in world.driver.dead_letters]
    admissions = {r.group: r for r in world.driver.records("admissions") if isinstance(r, Admission)}
    bad += _prompts(world, admissions) if once else []
    bad += _leases(world, admissions)
    bad += _idle(world, admissions)
    bad += _given_up(world, admissions)
    for policy in range(len(world.plan.policies)):
        bad += _ledger(world, policy, admissions)
        bad += _batches(world, policy)
        bad += _steps(world, policy)
        bad += _floor(world, policy)
    return bad


def _prompts(world: World, admissions: dict[int, Admission]) -> list[str]:
    """Every prompt is admitted once, and once more after it failed."""
    bad = []
    if sorted(admissions) != list(range(len(admissions))):
        bad.append("prompts: group ids have gaps")
    first = sorted(a.prompt_id for a in admissions.values() if a.retry == 0)
    if len(first) != len(set(first)):
        bad.append("prompts: admitted twice")
    endless = all(p.max_steps == 0 for p in world.plan.policies)
    if endless and world.finished() and len(first) != world.plan.prompts:
        bad.append(f"prompts: {len(first)} of {world.plan.prompts} admitted")
    failed: Counter[str] = Counter()
    for policy in range(len(world.plan.policies)):
        closed = {r.group for r in _log(world, "ledger", policy) if isinstance(r, Closed) and r.reason == "failed"}
        for group in closed & admissions.keys():
            failed[admissions[group].prompt_id] += 1
    needless = [a for a in admissions.values() if a.retry and (a.retry > world.plan.retries or not failed[a.prompt_id])]
    return bad + [f"prompts: group {a.group} is a retry without need" for a in needless]


def _leases(world: World, admissions: dict[int, Admission]) -> list[str]:
    """Nobody who was alive and heard loses a lease; nothing of a group is given out after it has settled for long."""
    bad = []
    tasks = {(r.kind, r.group, r.replica, r.attempt): r for r in world.driver.records("tasks") if isinstance(r, Task)}
    for (kind, group, replica, attempt), task in tasks.items():
        before = tasks.get((kind, group, replica, attempt - 1))
        if attempt == 0 or before is None:
            continue
        holder = [w for w in world.workers if w.name == before.worker and w.incarnation == before.incarnation]
        healthy = all(w.alive and w.thawed_ms == 0 for w in holder)
        newer = any(w.name == before.worker and w.incarnation > before.incarnation for w in world.workers)
        if healthy and not newer and task.issued_ms < before.deadline_ms and holder:
            bad.append(f"spurious lease loss: {kind} {group}/{replica} attempt {attempt - 1} of {before.worker}")
    return bad


def _idle(world: World, admissions: dict[int, Admission]) -> list[str]:
    """Without faults, a group ends soon after its last replica has reported."""
    if world.plan.scored or world.plan.faults:
        return []
    last: dict[int, dict[int, int]] = defaultdict(dict)
    for record, at in _timed(world, "trajectories"):
        if isinstance(record, Trajectory):
            last[record.group].setdefault(record.replica, at)
    bad = []
    for record, at in _timed(world, "ledger"):
        if isinstance(record, Kept | Closed) and record.group in admissions:
            if isinstance(record, Closed) and record.by != "assemble":
                continue
            ends = last[record.group]
            replicas = admissions[record.group].group_size + admissions[record.group].extra_replicas
            if len(ends) == replicas and at > max(ends.values()) + 15_000:
                bad.append(f"idle: group {record.group} ended {at - max(ends.values())} ms after its last report")
    return bad


def _given_up(world: World, admissions: dict[int, Admission]) -> list[str]:
    """Where workers die and nothing else goes wrong: a group ends soon after nothing of it is rolling any more."""
    if world.plan.faults != ("kill",) or world.plan.max_lost_leases != 1 or world.plan.scored or world.plan.hang:
        return []
    deaths = {(w.name, w.incarnation): w.died_ms for w in world.workers if w.died_ms}
    over: dict[int, dict[int, int]] = defaultdict(dict)
    """By group and replica: when it was reported, or given up with the death of who had it."""
    for record, at in _timed(world, "tasks"):
        if isinstance(record, Task) and record.kind == "train":
            died = deaths.get((record.worker, record.incarnation), 0)
            if at <= died < record.deadline_ms:
                over[record.group].setdefault(record.replica, died + 12_000)
    for record, at in _timed(world, "trajectories"):
        if isinstance(record, Trajectory):
            over[record.group][record.replica] = at
    bad = []
    for record, at in _timed(world, "ledger"):
        if isinstance(record, Kept | Closed) and record.group in admissions:
            ends, admission = over[record.group], admissions[record.group]
            if isinstance(record, Closed) and record.by != "assemble":
                continue
            if len(ends) == admission.group_size + admission.extra_replicas and at > max(ends.values()) + 15_000:
                bad.append(f"given up: group {record.group} ended {at - max(ends.values())} ms after its last replica")
    return bad


def _timed(world: World, topic: str) -> list[tuple[object, int]]:
    count = world.driver.partitions[topic]
    return [(e.record, e.timestamp_ms) for number in range(count) for e in world.driver.log[topic, number]]


def _ledger(world: World, policy: int, admissions: dict[int, Admission]) -> list[str]:
    """Credits: opened as admitted, within the cap, ended exactly once, in an order that makes sense."""
    plan, bad = world.plan.policies[policy], []
    state: dict[int, str] = {}
    batch_of: dict[int, list[int]] = defaultdict(list)
    ended: Counter[int] = Counter()
    rolled = world.stats["rollbacks"] and not world.plan.discard
    surplus = world.plan.zero_variance >= 0 or plan.extra or rolled
    for record, at in [(e.record, e.timestamp_ms) for e in world.driver.log["ledger", policy]]:
        if isinstance(record, Opened):
            if record.group in state:
                bad.append(f"opened twice: {policy} {record.group}")
            state[record.group] = "open"
            live = sum(s in ("open", "kept", "batched") for s in state.values())
            if live > record.cap:
                bad.append(f"over cap: policy {policy} group {record.group}: {live} > {record.cap}")
        elif isinstance(record, Kept) and state.get(record.group) == "open":
            state[record.group] = "kept"
        elif isinstance(record, Closed):
            now = state.get(record.group)
            if now in ("open", "kept") or (now == "batched" and record.reason == "end"):
                state[record.group] = record.reason
                ended[record.group] += 1
            elif now == "batched":
                bad.append(f"closed after batched: {policy} {record.group} {record.reason}")
            if record.reason == "stale" and plan.mode == "wait" and not surplus:
                bad.append(f"wait closed as stale: {policy} {record.group}")
            if record.reason == "failed" and record.group in admissions:
                bad += _failed_rightly(world, admissions[record.group], record, at)
        elif isinstance(record, Batched):
            for group in record.groups:
                if state.get(group) not in ("open", "kept"):
                    bad.append(f"batched a closed group: {policy} {group} {state.get(group)}")
                state[group] = "batched"
                batch_of[record.batch].append(group)
        elif isinstance(record, Trained) and record.first:
            for batch in [b for b in batch_of if b <= record.batch]:
                for group in batch_of.pop(batch):
                    if state[group] == "batched":
                        state[group] = "trained"
                        ended[group] += 1
    if {g for g, a in admissions.items() if policy in [p.policy for p in a.policies]} != set(state):
        bad.append(f"opened: ledger {policy} and admissions differ")
    if world.finished():
        bad += [f"credit: policy {policy} group {g} ended {ended[g]} times, {state[g]}" for g in state if ended[g] != 1]
    return bad


def _failed_rightly(world: World, admission: Admission, closed: Closed, at: int) -> list[str]:
    """A group fails at its deadline only when too little of it is usable, and never before somebody had it in hand."""
    plan, bad = world.plan, []
    place = ("trajectories", group_partition(admission.group, plan.parts))
    in_time = {
        e.record.replica
        for e in world.driver.log[place]
        if isinstance(e.record, Trajectory) and e.record.group == admission.group and e.record.status == "train"
        and e.record.finished_ms < admission.deadline_ms and e.timestamp_ms <= admission.deadline_ms + 2000
    }  # fmt: skip
    late, empty = at >= admission.deadline_ms, "no member has tokens" in closed.detail
    if len(in_time) >= min(2, plan.group_size) and late and not empty and not plan.scored:
        bad.append(f"finished work lost: group {admission.group} failed ({closed.detail}) with {sorted(in_time)}")
    if not any(isinstance(t, Task) and t.group == admission.group and t.kind == "train" for t in _tasks(world)):
        bad.append(f"burned: group {admission.group} failed and no worker ever had it")
    return bad


def _batches(world: World, policy: int) -> list[str]:
    """Batches: staleness, digests and counts, every fresh group once, members as the group says."""
    plan, bad = world.plan.policies[policy], []
    name = world.config.policy_names()[policy]
    bound = world.config.policies[name].staleness_bound()
    rolled = any(isinstance(r, Resumed) for r in _log(world, "steps", policy))
    resumed = [r.version for r in _log(world, "steps", policy) if isinstance(r, Resumed)]
    manifests = [r for r in _log(world, "manifests", policy) if isinstance(r, Manifest)]
    if [m.batch for m in manifests] != list(range(1, len(manifests) + 1)):
        bad.append(f"batches: {policy} are not numbered 1, 2, ..")
    values: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    items: dict[int, list[Item]] = defaultdict(list)
    for lane in range(world.config.run.lanes):
        for entry in world.driver.log[f"batches.{name}", lane]:
            if isinstance(entry.record, Item):
                values[entry.record.batch, lane].append(entry.value)
                items[entry.record.batch].append(entry.record)
    members: dict[int, set[int]] = defaultdict(set)
    closed_groups: Counter[int] = Counter()
    for record in _log(world, "groups", policy):
        if isinstance(record, Member) and record.status == "train":
            members[record.group].add(record.replica)
        elif isinstance(record, Group):
            closed_groups[record.group] += 1
    bad += [f"group twice: {policy} {g}" for g, n in closed_groups.items() if n > 1]
    fresh: Counter[int] = Counter()
    for m in manifests:
        taken: dict[int, set[int]] = defaultdict(set)
        for member in m.members:
            taken[member.group].add(member.replica)
            if member.use == 0:
                fresh[member.group] += member.replica == min(members[member.group])
            staleness = m.start_version - member.oldest_version
            if staleness > bound:
                bad.append(f"staleness: policy {policy} batch {m.batch} group {member.group}: {staleness} > {bound}")
            if plan.depth == 0 and plan.lag == 0 and not rolled and staleness != 0:
                bad.append(f"not synchronous: policy {policy} batch {m.batch} group {member.group}")
            for version in resumed if world.plan.discard else []:
                if m.since_version >= version > member.oldest_version:
                    bad.append(f"discarded and trained: policy {policy} batch {m.batch} group {member.group}")
        for group, replicas in taken.items():
            if replicas != members[group]:
                bad.append(f"members: policy {policy} group {group}: {replicas} of {members[group]} batched")
        for lane in m.lanes:
            if lane.digest != lane_digest(values[m.batch, lane.lane]) or lane.count != len(values[m.batch, lane.lane]):
                bad.append(f"digest: policy {policy} batch {m.batch} lane {lane.lane}")
        if m.tokens != sum(i.length for i in items[m.batch]) or m.trajectories != len(m.members):
            bad.append(f"counts: policy {policy} batch {m.batch}")
    bad += [f"fresh twice: policy {policy} group {g}" for g, n in fresh.items() if n > 1]
    return bad


def _steps(world: World, policy: int) -> list[str]:
    """The final weights are made of every batch once, in order; versions rise."""
    bad, trainer = [], world.trainers[policy]
    versions = [r.version for r in _log(world, "steps", policy) if isinstance(r, Step | Resumed)]
    if any(a >= b for a, b in itertools.pairwise(versions)):
        bad.append(f"versions: steps of {policy} are {versions}")
    if world.finished():
        composed = sum(isinstance(r, Manifest) for r in _log(world, "manifests", policy))
        steps = world.plan.policies[policy].max_steps
        wanted = min(composed, steps) if steps else composed
        if trainer.history != list(range(1, wanted + 1)):
            bad.append(f"final lineage: policy {policy} trained {trainer.history} of {wanted}")
    return bad


def _floor(world: World, policy: int) -> list[str]:
    """What opens after the ledger knows a Resumed may not be sampled with versions before it."""
    bad, floor = [], 0
    resumed = {r.version for r in _log(world, "steps", policy) if isinstance(r, Resumed)}
    for record in _log(world, "ledger", policy):
        if isinstance(record, Trained) and record.version in resumed:
            floor = record.version
        elif isinstance(record, Opened) and record.min_version < floor:
            bad.append(f"floor: policy {policy} group {record.group}: {record.min_version} < {floor}")
    return bad


def _log(world: World, topic: str, partition: int) -> list[object]:
    return list(world.driver.records(topic, partition))


def _tasks(world: World) -> list[object]:
    return list(world.driver.records("tasks"))
