"""Which offloaded arrays go: by the ledger, the checkpoints, replay and age; never what may be read again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.blob_sweep import Needs, needs_of, sweep_blobs
from headrace.schemas.ids import blob_key
from headrace.schemas.records import Batched, Closed, Kept, Opened, Record, Trained


def opened(group: int, policy: int = 0) -> Opened:
    return Opened(policy=policy, group=group, stream="main", prompt_id="p", min_version=0, cap=99)


def kept(group: int) -> Kept:
    return Kept(policy=0, group=group, reward_mean=0.0, reward_std=1.0, raw_mean=0.0, complete=True)


def closed(group: int, policy: int = 0) -> Closed:
    return Closed(policy=policy, group=group, reason="filtered", by="assemble")


def trained(groups: dict[int, int]) -> list[Record]:
    """Groups by batch, all trained."""
    out: list[Record] = []
    for batch in sorted(set(groups.values())):
        mine = [g for g, b in groups.items() if b == batch]
        out += [*map(opened, mine), *map(kept, mine), Batched(policy=0, batch=batch, groups=mine)]
        out.append(Trained(policy=0, batch=batch, version=batch, first=True))
    return out


def test_open_groups_stay_and_closed_ones_go() -> None:
    needs = needs_of([[opened(1), opened(2), closed(2), opened(3), kept(3)]], {}, {}, finished=False)
    assert (needs.open, needs.ended) == ({1, 3}, {2})


def test_a_group_that_one_policy_still_needs_stays() -> None:
    needs = needs_of([[opened(1), closed(1)], [opened(1, 1)]], {}, {}, finished=False)
    assert (needs.open, needs.ended) == ({1}, frozenset())
    needs = needs_of([[opened(1), closed(1)], [opened(1, 1), closed(1, 1)]], {}, {}, finished=False)
    assert needs.ended == {1}


def test_a_trained_group_stays_until_no_checkpoint_leads_back_to_its_batch() -> None:
    ledger = trained({1: 1, 2: 2, 3: 3})
    assert needs_of([ledger], {}, {}, finished=False).ended == frozenset(), "without a checkpoint all is trained again"
    assert needs_of([ledger], {0: 2}, {}, finished=False).ended == {1, 2}
    assert needs_of([ledger], {0: 2}, {0: 1}, finished=False).ended == {1}, "batch 3 may hold group 2 again"


@given(st.dictionaries(st.integers(0, 20), st.integers(1, 6)), st.integers(0, 7), st.integers(0, 3))
def test_nothing_that_a_resumed_trainer_reads_ever_goes(groups: dict[int, int], floor: int, reach: int) -> None:
    needs = needs_of([trained(groups)], {0: floor}, {0: reach}, finished=False)
    for group, batch in groups.items():
        uses = range(batch, batch + reach + 1)
        assert (group in needs.ended) == (not any(use > floor for use in uses))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    now = time.time()
    for group, age in ((1, 5000), (2, 5000), (3, 10), (9, 5000), (10, 1000)):
        for attempt in (0, 1):
            key = blob_key("run", group, 0, attempt)
            store.put(key, b"12345")
            os.utime(next(tmp_path.rglob(f"{group}/0/{attempt}")), (now - age, now - age))
    store.put(blob_key("other", 2, 0, 0), b"of another run")
    store.put("runs/run/main/manifest/000000000001.json", b"weights")
    return store


NEEDS = Needs(open=frozenset({1}), ended=frozenset({2, 3}), finished=False)


def groups_in(store: LocalStore) -> set[str]:
    return {info.key.split("/")[3] for info in store.list("runs/run/blobs/")}


def test_a_sweep_takes_ended_groups_and_old_orphans_and_nothing_else(store: LocalStore) -> None:
    asked = sweep_blobs(store, "run", NEEDS, orphan_seconds=3000, dry=True)
    assert groups_in(store) == {"1", "2", "3", "9", "10"}
    done = sweep_blobs(store, "run", NEEDS, orphan_seconds=3000)
    assert done == asked
    assert groups_in(store) == {"1", "3", "10"}
    assert (done.objects, done.nbytes, done.orphans, done.kept) == (4, 20, 2, 6)
    assert len(list(store.list("runs/other/"))) == 1
    assert len(list(store.list("runs/run/main/"))) == 1
    assert sweep_blobs(store, "run", NEEDS, orphan_seconds=3000).objects == 0


def test_of_a_finished_run_all_arrays_go_but_the_newest(store: LocalStore) -> None:
    finished = Needs(open=frozenset(), ended=frozenset(), finished=True)
    sweep_blobs(store, "run", finished, orphan_seconds=1e9)
    assert groups_in(store) == {"3"}
