"""Proofs over prompts, admissions and the ledger: each credit opens once, within its cap, and ends exactly once.

In: Facts; out: a Proof for each property of protocol 3. The first ending record in ledger order counts; later ones are
ignored, as every reader does, and only counted here.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.proofs.facts import Facts, Proof
from headrace.schemas.records import Batched, Closed, End, Kept, Opened, Record, Skipped, Trained

__all__ = (
    "Account",
    "admissions_open_credits",
    "admitted_once",
    "ended_once",
    "follow",
    "prompts_whole",
    "within_caps",
)


@dataclass(slots=True)
class Account:
    """The credits of one policy after its ledger has been followed."""

    opened: int = 0
    ended: dict[int, str] = field(default_factory=dict)
    """Group to how its credit ended: a Closed reason, or ``trained``."""
    open: dict[int, str] = field(default_factory=dict)
    """Group to its state: rolling, kept, or ``batch N``."""
    batches: dict[int, int] = field(default_factory=dict)
    """Group to the batch that holds or trained it."""
    ignored: int = 0
    over_cap: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)


def follow(ledger: Sequence[Record]) -> Account:
    """Follow a policy's ledger from its beginning."""
    account = Account()
    for record in ledger:
        match record:
            case Opened():
                _opened(account, record)
            case Kept():
                if record.group in account.open:
                    if account.open[record.group] != "rolling":
                        account.breaches.append(f"group {record.group} is kept twice")
                    account.open[record.group] = "kept"
                elif record.group not in account.ended:
                    account.breaches.append(f"group {record.group} is kept and was never opened")
            case Closed():
                _end(account, record.group, record.reason)
            case Batched():
                _batched(account, record)
            case Trained():
                for group in [g for g in account.open if account.batches.get(g, record.batch + 1) <= record.batch]:
                    _end(account, group, "trained")
            case _:
                pass
    return account


def _opened(account: Account, record: Opened) -> None:
    if record.group in account.open or record.group in account.ended:
        account.breaches.append(f"group {record.group} is opened twice")
        return
    account.opened += 1
    account.open[record.group] = "rolling"
    if len(account.open) > record.cap:
        account.over_cap.append(f"group {record.group} is credit {len(account.open)} under a cap of {record.cap}")


def _end(account: Account, group: int, how: str) -> None:
    if group in account.ended:
        account.ignored += 1
    elif group not in account.open:
        account.breaches.append(f"group {group} ends ({how}) and was never opened")
    else:
        del account.open[group]
        account.ended[group] = how


def _batched(account: Account, record: Batched) -> None:
    for group in record.groups:
        if group in account.batches:
            account.breaches.append(f"group {group} is in batch {account.batches[group]} and in batch {record.batch}")
        elif group in account.ended:
            account.breaches.append(f"group {group} is in batch {record.batch} after it ended ({account.ended[group]})")
        elif account.open.get(group) != "kept":
            account.breaches.append(f"group {group} is in batch {record.batch} and was not kept")
        else:
            account.open[group] = f"batch {record.batch}"
            account.batches[group] = record.batch


def ended_once(facts: Facts, accounts: Sequence[Account]) -> Proof:
    """Every admitted group ended exactly once; in a run that is not finished some may still be open."""
    breaches = [_of(facts, policy, text) for policy, c in enumerate(accounts) for text in c.breaches]
    still = sum(len(c.open) for c in accounts)
    ignored = sum(c.ignored for c in accounts)
    notes = [f"{ignored} later ending records ignored"] if ignored else []
    if facts.finished:
        breaches += [
            _of(facts, policy, f"group {group} never ended (it is {state}) although the run has")
            for policy, c in enumerate(accounts)
            for group, state in c.open.items()
        ]
    elif still:
        notes.append(f"{still} still open: the run is not finished")
    ended: Counter[str] = Counter(how for c in accounts for how in c.ended.values())
    notes.insert(0, ", ".join(f"{how} {n}" for how, n in sorted(ended.items())) or "none")
    return Proof(
        name="every admitted group ended exactly once", count=sum(ended.values()), unit="credits",
        breaches=tuple(breaches), note="; ".join(notes),
    )  # fmt: skip


