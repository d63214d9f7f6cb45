"""Random histories of the decisions of ``schedule`` and ``batch`` against plain models of protocol 3, 4 and 5."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_feed import make_config, make_demand, make_members, make_prompt

from headrace.pipeline.admission import PAUSE_ABOVE, RESUME_BELOW, Waiting, openings
from headrace.pipeline.credits import KEPT, ROLLING, Credits, OpenGroup, PolicyCredits
from headrace.pipeline.kept_groups import KeptGroups
from headrace.pipeline.leases import Leases, Work
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.pipeline.staleness import chosen, fits, stale
from headrace.schemas.config import RolloutConfig
from headrace.schemas.records import Group, Member, Prompt, Task

TWO = {"a": {"model": "none"}, "b": {"model": "none"}}


def fresh_store() -> StoreView:
    return StoreView(MemoryStore(), b"s")


# credits


@dataclass
class Books:
    """What the ledger says, kept as plain sets: (policy, group) to rolling, kept or a batch number."""

    open: dict[tuple[int, int], Any] = field(default_factory=dict)
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    lineage: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    stepped: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})

    def count(self, policy: int, state: str) -> int:
        return sum(1 for (p, _), s in self.open.items() if p == policy and s == state)

    def untrained(self, policy: int) -> int:
        return sum(n for (p, k), n in self.sizes.items() if p == policy and k > self.lineage[policy])


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "keep", "close", "batch", "step", "reload"]),
        st.integers(0, 1),
        st.integers(0, 9),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS)
def test_counters_of_credits_are_those_of_the_ledger_read_from_its_beginning(
    actions: list[tuple[str, int, int]],
) -> None:
    config, memory = make_config(policies=TWO), MemoryStore()
    store, books = StoreView(memory, b"s"), Books()
    account = Credits(config, frozenset())
    for action, policy, number in actions:
        if action == "open":
            policies = (0, 1) if number % 2 else (policy,)
            group = account.next_group
            account.open(
                OpenGroup(
                    group=group, stream="main", prompt=make_prompt(0), offset=0, replicas=2, retry=0,
                    states=dict.fromkeys(policies, ROLLING), bounds=dict.fromkeys(policies, 0),
                ),
                store,
            )  # fmt: skip
            books.open |= {(p, group): "rolling" for p in policies}
        elif action == "keep":
            found = account.settle(number, policy, KEPT)
            assert (found is not None) == ((policy, number) in books.open)
            if found is not None:
                books.open[policy, number] = "kept"
        elif action == "close":
            assert (account.end(number, policy) is not None) == ((policy, number) in books.open)
            books.open.pop((policy, number), None)
        elif action == "batch":
            batch = 1 + max((k for p, k in books.sizes if p == policy), default=0)
            groups = sorted(g for (p, g), s in books.open.items() if p == policy and s == "kept")[:2]
            assert [x.group for x in account.batched(policy, batch, groups)] == groups
            books.sizes[policy, batch] = len(groups)
            books.open |= {(policy, g): batch for g in groups}
        elif action == "step":
            composed = max((k for p, k in books.sizes if p == policy), default=0)
            batch = books.lineage[policy] + 1
            if batch <= composed:
                first, ended = account.moved(policy, batch, batch, resumed=False)
                assert first == (batch > books.stepped[policy])
                wanted = sorted(g for (p, g), s in books.open.items() if p == policy and s == batch)
                assert ended == wanted, "a batch's credits end with its first Step"
                for group in wanted:
                    del books.open[policy, group]
                books.lineage[policy] = batch
                books.stepped[policy] = max(batch, books.stepped[policy])
        else:
            account.flush(store)
            account = Credits(config, frozenset())
            account.load(store)
        for p in (0, 1):
            figures = account.policies[p]
            assert figures.rolling == books.count(p, "rolling") and figures.kept == books.count(p, "kept")
            assert figures.untrained == books.untrained(p)
        assert {(p, g) for g, x in account.groups.items() for p in x.states} == set(books.open)
        assert account.rolling_groups == len({g for (_, g), s in books.open.items() if s == "rolling"})
        oldest = min((g for _, g in books.open), default=account.next_group)
        assert account.watermark() == oldest - 1


@settings(max_examples=200, deadline=None)
@given(
    fresh=st.integers(1, 40), depth=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0]), extra=st.integers(0, 8),
    filtered=st.booleans(), share=st.floats(0.01, 1.0), kept=st.integers(0, 60), untrained=st.integers(0, 60),
)  # fmt: skip
def test_admission_stops_exactly_at_the_formula_and_never_above_the_cap(
    fresh: int, depth: float, extra: int, filtered: bool, share: float, kept: int, untrained: int
) -> None:
    p = PolicyCredits(
        index=0, batch_groups=fresh, fresh=fresh, depth=depth, extra=extra, lag=0, filtered=filtered, kept_share=share,
        kept=kept, untrained=untrained,
    )  # fmt: skip
    full = (1 + depth) * fresh + extra
    used = (max(share, 0.25), 0.25) if filtered else (1.0, 1.0)
    cap = math.ceil(full / used[1] - 1e-9)
    admitted = 0
    while p.room()[0]:
        assert p.room() == (True, cap)
        p.rolling += 1
        admitted += 1
        assert p.rolling + kept + untrained <= cap
        assert admitted < 2000
    wanted = min(math.ceil(max(0.0, full - kept - untrained) / used[0] - 1e-9), cap - kept - untrained)
    waits = depth == 0 and kept + untrained >= fresh  # what opened then would be stale before the next batch
    assert admitted == (0 if waits else max(0, wanted))
    if not filtered:
        assert kept + untrained + admitted <= max(cap, kept + untrained), "exact without filters"


# admission


@pytest.mark.parametrize(
    ("pacing", "room", "stopped", "opens"),
    [
        ("any", (True, True), (), [0, 1]),
        ("any", (True, False), (), [0]),
        ("any", (False, True), (), [1]),
        ("any", (False, False), (), []),
        ("any", (True, True), (0,), [1]),
        ("any", (True, False), (0,), []),
        ("all", (True, True), (), [0, 1]),
        ("all", (True, False), (), []),
        ("all", (True, False), (1,), [0]),
        ("all", (True, True), (0, 1), []),
        ("a", (True, False), (), [0]),
        ("a", (False, True), (), []),
        ("a", (False, True), (0,), [1]),
        ("b", (True, True), (), [0, 1]),
        ("b", (True, False), (), []),
        ("b", (True, False), (1,), [0]),
    ],
)
def test_pacing_decides_when_and_room_decides_for_whom(
    pacing: str, room: tuple[bool, bool], stopped: tuple[int, ...], opens: list[int]
) -> None:
    config = make_config(policies=TWO, pacing=pacing)
    policies = Credits(config, frozenset()).policies
    for p, has in enumerate(room):
        policies[p].rolling = 0 if has else 1000
        policies[p].stopped = p in stopped
    waiting, store = Waiting(), fresh_store()
    waiting.add(make_prompt(0), 0, store)
    (head,) = waiting.heads()
    found = openings(head.prompt.stream, head.policies, config, policies)
    assert [p for p, _ in found] == opens
    assert all(cap == policies[p].room()[1] for p, cap in found)


def test_a_retry_opens_only_for_the_policies_that_still_want_it() -> None:
    config, waiting, store = make_config(policies=TWO), Waiting(), fresh_store()
    waiting.add(make_prompt(0), 7, store, retry=1, policies=(1,))
    (head,) = waiting.heads()
    accounts = Credits(config, frozenset()).policies
    assert [p for p, _ in openings(head.prompt.stream, head.policies, config, accounts)] == [1]


@settings(max_examples=80, deadline=None)
@given(moves=st.lists(st.tuples(st.booleans(), st.sampled_from(["x", "y", "z"])), max_size=40), at=st.integers(0, 40))
def test_prompts_wait_in_order_by_stream_and_come_back_from_the_store(moves: list[tuple[bool, str]], at: int) -> None:
    store, waiting = fresh_store(), Waiting()
    queues: dict[str, list[int]] = {"x": [], "y": [], "z": []}
    arrival: dict[int, int] = {}
    for number, (adds, stream) in enumerate(moves):
        if number == at:
            waiting = Waiting()
            waiting.load(store)
        if adds:
            waiting.add(make_prompt(number, stream), number, store)
            queues[stream].append(number)
            arrival[number] = len(arrival)
        elif queues[stream]:
            assert waiting.take(stream, store).offset == queues[stream].pop(0)
        heads = sorted((q[0] for q in queues.values() if q), key=arrival.__getitem__)
        assert [w.offset for w in waiting.heads()] == heads
        assert waiting.count == sum(map(len, queues.values()))


def test_reading_prompts_pauses_above_one_mark_and_goes_on_below_another() -> None:
    store, waiting = fresh_store(), Waiting()
    states = []
    for _ in range(PAUSE_ABOVE + 1):
        states.append(waiting.wants_pause())
        waiting.add(make_prompt(0), 0, store)
    assert not any(states) and waiting.wants_pause()
    while waiting.count > RESUME_BELOW:
        waiting.take("main", store)
        assert waiting.count < RESUME_BELOW or waiting.wants_pause()
    waiting.take("main", store)
    assert not waiting.wants_pause()
    waiting.add(make_prompt(0), 0, store)
    assert not waiting.wants_pause(), "between the marks it stays as it was"


# leases


@dataclass
class Worked:
    """A worker as it is: what it has not read, and what it holds."""

    capacity: int
    announced: int = 0
    incarnation: int = 1
    unread: list[Work] = field(default_factory=list)
    held: list[Work] = field(default_factory=list)
    read: int = 0


LEASE_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["give", "read", "finish", "demand", "restart", "resize"]), st.integers(0, 2)),
    max_size=60,
)


def as_task(work: Work) -> Task:
    prompt = Prompt(prompt_id="", stream="main", dataset="", row=0, epoch=0, position=0)
    return Task(
        kind=work.kind, group=work.group, replica=work.replica, attempt=work.attempt, stream="main", worker=work.worker,
        incarnation=work.incarnation, sequence=work.sequence, issued_ms=0, deadline_ms=0, prompt=prompt,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(actions=LEASE_ACTIONS)
def test_a_worker_never_gets_more_than_it_can_hold_and_no_work_is_lost_or_doubled(
    actions: list[tuple[str, int]],
) -> None:
    store, leases = fresh_store(), Leases(RolloutConfig(max_lost_leases=1000))
    workers = {f"w{n}": Worked(capacity=n + 1) for n in range(3)}
    done: Counter[tuple[str, int, int]] = Counter()
    queued = 0

    def demand(name: str) -> None:
        w = workers[name]
        tasks = [as_task(work) for work in w.held]
        told = make_demand(name, incarnation=w.incarnation, capacity=w.capacity, read=w.read, held=tasks)
        w.announced = w.capacity
        for work in leases.demand(told, 0, store):
            assert leases.retry(work, "lease", (0,), store)

    for name in workers:
        demand(name)
    for action, number in actions:
        name = f"w{number}"
        w = workers[name]
        if action == "give":
            leases.queue(Work(kind="train", group=queued, replica=0, order=queued), (0,), store)
            queued += 1
            free = [x for x in leases.workers.values() if x.free() > 0]
            found = leases.next_waiting(free, lambda _: {0: 0})
            assert (found is None) == (not free)
            if found is not None:
                work, chosen = found
                assert chosen.free() == max(x.free() for x in free if x.name != work.avoid or len(free) == 1)
                leases.lease(work, chosen, 10**9, store)
                given = workers[chosen.name]
                given.unread.append(work)
                assert len(given.unread) + len(given.held) <= given.announced, "never more than it said it can hold"
        elif action == "read" and w.unread:
            work = w.unread.pop(0)
            if work.incarnation == w.incarnation and work.worker == name:
                w.read = work.sequence + 1
                w.held.append(work)
        elif action == "finish" and w.held:
            done[w.held.pop(0).key] += 1
        elif action == "demand":
            demand(name)
        elif action == "restart":
            workers[name] = Worked(capacity=w.capacity, incarnation=w.incarnation + 1)
            demand(name)
        elif action == "resize":
            w.capacity = 1 + (w.capacity + number) % 4
        for worker in leases.workers.values():
            assert worker.issued - worker.read >= 0
            if worker.free() > 0:
                assert worker.held + worker.issued - worker.read < worker.capacity
    for name in workers:
        demand(name)
    held = {work.key for w in workers.values() for work in (*w.held, *w.unread) if work.worker}
    waiting = {work.key for work in leases.work.values() if not work.worker}
    leased = {work.key for work in leases.work.values() if work.worker}
    everything = {("train", n, 0) for n in range(queued)}
    assert everything == waiting | leased | set(done), "every piece waits, is leased, or was done"
    assert leased <= held | set(done)
    assert not waiting & held


# staleness and kept groups


def oldest_first(kept: Mapping[int, int]) -> list[int]:
    """As the order ``edf`` ranks them."""
    return sorted(kept, key=lambda g: (kept[g], g))


def brute_force(kept: dict[int, int], fresh: int, start: int, bound: int, batches: int) -> bool:
    """Whether some choice of batches uses every group before it is too old (the rest may wait)."""
    if any(version < start - bound for version in kept.values()):
        return False
    if batches == 0 or len(kept) < fresh:
        return len(kept) <= fresh or all(v >= start - bound for v in kept.values())
    return any(
        brute_force({g: v for g, v in kept.items() if g not in take}, fresh, start + 1, bound, batches - 1)
        for take in combinations(sorted(kept), fresh)
    )


@settings(max_examples=120, deadline=None)
@given(
    fresh=st.integers(1, 2), bound=st.integers(0, 2), versions=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    batches=st.integers(1, 3),
)  # fmt: skip
def test_earliest_last_chance_first_holds_whatever_any_other_order_holds(
    fresh: int, bound: int, versions: list[int], batches: int
) -> None:
    start = 5
    kept = {g: start - bound + min(v, bound) for g, v in enumerate(versions)}
    possible = brute_force(kept, fresh, start, bound, batches)
    rest, at = dict(kept), start
    for _ in range(batches):
        if stale(rest, at, bound) or len(rest) < fresh:
            break
        for group in chosen(oldest_first(rest), rest, [], fresh, at, bound):
            del rest[group]
        at += 1
    ours = not stale(rest, at, bound)
    assert ours or not possible, "if any order keeps all of them young enough, ours does"


@settings(max_examples=120, deadline=None)
@given(
    fresh=st.integers(1, 3), bound=st.integers(0, 3), kept=st.lists(st.integers(0, 4), max_size=7),
    waiting=st.lists(st.integers(0, 4), max_size=5), data=st.data(),
)  # fmt: skip
def test_fits_says_what_later_batches_could_not_hold(
    fresh: int, bound: int, kept: list[int], waiting: list[int], data: Any
) -> None:
    start = 4
    held = {g: max(start - bound, v) for g, v in enumerate(kept)}
    opened = [max(start - bound, v) for v in waiting]
    if len(held) < fresh:
        return
    take = data.draw(st.permutations(sorted(held)))[:fresh]
    left = [v for g, v in held.items() if g not in take] + opened
    holds = True
    for later in range(bound + 1):
        due = sum(v <= start - bound + later for v in left)
        taken = sum(held[g] <= start - bound + later for g in take)
        holds &= due <= later * fresh or taken == fresh
    assert fits(take, held, opened, fresh, start, bound) == holds


@settings(max_examples=80, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["open", "arrive", "take", "replay", "discard", "reload"]),
                             st.integers(0, 5)), max_size=30)
)  # fmt: skip
def test_kept_groups_are_those_of_their_records_in_any_order(moves: list[tuple[str, int]]) -> None:
    store, held = fresh_store(), KeptGroups()
    opened: dict[int, int] = {}
    arrived: dict[int, int] = {}
    over: set[int] = set()
    pool: dict[int, int] = {}
    highest = -1
    for move, number in moves:
        if move == "open":
            group = highest + 1
            assert held.opened(group, number, store)
            assert not held.opened(group, number, store), "a repeat"
            highest = group
            opened[group] = number
        elif move == "arrive":
            expected = number not in arrived and number not in over
            assert held.expects(number) == expected
            if expected:
                *members, group_record = make_members(number, oldest=number + 1)
                for member in members:
                    held.add_member(cast(Member, member), store)
                held.add_group(cast(Group, group_record), store)
                arrived[number] = number + 1
        elif move == "take" and held.kept:
            first = oldest_first(held.kept)[:2]
            taken = held.take(first, store, pooled=bool(number % 2))
            assert [t.group.group for t in taken] == first and all(t.use == 0 for t in taken)
            assert all([m.replica for m in t.members] == [0, 1] for t in taken)
            for group in first:
                del arrived[group]
                over.add(group)
                if number % 2:
                    pool[group] = 1
        elif move == "replay" and pool:
            again = list(held.pool)[:2]
            taken = held.replay(again, store)
            assert [t.use for t in taken] == [pool[g] for g in again]
            for group in again:
                pool[group] = pool.pop(group) + 1
        elif move == "discard" and number <= highest and number not in over:
            found = held.discard(number, store)
            assert (found is not None) == (number in arrived)
            arrived.pop(number, None)
            over.add(number)
        elif move == "reload":
            held = KeptGroups()
            held.load(store)
        assert held.open == {g: v for g, v in opened.items() if g not in arrived and g not in over}
        assert held.kept == {g: v for g, v in arrived.items() if g <= highest}
        assert held.early == {g: v for g, v in arrived.items() if g > highest}
        pooled = [(c.group.group, c.uses) for c in held.pooled()]
        assert pooled == list(pool.items()), "the longest unused in the pool comes first"
