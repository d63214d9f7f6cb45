"""Which offloaded arrays of a run nobody can need again (protocol 6), and their deletion.

Goes in: the ledgers of a run, the batches that kept checkpoints may read again, the listing of ``blobs/``; comes out:
fewer objects. An object stays while its group is open, while a replayed use may come, while a resumed trainer could
read its batch, and for a grace period in any case.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.store import ObjectInfo, ObjectStore
from headrace.pipeline.proofs.ledger import follow
from headrace.pipeline.run_records import read_records
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Record, RunEnd

__all__ = ("Needs", "Swept", "needs_of", "read_needs", "sweep_blobs")

GRACE_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What of a run may be read again.

    open: groups with a credit that has not ended, or that a checkpoint or replay may lead back to. ended: all others
    that were ever admitted. finished: nothing of this run is read again.
    """

    open: frozenset[int]
    ended: frozenset[int]
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What was deleted (or would be): objects and bytes, those of no known group among them, and what stays."""

    objects: int
    nbytes: int
    orphans: int
    kept: int


def needs_of(
    ledgers: Sequence[Sequence[Record]], floors: Mapping[int, int], reach: Mapping[int, int], *, finished: bool
) -> Needs:
    """What is still needed, by policy index.

    floors: batch of the oldest kept checkpoint; a policy without one may train everything again. reach: versions over
    which a group may be replayed after its own batch, 0 without replay.
    """
    still: set[int] = set()
    over: set[int] = set()
    for policy, ledger in enumerate(ledgers):
        account = follow(ledger)
        still |= set(account.open)
        for group, how in account.ended.items():
            safe = how != "trained" or account.batches[group] + reach.get(policy, 0) <= floors.get(policy, 0)
            (over if safe else still).add(group)
    return Needs(open=frozenset(still), ended=frozenset(over - still), finished=finished)


def read_needs(connection: Connection, config: RunConfig, checkpoints: Mapping[int, Iterable[int]]) -> Needs:
    """The needs of a run from its topics; ``checkpoints`` are the batches of all kept ones by policy index."""
    names = config.policy_names()
    ledgers: list[list[Record]] = [[] for _ in names]
    for raw, record in read_records(connection, "ledger"):
        ledgers[raw.partition].append(record)
    finished = any(isinstance(record, RunEnd) for _, record in read_records(connection, "run"))
    floors = {policy: min(batches) for policy, found in checkpoints.items() if (batches := list(found))}
    reach = {
        policy: config.policies[name].staleness_bound() if config.policies[name].replay else 0
        for policy, name in enumerate(names)
    }
    return needs_of(ledgers, floors, reach, finished=finished)


def sweep_blobs(
    store: ObjectStore,
    run: str,
    needs: Needs,
    *,
    orphan_seconds: float,
    grace_seconds: float = GRACE_SECONDS,
    dry: bool = False,
) -> Swept:
    """Delete what is not needed. orphan_seconds: age from which an object of a group that nobody admitted goes.

    Raises the store's errors; it may be stopped and repeated at any point.
    """
    now, prefix = time.time(), f"runs/{run}/blobs/"
    going: list[ObjectInfo] = []
    kept = orphans = 0
    for info in store.list(prefix):
        text = info.key.removeprefix(prefix).partition("/")[0]
        group, age = int(text) if text.isdecimal() else -1, now - info.modified
        known = group in needs.open or group in needs.ended
        goes = needs.finished or group in needs.ended or (not known and age > orphan_seconds)
        if not goes or age <= grace_seconds:
            kept += 1
            continue
        going.append(info)
        orphans += not known
    for info in going if not dry else ():
        store.delete(info.key)
    return Swept(objects=len(going), nbytes=sum(info.size for info in going), orphans=orphans, kept=kept)