def within_caps(facts: Facts, accounts: Sequence[Account]) -> Proof:
    """At each admission the open credits of the policy were within the cap that was in force (stored in Opened)."""
    breaches = [_of(facts, policy, text) for policy, c in enumerate(accounts) for text in c.over_cap]
    count = sum(c.opened for c in accounts)
    return Proof(name="admission stayed within its caps", count=count, unit="admissions", breaches=tuple(breaches))


def admissions_open_credits(facts: Facts, accounts: Sequence[Account]) -> Proof:
    """Each Admission opened exactly the credits that it names, and group ids are dense."""
    breaches = []
    named: Counter[tuple[int, int]] = Counter((p.policy, a.group) for a in facts.admissions for p in a.policies)
    for policy, c in enumerate(accounts):
        opened = set(c.open) | set(c.ended)
        admitted = {g for p, g in named if p == policy}
        breaches += [
            _of(facts, policy, f"group {g} was opened without an Admission") for g in sorted(opened - admitted)
        ]
        breaches += [_of(facts, policy, f"group {g} was admitted and not opened") for g in sorted(admitted - opened)]
    breaches += [f"group {group} was admitted {n} times" for (_, group), n in sorted(named.items()) if n > 1]
    groups = sorted({a.group for a in facts.admissions})
    if groups and groups[-1] - groups[0] + 1 != len(groups):
        breaches.append(f"group ids {groups[0]} to {groups[-1]} have gaps: {len(groups)} groups")
    return Proof(
        name="admissions and opened credits agree", count=len(facts.admissions), unit="groups", breaches=tuple(breaches)
    )


def admitted_once(facts: Facts) -> Proof:
    """No prompt record was admitted twice; a failed group's retry counts as its own admission.

    What an operator before rollout has skipped by name was not admitted, and is not lost.
    """
    seen: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
    for admission in facts.admissions:
        offsets = [s.offset for s in admission.sources if s.topic == "prompts"]
        policies = tuple(sorted(p.policy for p in admission.policies)) if admission.retry else ()
        seen.update((offset, admission.retry, policies) for offset in offsets)
    breaches = [
        f"prompts[0]@{offset} was admitted {n} times (retry {retry})" for (offset, retry, _), n in seen.items() if n > 1
    ]
    admitted = {offset for offset, _, _ in seen}
    records = [r for ledger in facts.ledger.values() for r in ledger if isinstance(r, Skipped)]
    skipped = Counter(source.offset for record in records for source in record.sources)
    breaches += [f"prompts[0]@{offset} was skipped {n} times" for offset, n in skipped.items() if n > 1]
    breaches += [f"prompts[0]@{offset} was admitted and skipped" for offset in sorted(admitted & skipped.keys())]
    ended = any(isinstance(r, End) for ledger in facts.ledger.values() for r in ledger)
    if facts.finished and ended and all(not _stopped_early(facts, policy) for policy in range(len(facts.policies))):
        breaches += [
            f"prompts[0]@{at} was never admitted"
            for at, prompt in facts.prompts
            if at not in admitted and at not in skipped and prompt.stream != EVALUATION_STREAM
        ]
    return Proof(
        name="no prompt was admitted twice or lost", count=len(admitted), unit="prompts", breaches=tuple(breaches),
        note=f"{len(skipped)} skipped by name" if skipped else "",
    )  # fmt: skip


def _stopped_early(facts: Facts, policy: int) -> bool:
    """Whether a policy stopped by steps: then prompts remain, and what was open is closed as ``end``."""
    ledger = facts.ledger[policy]
    closed = any(isinstance(r, Closed) and r.reason == "end" for r in ledger)
    return closed or any(isinstance(r, End) and r.reason == "stopped" for r in ledger) or not ledger


def prompts_whole(facts: Facts) -> Proof:
    """The source wrote the positions of every stream without gap and without repetition."""
    expected: dict[str, int] = {}
    breaches = []
    for offset, prompt in facts.prompts:
        wanted = expected.get(prompt.stream, prompt.position if "prompts[0]" in facts.horizon else 0)
        if prompt.position != wanted:
            breaches.append(
                f"prompts[0]@{offset}: position {prompt.position} of {prompt.stream} where {wanted} follows"
            )
        expected[prompt.stream] = prompt.position + 1
    return Proof(
        name="the source wrote every row once", count=len(facts.prompts), unit="prompts", breaches=tuple(breaches)
    )


def _of(facts: Facts, policy: int, text: str) -> str:
    return f"{facts.policies[policy]}: {text}"
