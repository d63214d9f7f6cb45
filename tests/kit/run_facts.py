"""A small run as facts: two batches of two groups, one group filtered; tests break one thing at a time."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.pipeline.proofs.facts import CheckpointFact, Facts, ItemFact, LaneFact
from headrace.schemas.parts import AdmittedPolicy, Lane, ManifestMember, Source
from headrace.schemas.records import (
    Admission,
    Batched,
    Closed,
    Kept,
    Manifest,
    Opened,
    Prompt,
    Step,
    Trained,
)


def step(batch: int, version: int, lineage: int = 0) -> Step:
    """A Step with the numbers that proofs look at."""
    return Step(
        policy=0, batch=batch, version=version, lineage=lineage, updates=1, loss=0.0, tokens=8, sequences=4,
        wait_seconds=0.1, step_seconds=0.2, publish_seconds=0.05, delta_bytes=10, changed_share=0.5,
        finished_ms=1000 * version,
    )  # fmt: skip


def opened(group: int, cap: int = 8) -> Opened:
    return Opened(policy=0, group=group, stream="main", prompt_id=f"p{group}", min_version=0, cap=cap)


def closed(group: int, reason: str = "filtered") -> Closed:
    return Closed(policy=0, group=group, reason=reason, by="assemble")


def admission(group: int, offset: int | None = None, retry: int = 0) -> Admission:
    place = Source(topic="prompts", partition=0, offset=group if offset is None else offset)
    return Admission(
        group=group, prompt_id=f"p{group}", stream="main", group_size=2, extra_replicas=0, admitted_ms=0,
        deadline_ms=1, watermark=-1, retry=retry, policies=[AdmittedPolicy(policy=0, min_version=0, cap=8)],
        sources=[place],
    )  # fmt: skip


def manifest(batch: int, groups: Iterable[int], *, oldest: int, use: int = 0) -> tuple[Manifest, LaneFact]:
    """A batch of whole groups of two in one lane, and what lies there."""
    members = [
        ManifestMember(group=g, replica=r, use=use, lane=0, oldest_version=oldest) for g in groups for r in range(2)
    ]
    fact = LaneFact(tokens=2 * len(members))
    for index, m in enumerate(members):
        fact.items.append(
            ItemFact(
                group=m.group,
                replica=m.replica,
                use=use,
                lane=0,
                index=index,
                oldest_version=oldest,
                oldest_token=oldest,
            )
        )
        fact.digest.update(f"{batch}/{index}".encode())
    lane = Lane(lane=0, count=len(members), tokens=fact.tokens, digest=fact.digest.hexdigest())
    record = Manifest(
        policy=0, batch=batch, start_version=batch - 1, since_version=0, fresh_groups=0 if use else len(set(groups)),
        replayed_groups=0, tokens=fact.tokens, sequences=len(members), trajectories=len(members),
        groups=len(set(groups)), composed_ms=0, lanes=[lane], members=members,
    )  # fmt: skip
    return record, fact


def prompt(position: int) -> Prompt:
    return Prompt(prompt_id=f"p{position}", stream="main", dataset="d", row=position, epoch=0, position=position)


def whole_run() -> Facts:
    """A finished run without a breach: groups 0, 1 in batch 1; 2 filtered; 3, 4 in batch 2."""
    facts = Facts(policies=["main"], bounds=[1], finished=True)
    facts.prompts = [(n, prompt(n)) for n in range(5)]
    facts.admissions = [admission(n) for n in range(5)]
    facts.ledger[0] = [
        opened(0), opened(1), opened(2), Kept(policy=0, group=0), closed(2), Kept(policy=0, group=1),
        Batched(policy=0, batch=1, groups=[0, 1]), opened(3), opened(4),
        Trained(policy=0, batch=1, version=1, first=True),
        Kept(policy=0, group=3), Kept(policy=0, group=4), Batched(policy=0, batch=2, groups=[3, 4]),
        Trained(policy=0, batch=2, version=2, first=True),
    ]  # fmt: skip
    for batch, groups, oldest in ((1, (0, 1), 0), (2, (3, 4), 0)):
        record, fact = manifest(batch, groups, oldest=oldest)
        facts.manifests[0].append(record)
        facts.lanes[0][batch, 0] = fact
    facts.steps[0] = [step(1, 1), step(2, 2)]
    facts.checkpoints[0] = [CheckpointFact(lineage=0, batch=2, version=2, place="checkpoints/2")]
    return facts
