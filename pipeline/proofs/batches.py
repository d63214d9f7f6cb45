"""Proofs over manifests, lanes, steps and checkpoints: what was trained, how often, how old, and from where.

In: Facts; out: a Proof for each property of protocol 4 and 8. "Trained" means within the final lineage: the chain of
steps that leads to the last one, where a rollback cuts what it went back behind.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.pipeline.proofs.facts import Facts, LaneFact, Proof
from headrace.pipeline.proofs.ledger import Account
from headrace.schemas.records import Manifest, Resumed, Rollback, Step

__all__ = (
    "Lineage",
    "checkpoints_belong",
    "final_lineage",
    "lanes_match",
    "none_lost",
    "replays_matched",
    "stale_within_bound",
    "trained_once",
    "versions_grow",
)


@dataclass(slots=True)
class Lineage:
    """The final lineage of a policy: its steps by batch, and what was wrong on the way."""

    number: int = 0
    steps: dict[int, Step | Resumed] = field(default_factory=dict)
    """By batch; a Resumed stands for the Step of its batch where a trainer died before it could write that."""
    breaches: list[str] = field(default_factory=list)
    dropped: int = 0
    """Steps that a rollback left behind."""


def final_lineage(steps: Sequence[object]) -> Lineage:
    """Follow a policy's ``steps`` in order."""
    line = Lineage()
    for record in steps:
        if isinstance(record, Rollback):
            gone = [batch for batch in line.steps if batch > record.base_batch]
            for batch in gone:
                del line.steps[batch]
            line.dropped += len(gone)
            line.number = record.lineage
        elif isinstance(record, Resumed) and record.batch <= max(line.steps, default=0):
            continue
        elif isinstance(record, Step | Resumed):
            if record.lineage != line.number:
                line.breaches.append(f"version {record.version} is of lineage {record.lineage}, not {line.number}")
            if record.batch in line.steps:
                first = line.steps[record.batch].version
                line.breaches.append(f"batch {record.batch} has a step twice: versions {first} and {record.version}")
                continue
            after = max(line.steps, default=0)
            if record.batch != after + 1:
                line.breaches.append(f"batch {record.batch} is trained after batch {after}")
            line.steps[record.batch] = record
    return line


def trained_once(facts: Facts, lines: Sequence[Lineage]) -> Proof:
    """Every batch of the final lineage has one step and one manifest; every fresh item is in exactly one of them."""
    breaches: list[str] = []
    count = 0
    for policy, line in enumerate(lines):
        name = facts.policies[policy]
        breaches += [f"{name}: {text}" for text in line.breaches]
        manifests = _by_batch(facts.manifests[policy])
        breaches += [f"{name}: batch {batch} has {len(m)} manifests" for batch, m in manifests.items() if len(m) > 1]
        fresh: Counter[tuple[int, int]] = Counter()
        for batch in line.steps:
            if batch not in manifests:
                breaches.append(f"{name}: batch {batch} was trained and has no manifest")
                continue
            members = [m for m in manifests[batch][0].members if m.use == 0]
            fresh.update((m.group, m.replica) for m in members)
            groups = len({m.group for m in members})
            if groups != manifests[batch][0].fresh_groups:
                breaches.append(
                    f"{name}: batch {batch} has {groups} fresh groups, not {manifests[batch][0].fresh_groups}"
                )
        breaches += [
            f"{name}: group {g} replica {r} was trained fresh {n} times" for (g, r), n in fresh.items() if n > 1
        ]
        count += len(fresh)
    note = f"{sum(len(line.steps) for line in lines)} batches"
    dropped = sum(line.dropped for line in lines)
    note += f"; {dropped} steps lie before a rollback" if dropped else ""
    return Proof(
        name="every fresh item was trained once in the final lineage", count=count, unit="items",
        breaches=tuple(breaches), note=note,
    )  # fmt: skip


def replays_matched(facts: Facts) -> Proof:
    """The uses of a member count 0, 1, 2, ... over the batches: each replayed use has one Manifest entry."""
    breaches: list[str] = []
    count = 0
    for policy, name in enumerate(facts.policies):
        uses: dict[tuple[int, int], int] = defaultdict(int)
        for batch, manifests in sorted(_by_batch(facts.manifests[policy]).items()):
            for member in manifests[0].members:
                key = (member.group, member.replica)
                if member.use != uses[key]:
                    breaches.append(
                        f"{name}: batch {batch}: group {member.group} replica {member.replica} is use {member.use} "
                        f"where use {uses[key]} follows"
                    )
                uses[key] += 1
                count += member.use > 0
    return Proof(
        name="every replayed use has one manifest entry", count=count, unit="replayed items", breaches=tuple(breaches)
    )


