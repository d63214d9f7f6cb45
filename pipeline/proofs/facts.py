"""The facts of a run that proofs work on, read from its topics and checkpoints.

In: a connection and the run folder; out: records in the order of their partitions, and of items only what a proof needs
(their arrays are looked at here, once). A record that cannot be decoded is counted, never skipped in silence.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from headrace.connectors.checkpoints import BrokenCheckpoint, checkpoint_prefix, in_store
from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.stores.open import open_store
from headrace.schemas.config import RunConfig
from headrace.schemas.digests import body_of
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.records import Admission, Item, Manifest, Prompt, Record, RunEnd

__all__ = (
    "CheckpointFact",
    "Facts",
    "ItemFact",
    "LaneFact",
    "Proof",
    "checkpoint_facts",
    "item_fact",
    "kept_checkpoints",
    "read_facts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One property: how many things it was checked for, and every breach in words. ``note`` says what else to know."""

    name: str
    count: int
    unit: str
    breaches: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFact:
    """An item of a batch. The versions are those of its trained tokens (-1 when its arrays lie in the object store)."""

    group: int
    replica: int
    use: int
    lane: int
    index: int
    oldest_version: int
    oldest_token: int


@dataclass(slots=True)
class LaneFact:
    """What lies in one lane of one batch, in order."""

    items: list[ItemFact] = field(default_factory=list)
    tokens: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """A checkpoint on disk."""

    lineage: int
    batch: int
    version: int
    place: str


@dataclass(slots=True, kw_only=True)
class Facts:
    """Everything that proofs look at; lists by policy index."""

    policies: list[str]
    bounds: list[int]
    """A in force: the staleness bound in versions."""
    finished: bool = False
    prompts: list[tuple[int, Prompt]] = field(default_factory=list)
    """(offset, prompt)"""
    admissions: list[Admission] = field(default_factory=list)
    ledger: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    manifests: dict[int, list[Manifest]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    lanes: dict[int, dict[tuple[int, int], LaneFact]] = field(default_factory=lambda: defaultdict(dict))
    """By policy: (batch, lane) to what lies there."""
    checkpoints: dict[int, list[CheckpointFact]] = field(default_factory=lambda: defaultdict(list))
    undecodable: list[str] = field(default_factory=list)
    """Records of this run that cannot be read."""
    strangers: list[str] = field(default_factory=list)
    """Records that cannot be read and that nothing of this run wrote."""
    horizon: list[str] = field(default_factory=list)
    """Partitions whose beginning has been deleted: proofs cover what is left."""


def read_facts(connection: Connection, config: RunConfig, checkpoints: Path) -> Facts:
    """Read the facts of a run. Raises HeadraceError when its topics cannot be read."""
    names = config.policy_names()
    facts = Facts(policies=names, bounds=[config.policies[name].staleness_bound() for name in names])
    for topic in ("run", "prompts", "admissions", "ledger", "manifests", "steps"):
        facts.horizon += [f"{topic}[{p}]" for p, at in connection.start_offsets(topic).items() if at and topic != "run"]
        for raw in connection.read_topic(topic):
            record = _decoded(facts, config.run.id, raw)
            if record is not None:
                _take(facts, topic, raw.partition, raw.offset, record)
    for policy, name in enumerate(names):
        for raw in connection.read_topic(f"batches.{name}"):
            record = _decoded(facts, config.run.id, raw)
            if isinstance(record, Item) and raw.value is not None:
                lane = facts.lanes[policy].setdefault((record.batch, raw.partition), LaneFact())
                lane.items.append(item_fact(record))
                lane.tokens += record.length
                lane.digest.update(body_of(raw.value))
        facts.checkpoints[policy] = list(kept_checkpoints(config, name, checkpoints / name))
    return facts


def _decoded(facts: Facts, run: str, raw: RawRecord) -> Record | None:
    """The record; one that cannot be read is noted: as a fault if this run wrote it (its headers say so)."""
    try:
        return raw.decoded()
    except UndecodableRecord as error:
        ours = dict(raw.headers).get("hr-run") == run.encode()
        (facts.undecodable if ours else facts.strangers).append(f"{raw.source}: {error}")
        return None


def item_fact(item: Item) -> ItemFact:
    """What proofs need of an item."""
    oldest = [int(s.versions[s.mask != 0].min()) for s in item.sequences if s.mask.any()]
    return ItemFact(
        group=item.group,
        replica=item.replica,
        use=item.use,
        lane=item.lane,
        index=item.index,
        oldest_version=item.oldest_version,
        oldest_token=min(oldest, default=-1),
    )


def _take(facts: Facts, topic: str, partition: int, offset: int, record: Record) -> None:
    match topic, record:
        case "run", RunEnd():
            facts.finished = True
        case "prompts", Prompt():
            facts.prompts.append((offset, record))
        case "admissions", Admission():
            facts.admissions.append(record)
        case "ledger", _:
            facts.ledger[partition].append(record)
        case "manifests", Manifest():
            facts.manifests[partition].append(record)
        case "steps", _:
            facts.steps[partition].append(record)
        case _:
            pass


def kept_checkpoints(config: RunConfig, policy: str, root: Path) -> Iterable[CheckpointFact]:
    """The checkpoints of a policy, in the run folder or where ``trainer.checkpoint_url`` puts them.

    root: ``checkpoints/<policy>`` of the run folder. Raises the errors of object stores.
    """
    url = config.trainer_of(policy).checkpoint_url
    if not url:
        yield from checkpoint_facts(root)
        return
    place_of = config.store if url == "store" else config.store.model_copy(update={"url": url})
    store = open_store(place_of, root.parents[1])
    for where, table in in_store(store, checkpoint_prefix(config.run.id, policy)):
        if not isinstance(table, BrokenCheckpoint):
            place = f"{store.url}/{where}"
            yield CheckpointFact(lineage=table.lineage, batch=table.batch, version=table.version, place=place)


def checkpoint_facts(root: Path) -> Iterable[CheckpointFact]:
    """The checkpoints below a folder by their tables; one that is being written or torn is none."""
    for table in sorted(root.glob("[!.]*/checkpoint.json")):
        try:
            data = json.loads(table.read_text("utf-8"))
            lineage, batch, version = (int(data[name]) for name in ("lineage", "batch", "version"))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield CheckpointFact(lineage=lineage, batch=batch, version=version, place=str(table.parent))
