"""Plans over random chains of manifests: whole, no dearer than the plain ways, around what is broken."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores.chain import Chain, Hop, MissingLink
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import NoSuchKey
from headrace.schemas.delta_layout import DeltaCorrupt, Layout
from headrace.schemas.delta_manifest import ShardRef, WeightManifest
from headrace.schemas.delta_merged import MergedDelta


class Written:
    """A chain of manifests in a store, with fulls and merged deltas where the dice put them; no objects behind them."""

    def __init__(self, folder: Path, seed: int, versions: int = 14, full_share: float = 0.2) -> None:
        self.dice = random.Random(seed)
        self.store = LocalStore(folder)
        self.chain = Chain(self.store, "first", "main")
        self.keys = self.chain.keys
        self.sha256: dict[int, str] = {}
        self.delta_cost: dict[int, int] = {}
        self.full_cost: dict[int, int] = {}
        self.numbers: list[int] = []
        number, newest_full = self.dice.randrange(3), -1
        for place in range(versions):
            parent = self.numbers[-1] if self.numbers else -1
            has_full = place == 0 or self.dice.random() < full_share
            newest_full = number if has_full else newest_full
            self._commit(number, parent, newest_full, has_full)
            self.numbers.append(number)
            number += self.dice.choice([1, 1, 1, 2, 5])  # versions may have gaps
        for _ in range(versions // 3):
            first, last = sorted(self.dice.sample(range(versions), 2))
            if last - first >= 2:
                self._merge(self.numbers[first], self.numbers[last])

    def _refs(self, kind: str, number: int) -> tuple[ShardRef, ...]:
        sizes = [self.dice.randrange(64, 3 << 20) for _ in range(self.dice.randint(1, 3))]
        return tuple(ShardRef(f"{self.keys.root}/{kind}/{number}/{i}", n, 64, "0f" * 16) for i, n in enumerate(sizes))

    def _commit(self, number: int, parent: int, newest_full: int, has_full: bool) -> None:
        manifest = WeightManifest(
            version=number, lineage=0, batch=number, parent=parent, parent_sha256=self.sha256.get(parent, ""),
            root_digest="01" * 16, layout_digest="02" * 16, newest_full=newest_full,
            delta=self._refs("delta", number) if parent >= 0 else (),
            full=self._refs("full", number) if has_full else (),
            changed=(1,), elements=2, attempt=str(self.dice.random()), published_ms=1,
        )  # fmt: skip
        data, self.sha256[number] = manifest.to_bytes()
        self.store.put(self.keys.manifest(number), data, create_only=True)
        self.delta_cost[number] = sum(ref.nbytes + (256 << 10) for ref in manifest.delta)
        self.full_cost[number] = sum(ref.nbytes + (256 << 10) for ref in manifest.full)

    def _merge(self, first: int, last: int) -> None:
        merged = MergedDelta(
            first=first, first_sha256=self.sha256[first], version=last, version_sha256=self.sha256[last],
            refs=self._refs("merged", last), published_ms=1,
        )  # fmt: skip
        self.store.put(self.keys.merged(last, first), merged.to_bytes())

    def plain_costs(self, target: int, base: int | None) -> list[int]:
        """What the two ways without merged deltas cost: from the newest full, and from the base."""
        way = [n for n in self.numbers if n <= target]
        full = next(n for n in reversed(way) if self.full_cost[n])
        costs = [self.full_cost[full] + sum(self.delta_cost[n] for n in way if n > full)]
        if base is not None and base < target:
            costs.append(sum(self.delta_cost[n] for n in way if n > base))
        return costs


def _check(plan: list[Hop], target: int, base: int | None) -> None:
    """A plan starts from nothing or from the base and leads, hop by hop, to its target."""
    assert plan[0].parent in ((-1,) if base is None else (-1, base))
    assert plan[-1].link.version == target
    for one, other in pairwise(plan):
        assert (other.parent, other.parent_sha256) == (one.link.version, one.link.sha256)
    assert [hop.way for hop in plan[1:]].count("full") == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_is_a_whole_way_and_no_dearer_than_the_plain_ones(tmp_path: Path, seed: int) -> None:
    written = Written(tmp_path, seed)
    for target in written.numbers:
        for base in [None, *written.dice.sample(written.numbers, 3)]:
            known = None if base is None else (base, written.sha256[base])
            plan = Chain(written.store, "first", "main").plan(target, known)
            if base == target:
                assert plan == []
                continue
            _check(plan, target, base)
            assert sum(hop.cost for hop in plan) <= min(written.plain_costs(target, base))


@pytest.mark.parametrize("seed", range(6))
def test_hops_that_turned_out_unusable_are_gone_around_until_none_is_left(tmp_path: Path, seed: int) -> None:
    written = Written(tmp_path, seed, versions=9, full_share=0.4)
    target = written.numbers[-1]
    without: set[str] = set()
    for _ in range(200):
        try:
            plan = written.chain.plan(target, None, without)
        except MissingLink as error:
            assert f"version {target}" in str(error)
            assert "publish a full version or restore the object" in str(error)
            break
        _check(plan, target, None)
        assert not without & {str(hop) for hop in plan}
        without.add(str(written.dice.choice(plan)))
    else:
        pytest.fail("a plan for ever")
    assert without


def test_a_base_that_is_not_on_the_chain_is_ignored(tmp_path: Path) -> None:
    written = Written(tmp_path, 1)
    target, other = written.numbers[-1], written.numbers[-2]
    expected = written.chain.plan(target)
    for base in ((other, "ab" * 32), (10**6, "ab" * 32), (-1, ""), (other + 10**6, written.sha256[other])):
        assert written.chain.plan(target, base) == expected
    assert all(hop.parent < 0 for hop in expected[:1])


def test_a_version_that_is_not_committed_is_missing(tmp_path: Path) -> None:
    written = Written(tmp_path, 1)
    with pytest.raises(NoSuchKey):
        written.chain.plan(10**6)


@pytest.mark.parametrize("damage", ["remove", "flip", "swap"])
def test_a_damaged_manifest_is_gone_around_or_ends_in_words(tmp_path: Path, damage: str) -> None:
    written = Written(tmp_path, 3, versions=8, full_share=0.0)
    target, middle = written.numbers[-1], written.numbers[4]
    key = written.keys.manifest(middle)
    if damage == "remove":
        written.store.delete(key)
    elif damage == "flip":
        written.store.put(key, written.store.get(key).replace(b"0f", b"1f", 1))
    else:
        written.store.put(key, written.store.get(written.keys.manifest(written.numbers[3])))
    for info in list(written.store.list(written.keys.merges)):
        written.store.delete(info.key)
    with pytest.raises(MissingLink, match=f"manifest {middle}"):
        Chain(written.store, "first", "main").plan(target)
    base = written.numbers[5]
    plan = Chain(written.store, "first", "main").plan(target, (base, written.sha256[base]))
    assert [hop.link.version for hop in plan] == written.numbers[6:]


def test_a_manifest_written_by_hand_forks_the_chain_and_is_refused(tmp_path: Path) -> None:
    written = Written(tmp_path, 4)
    number = written.numbers[2]
    link = written.chain.link(number, written.sha256[number])
    with pytest.raises(DeltaCorrupt, match="forked or the store was written by hand"):
        written.chain.link(number, "cd" * 32)
    assert written.chain.link(number) == link


@pytest.mark.parametrize(
    "hint", [None, b"", b"garbage", b"-5", b"999999999999999", b"1e3", "٣".encode(), b"0", b"100000"]
)
def test_the_head_is_found_whatever_the_hint_says(tmp_path: Path, hint: bytes | None) -> None:
    written = Written(tmp_path, 5)
    if hint is not None:
        written.store.put(written.keys.latest, hint)
    head = written.numbers[-1]
    chain = Chain(written.store, "first", "main")
    assert chain.head_version() == head
    assert chain.head_version(known=written.numbers[3]) == head
    assert chain.head_version(known=head) == head
    committed = chain.head()
    assert committed is not None
    assert (committed.version, committed.manifest_sha256) == (head, written.sha256[head])


def test_an_empty_store_has_no_head(tmp_path: Path) -> None:
    chain = Chain(LocalStore(tmp_path), "first", "main")
    assert (chain.head_version(), chain.head(), chain.versions()) == (-1, None, [])
    chain.store.put(chain.keys.latest, b"7")
    assert chain.head_version() == -1
    assert chain.pruned_below() == 0


@pytest.mark.parametrize(("text", "oldest"), [(b"7", 7), (b"", 0), (b"x", 0), (b"9" * 13, 0)])
def test_the_oldest_kept_version_is_a_number_or_nothing(tmp_path: Path, text: bytes, oldest: int) -> None:
    chain = Chain(LocalStore(tmp_path), "first", "main")
    chain.store.put(chain.keys.pruned, text)
    assert chain.pruned_below() == oldest


def test_other_objects_beside_the_manifests_are_no_versions(tmp_path: Path) -> None:
    written = Written(tmp_path, 6)
    for name in ("notes.txt", "12.json", "000000000001.json.tmp"):
        written.store.put(written.keys.manifests + name, b"x")
    assert written.chain.versions() == written.numbers
    assert written.chain.versions(after=written.numbers[4]) == written.numbers[5:]


def test_an_announced_manifest_is_kept_only_when_it_is_what_was_announced(tmp_path: Path) -> None:
    written = Written(tmp_path, 7)
    number = written.numbers[-1]
    data = written.store.get(written.keys.manifest(number))
    written.store.delete(written.keys.manifest(number))
    for version, sha256, body in (
        (number, "ab" * 32, data), (number + 1, written.sha256[number], data), (number, written.sha256[number], b"x"),
    ):  # fmt: skip
        written.chain.accept(version, sha256, body)
        with pytest.raises(NoSuchKey):
            written.chain.link(number)
    written.chain.accept(number, written.sha256[number], data)
    assert written.chain.link(number).sha256 == written.sha256[number]


@pytest.mark.parametrize("seed", range(4))
def test_every_way_to_a_version_is_listed(tmp_path: Path, seed: int) -> None:
    written = Written(tmp_path, seed)
    for number in written.numbers:
        link = written.chain.link(number)
        ways = written.chain.ways_to(link)
        assert {hop.way for hop in ways} >= {"full"} if link.manifest.full else True
        assert len({str(hop) for hop in ways}) == len(ways), "texts name hops"
        assert all(hop.parent >= number - 3 for hop in written.chain.ways_to(link, number - 3) if hop.way != "full")


def test_a_merged_delta_of_another_fork_does_not_hide_the_way(tmp_path: Path) -> None:
    written = Written(tmp_path, 8, versions=8, full_share=0.0)
    for info in list(written.store.list(written.keys.merges)):
        written.store.delete(info.key)
    middle, target = written.numbers[3], written.numbers[-1]
    foreign = MergedDelta(
        first=middle, first_sha256="ab" * 32, version=target, version_sha256=written.sha256[target],
        refs=(ShardRef("runs/first/main/merged/x", 64, 64, "0f" * 16),), published_ms=1,
    )  # fmt: skip
    written.store.put(written.keys.merged(target, middle), foreign.to_bytes())
    plan = Chain(written.store, "first", "main").plan(target)
    _check(plan, target, None)
    assert [hop.way for hop in plan[1:]] == ["delta"] * 7


@pytest.mark.parametrize("damage", ["remove", "flip"])
def test_merged_deltas_lead_over_a_manifest_that_is_damaged(tmp_path: Path, damage: str) -> None:
    written = Written(tmp_path, 9, versions=8, full_share=0.0)
    for info in list(written.store.list(written.keys.merges)):
        written.store.delete(info.key)
    first, middle, target = (written.numbers[place] for place in (0, 4, 7))
    for last in (middle, target):
        written._merge(first, last)
    key = written.keys.manifest(middle)
    data = written.store.get(key)
    written.store.delete(key)
    if damage == "flip":
        written.store.put(key, data[:-9])
    plan = Chain(written.store, "first", "main").plan(target)
    assert [str(hop) for hop in plan] == [f"full of version {first}", f"merged delta from version {first} to {target}"]


def test_a_manifest_that_was_overwritten_and_put_back_is_read_again(tmp_path: Path) -> None:
    written = Written(tmp_path, 4, versions=5, full_share=0.0)
    number, target = written.numbers[3], written.numbers[-1]
    key = written.keys.manifest(number)
    data = written.store.get(key)
    ghost = replace(WeightManifest.from_bytes(data)[0], attempt="a replaced trainer's")
    written.store.put(key, ghost.to_bytes()[0])
    reader = Chain(written.store, "first", "main")
    assert reader.link(number).manifest == ghost
    with pytest.raises(DeltaCorrupt, match="forked"):
        reader.link(number, written.sha256[number])
    written.store.put(key, data)
    _check(reader.plan(target), target, None)


def test_a_manifest_or_a_layout_under_the_key_of_another_is_refused(tmp_path: Path) -> None:
    written = Written(tmp_path, 10)
    one, other = written.numbers[2:4]
    written.store.put(written.keys.manifest(one), written.store.get(written.keys.manifest(other)))
    with pytest.raises(DeltaCorrupt, match=f"is the manifest of version {other}"):
        Chain(written.store, "first", "main").link(one)
    layouts = [Layout.of({name: np.zeros(8, np.uint16)}, {name: "bfloat16"}) for name in "ab"]
    written.store.put(written.keys.layout(layouts[0].digest), layouts[1].to_bytes())
    with pytest.raises(DeltaCorrupt, match=f"has digest {layouts[1].digest}"):
        written.chain.layout(layouts[0].digest)
