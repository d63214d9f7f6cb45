"""``headrace verify``: proves from the topics and checkpoints of a run, and its store, that it kept the protocol.

In: a run folder (or its topics on a cluster); out: one Proof for each property, with its count and its breaches. It
reads only what the run left behind and trusts no counter of the run's own.
"""

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.open import open_store
from headrace.pipeline.delta_to_worker import verify_chain
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.proofs import batches, ledger
from headrace.pipeline.proofs.facts import Facts, Proof, read_facts
from headrace.schemas.config import RunConfig

__all__ = ("prove", "verify_run")


def verify_run(folder: RunFolder, config: RunConfig, bootstrap: str) -> list[Proof]:
    """All proofs of a run. Raises HeadraceError when its topics or its store cannot be read."""
    connection = Connection.of(config.kafka, config.run.id, bootstrap)
    facts = read_facts(connection, config, folder.path / "checkpoints")
    return [*prove(facts), delta_chains(facts, folder, config)]


def prove(facts: Facts) -> list[Proof]:
    """The proofs that need only records and checkpoints."""
    accounts = [ledger.follow(facts.ledger[policy]) for policy in range(len(facts.policies))]
    lines = [batches.final_lineage(facts.steps[policy]) for policy in range(len(facts.policies))]
    return [
        decodable(facts),
        ledger.prompts_whole(facts),
        ledger.admitted_once(facts),
        ledger.admissions_open_credits(facts, accounts),
        ledger.within_caps(facts, accounts),
        ledger.ended_once(facts, accounts),
        batches.none_lost(facts, accounts, lines),
        batches.trained_once(facts, lines),
        batches.replays_matched(facts),
        batches.lanes_match(facts),
        batches.stale_within_bound(facts),
        batches.versions_grow(facts),
        batches.checkpoints_belong(facts, lines),
    ]


def decodable(facts: Facts) -> Proof:
    """Everything that stages wrote to their own topics can be read."""
    count = sum(
        len(facts.ledger[p]) + len(facts.steps[p]) + len(facts.manifests[p]) for p in range(len(facts.policies))
    )
    note = f"beginnings deleted: {', '.join(facts.horizon)}" if facts.horizon else "from the first record on"
    if facts.strangers:
        note += f"; {len(facts.strangers)} that this run did not write passed over, the first: {facts.strangers[0]}"
    return Proof(name="records can be read", count=count, unit="records", breaches=tuple(facts.undecodable), note=note)


def delta_chains(facts: Facts, folder: RunFolder, config: RunConfig) -> Proof:
    """Every committed version can be rebuilt bit for bit in every way the store offers, and the newest is there."""
    store = open_store(config.store, folder.path)
    breaches: list[str] = []
    count = 0
    for policy, name in enumerate(facts.policies):
        checked = verify_chain(store, config.run.id, name)
        count += len(checked)
        breaches += [f"{name}: version {c.version}: {c.problem}" for c in checked if c.problem]
        line = batches.final_lineage(facts.steps[policy])
        newest = max((step.version for step in line.steps.values()), default=0)
        if newest and newest not in {c.version for c in checked}:
            breaches.append(f"{name}: version {newest} has a step and is not in the store")
    return Proof(name="every delta chain verifies", count=count, unit="versions", breaches=tuple(breaches))
