"""The promises of an operator before rollout, tried in its place, in ``schedule`` under the TopologyDriver.

In: the configuration of a run with one such operator. Out: a Check for every promise. Five prompts come again and
again, several times before the first of them has an outcome; some are always solved, some never, some now and then, and
every seventh group closes short. Decisions are compared as the bytes of ``admissions`` and ``ledger``.
"""

import re
from random import Random

from headrace.connectors.conformance import Check
from headrace.pipeline import flow
from headrace.pipeline.conformance_feed import ROUND
from headrace.pipeline.conformance_state import state_bytes, state_check, state_of, turns
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import HostedPolicy
from headrace.schemas.records import Admission, Batched, Closed, Demand, Kept, Prompt, Skipped, Step

__all__ = ("prompt_checks",)

PROMPTS = 5
_STATE = b"sstate/operator"
_REASON = re.compile(r"[a-z][a-z0-9_]*")
_TURNS = 8
"""More than records need; an operator that writes whenever it opens never comes to rest."""


def prompt_checks(config: RunConfig, prompts: int) -> list[Check]:
    """Try the operator of a run with the one stream ``main`` on so many prompts; half of them for its bounded state."""
    first = _Played(config, prompts)
    return [
        _same("determinism", first, _Played(config, prompts), "a second run"),
        _same("transactions", first, _Played(config, prompts, together=True), "seven prompts in one transaction"),
        _same("restart", first, _Played(config, prompts, killed=True), "a kill before and after every commit"),
        state_check(first.driver, "schedule", _STATE),
        _bounded_check(config, prompts),
        _ending_check(first, prompts),
        _reason_check(first),
    ]


class _Played:
    """A run of ``schedule`` in which everything else is played: prompts, a worker, results, a trainer."""

    def __init__(self, config: RunConfig, prompts: int, *, together: bool = False, killed: bool = False) -> None:
        self.driver = TopologyDriver(config, {"schedule": flow.STAGES["schedule"]})
        self._killed = killed
        self._closed = self._batch = 0
        self.driver.append("demand", _demand())
        for start in range(0, prompts, ROUND):
            for number in range(start, min(start + ROUND, prompts)):
                self.driver.append("prompts", _prompt(number))
                if not together:
                    self._turns()
            self._turns()
            self._close()
        self._turns()

    def _turns(self) -> None:
        turns(self.driver, "schedule", killed=self._killed, most=_TURNS)

    def _close(self) -> None:
        """Every open group ends, what varies is trained, and a version appears."""
        admitted = [r for r in self.driver.records("admissions") if isinstance(r, Admission)]
        kept = []
        for admission in admitted[self._closed :]:
            rewards = _rewards(admission)
            short = len(rewards) < admission.group_size
            if max(rewards) > min(rewards):
                kept.append(admission.group)
                self.driver.append(
                    "ledger", Kept(policy=0, group=admission.group, raw_rewards=rewards, complete=not short)
                )  # fmt: skip
            else:
                closed = Closed(
                    policy=0, group=admission.group, reason="filtered", by="assemble", raw_rewards=rewards,
                    complete=not short,
                )  # fmt: skip
                self.driver.append("ledger", closed)
            self._turns()
        self._closed = len(admitted)
        if kept:
            self._batch += 1
            self.driver.append("ledger", Batched(policy=0, batch=self._batch, groups=kept))
            self.driver.append("steps", _step(self._batch))
            self._turns()

    def values(self) -> list[bytes]:
        """What was decided, as bytes."""
        return [entry.value for topic in ("admissions", "ledger") for entry in self.driver.log[topic, 0]]

    def state(self) -> dict[bytes, bytes]:
        """The store of the operator and of its chain."""
        return state_of(self.driver, "schedule", _STATE)


def _prompt(number: int) -> Prompt:
    epoch, row = divmod(number, PROMPTS)
    return Prompt(
        prompt_id=f"prompt-{row}", stream="main", dataset=("one", "two")[row % 2], row=row, epoch=epoch,
        position=number, prompt="?", task_type=("even", "odd")[row % 2], columns={"difficulty": str(row)},
    )  # fmt: skip


def _rewards(admission: Admission) -> list[float]:
    row, random = int(admission.prompt_id.rpartition("-")[2]), Random(admission.group)
    size = admission.group_size - (admission.group % ROUND == ROUND - 1)
    if row in (0, 1):
        return [float(row)] * size
    return [float(random.random() < 0.3 * row - 0.2) for _ in range(size)]


def _demand() -> Demand:
    return Demand(
        worker="w0", incarnation=1, role="any", capacity=1 << 30, next_sequence=0, inbox=0, sent_ms=0,
        policies=[HostedPolicy(policy=0, version=1 << 30)],
    )  # fmt: skip


def _step(batch: int) -> Step:
    return Step(
        policy=0, batch=batch, version=batch, lineage=0, updates=1, loss=0.0, tokens=0, sequences=0, wait_seconds=0.0,
        step_seconds=0.0, publish_seconds=0.0, delta_bytes=0, changed_share=0.0, finished_ms=0,
    )  # fmt: skip


def _same(name: str, one: _Played, other: _Played, what: str) -> Check:
    left, right = one.values(), other.values()
    if left == right and one.state() == other.state():
        return Check(name, True, f"{what} gives the same {len(left)} records and the same state")
    if left == right:
        return Check(name, False, f"{what} gives the same {len(left)} records, but another state")
    place = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return Check(name, False, f"{what} gives other records from the {place}. on ({len(left)} against {len(right)})")


def _bounded_check(config: RunConfig, prompts: int) -> Check:
    sizes = [
        state_bytes(_Played(config, n, together=True).state()) for n in (prompts, 2 * prompts)
    ]
    told = f"{sizes[0]} bytes after {prompts} prompts, {sizes[1]} after {2 * prompts} of the same"
    return Check("bounded_state", sizes[1] <= 1.1 * sizes[0] + 256, told)


def _ending_check(played: _Played, prompts: int) -> Check:
    driver = played.driver
    ended = [r.sources[0].offset for r in driver.records("admissions") if isinstance(r, Admission)]
    skipped = [r for r in driver.records("ledger") if isinstance(r, Skipped)]
    errors = driver.metrics.total("operator_errors")
    broken = [r for r in skipped if r.reason == "broken"]
    if broken or errors:
        told = f"first: {broken[0].prompt_id}: {broken[0].detail}" if broken else "while it learned"
        return Check("endings", False, f"{max(errors, len(broken)):g} calls raised or ended nothing; {told}")
    ended += [r.sources[0].offset for r in skipped]
    if len(set(ended)) != len(ended) or any(offset >= prompts for offset in ended):
        return Check(
            "endings", False, f"{len(ended)} endings of {prompts} prompts, {len(set(ended))} of them different"
        )
    return Check("endings", True, f"{len(ended)} of {prompts} prompts were admitted or skipped, each once")


def _reason_check(played: _Played) -> Check:
    skipped = [r for r in played.driver.records("ledger") if isinstance(r, Skipped)]
    for record in skipped:
        if not _REASON.fullmatch(record.reason) or not record.detail.strip():
            told = f"{record.prompt_id}: {record.reason!r}, {record.detail!r} is no reason in words with its numbers"
            return Check("reasons", False, told)
    names = sorted({r.reason for r in skipped})
    return Check("reasons", True, f"{len(skipped)} prompts skipped" + (f": {', '.join(names)}" if names else ""))