def none_lost(facts: Facts, accounts: Sequence[Account], lines: Sequence[Lineage]) -> Proof:
    """What the ledger calls batched is what manifests hold; in a finished run every batch was trained or closed."""
    breaches: list[str] = []
    count = 0
    for policy, name in enumerate(facts.policies):
        c, steps = accounts[policy], lines[policy].steps
        held: dict[int, set[int]] = defaultdict(set)
        for group, batch in c.batches.items():
            held[batch].add(group)
        for batch, manifests in sorted(_by_batch(facts.manifests[policy]).items()):
            groups = {m.group for m in manifests[0].members if m.use == 0}
            count += len(groups)
            apart = sorted(groups ^ held.pop(batch, set()))
            breaches += [f"{name}: group {g} is in only one of ledger and manifest of batch {batch}" for g in apart]
            if batch not in steps and facts.finished:
                lost = [g for g in sorted(groups) if c.ended.get(g) != "end"]
                breaches += [f"{name}: group {g} of batch {batch} was neither trained nor closed" for g in lost]
            elif batch in steps:
                wrong = [g for g in sorted(groups) if c.ended.get(g) not in ("trained", None)]
                breaches += [f"{name}: group {g} was trained in batch {batch} but ended as {c.ended[g]}" for g in wrong]
        breaches += [f"{name}: batch {batch} is in the ledger and has no manifest" for batch in sorted(held)]
    return Proof(name="no batched group was lost", count=count, unit="groups", breaches=tuple(breaches))


def lanes_match(facts: Facts) -> Proof:
    """What lies in each lane has the count, tokens, digest and members that the manifest says, in order."""
    breaches: list[str] = []
    count = 0
    for policy, name in enumerate(facts.policies):
        lanes = dict(facts.lanes[policy])
        for manifest in facts.manifests[policy]:
            for lane in manifest.lanes:
                found = lanes.pop((manifest.batch, lane.lane), None) or LaneFact()
                here = f"{name}: batch {manifest.batch} lane {lane.lane}"
                count += len(found.items)
                if (len(found.items), found.tokens) != (lane.count, lane.tokens):
                    breaches.append(
                        f"{here} holds {len(found.items)} items, {found.tokens} tokens; "
                        f"its manifest says {lane.count}, {lane.tokens}"
                    )
                elif found.digest.hexdigest() != lane.digest:
                    breaches.append(f"{here} has another digest than its manifest")
                elif [i.index for i in found.items] != list(range(lane.count)):
                    breaches.append(f"{here} is not in order")
                members = [(m.group, m.replica, m.use) for m in manifest.members if m.lane == lane.lane]
                if members != [(i.group, i.replica, i.use) for i in found.items]:
                    breaches.append(f"{here} holds other members than its manifest says")
        breaches += [f"{name}: batch {batch} lane {lane} has items and no manifest" for batch, lane in sorted(lanes)]
    return Proof(name="lanes hold what their manifests say", count=count, unit="items", breaches=tuple(breaches))


def stale_within_bound(facts: Facts) -> Proof:
    """No trained token is older than the bound at the start of its batch (protocol 4), by the tokens' own versions."""
    breaches: list[str] = []
    histogram: Counter[int] = Counter()
    for policy, name in enumerate(facts.policies):
        bound = facts.bounds[policy]
        for manifest in facts.manifests[policy]:
            for lane in manifest.lanes:
                for item in facts.lanes[policy].get((manifest.batch, lane.lane), LaneFact()).items:
                    where = f"{name}: batch {manifest.batch}: group {item.group} replica {item.replica}"
                    if item.oldest_token not in (-1, item.oldest_version):
                        breaches.append(f"{where} says version {item.oldest_version}, its tokens {item.oldest_token}")
                    staleness = manifest.start_version - item.oldest_version
                    histogram[staleness] += 1
                    if staleness > bound:
                        breaches.append(f"{where} is {staleness} versions old, the bound is {bound}")
    shown = ", ".join(f"{age}: {n}" for age, n in sorted(histogram.items()))
    return Proof(
        name=f"staleness is at most {max(facts.bounds, default=0)}", count=sum(histogram.values()), unit="items",
        breaches=tuple(breaches), note=f"by versions {shown}" if shown else "",
    )  # fmt: skip


def versions_grow(facts: Facts) -> Proof:
    """Versions in ``steps`` only grow."""
    breaches: list[str] = []
    count = 0
    for policy, name in enumerate(facts.policies):
        last = 0
        for record in facts.steps[policy]:
            if isinstance(record, Step | Resumed):
                count += 1
                if record.version <= last:
                    breaches.append(f"{name}: version {record.version} comes after {last}")
                last = max(last, record.version)
    return Proof(name="versions only grow", count=count, unit="versions", breaches=tuple(breaches))


def checkpoints_belong(facts: Facts, lines: Sequence[Lineage]) -> Proof:
    """The newest checkpoint stands for a batch of the final lineage, in a finished run for its last one."""
    breaches: list[str] = []
    count = 0
    for policy, name in enumerate(facts.policies):
        line, points = lines[policy], facts.checkpoints[policy]
        count += len(points)
        if not points:
            continue
        newest = max(points, key=lambda point: (point.lineage, point.batch))
        last = max(line.steps, default=0)
        # A checkpoint is durable before its step is announced, so it may be one batch ahead of a run cut short.
        if newest.lineage > line.number or newest.batch > last + 1:
            breaches.append(
                f"{name}: {newest.place} is of lineage {newest.lineage}, batch {newest.batch}; steps end at {last}"
            )
        if facts.finished and newest.batch != last:
            breaches.append(
                f"{name}: the run ended with batch {last}, its newest checkpoint is of batch {newest.batch}"
            )
    return Proof(name="checkpoints lie on the final lineage", count=count, unit="checkpoints", breaches=tuple(breaches))


def _by_batch(manifests: Sequence[Manifest]) -> dict[int, list[Manifest]]:
    out: dict[int, list[Manifest]] = defaultdict(list)
    for manifest in manifests:
        out[manifest.batch].append(manifest)
    return out
