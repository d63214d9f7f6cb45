"""Weights under faults: what is killed, raced, damaged, lost or pruned never makes a reader serve wrong weights.

Writers, readers, compactors and prunings run as forked processes on one store and die by SIGKILL at every step of
their work; others race, freeze and wake up too late, or see damaged answers. After each fault every reader's snapshot
is compared with the truth, and once the faults stop every reader must come to the head.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from benchmarks.delta_fuzz import fuzz
from benchmarks.fault_kit import (
    POLICY,
    RUN,
    FaultStore,
    Tally,
    advance,
    advance_ranks,
    die,
    ended,
    forked,
    nth_call,
    publisher,
    truth,
)
from benchmarks.form import Figure, main
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.probe import probe_create_only
from headrace.connectors.stores.store import ObjectStore, StoreError, StoreUnavailable
from headrace.pipeline.delta_compact import Compactor
from headrace.pipeline.delta_prune import prune
from headrace.pipeline.delta_to_worker import WeightReader, verify_chain
from headrace.schemas.delta_layout import DeltaError
from headrace.trainers.step_to_delta import VersionTaken

Scenario = Callable[[Path, Tally, bool], None]


def _reader(store: ObjectStore) -> WeightReader:
    return WeightReader(store, RUN, POLICY)


def _settle(tally: Tally, store: ObjectStore, readers: list[WeightReader], where: str) -> None:
    """One version more without faults; then every reader converges and the whole chain verifies."""
    advance(store, 1)
    tally.converge(store, readers, where)
    for one in verify_chain(store, RUN, POLICY):
        if one.problem:
            tally.diverged += 1
            tally.notes.append(f"{where}: version {one.version} cannot be rebuilt: {one.problem}")


def _advanced(store: ObjectStore, versions: int, lineage: int) -> int:
    """What a forked writer does."""
    advance(store, versions, lineage)
    return 0


def _away() -> NoReturn:
    raise StoreUnavailable("connection reset")


def killed_publishing(folder: Path, tally: Tally, quick: bool) -> None:
    """A writer dies before and after every put of three publishes, another resumes; twice in a row each."""
    for moment in ("before", "after"):
        for number in range(0, 12, 4 if quick else 1):
            store = LocalStore(folder / f"{moment}{number}")
            reader = _reader(store)
            advance(store, 2)
            reader.fetch()
            for lineage in (1, 2):
                hurt = FaultStore(store, **{moment: nth_call(number, die)})  # type: ignore[arg-type]
                status = ended(forked(partial(_advanced, hurt, 4, lineage)))
                tally.faults += status == -signal.SIGKILL
                with suppress(DeltaError):
                    reader.fetch()
                tally.check(reader, f"publish killed {moment} put {number}")
            _settle(tally, store, [reader], f"publish killed {moment} put {number}")


def killed_reading(folder: Path, tally: Tally, quick: bool) -> None:
    """A reader's process dies at every get; the next one starts from nothing and serves the truth."""
    store = LocalStore(folder)
    head = advance(store, 7)
    for number in range(0, 12, 4 if quick else 1):
        hurt = FaultStore(store, before=nth_call(number, die, ("get", "head", "list")))

        def read(hurt: FaultStore = hurt) -> int:
            inner, one = Tally(), _reader(hurt)
            one.fetch(2)
            inner.check(one, "")
            one.fetch()
            inner.check(one, "")
            return inner.wrong_served + 10 * (one.version != head.version)

        status = ended(forked(read))
        tally.faults += status == -signal.SIGKILL
        tally.wrong_served += status in (1, 2)
        tally.diverged += status >= 10
        tally.converge(store, [], f"reader killed at call {number}")


def broken_store(folder: Path, tally: Tally, quick: bool) -> None:
    """Every call of writer and reader fails once, before or after it took effect; the same call is repeated."""
    for moment in ("before", "after"):
        for number in range(0, 26, 6 if quick else 1):
            store = LocalStore(folder / f"{moment}{number}")
            verbs = ("put", "get", "head", "list")
            hurt = FaultStore(store, **{moment: nth_call(number, _away, verbs)})  # type: ignore[arg-type]
            reader, writer = _reader(hurt), publisher(hurt)
            head = None
            while head is None or head.version < 5:
                where = f"call {number} failed {moment} it took effect"
                version = head.version + 1 if head else 0
                try:
                    head = writer.publish(truth(version, 0), version=version, lineage=0, batch=version, parent=head)
                    reader.fetch()
                except StoreUnavailable:
                    tally.faults += 1
                tally.check(reader, where)
            _settle(tally, store, [reader], f"call {number} failed {moment} it took effect")


def damaged_answers(folder: Path, tally: Tally, quick: bool) -> None:
    """Bits flip, answers are cut, zeroed or those of another object; once or for a whole fetch."""
    store = LocalStore(folder)
    advance(store, 6)
    rng = np.random.default_rng(3)
    foreign = store.get(next(info.key for info in store.list(f"runs/{RUN}/{POLICY}/delta/3/")))
    kinds: list[Callable[[bytearray], bytes]] = [
        lambda data: bytes(data[: int(rng.integers(0, len(data)))]),
        lambda data: bytes(len(data)),
        lambda data: foreign[: len(data)],
    ]

    def flip(data: bytearray) -> bytes:
        data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
        return bytes(data)

    kinds.append(flip)
    for number in range(12 if quick else 60):
        left = [1 if number % 2 else 40]

        def damage(key: str, data: bytes, number: int = number, left: list[int] = left) -> bytes:
            if not data or left[0] <= 0 or rng.random() < 0.5:
                return data
            left[0] -= 1
            return kinds[number % 4](bytearray(data))

        hurt = FaultStore(store)
        reader = _reader(hurt)
        reader.fetch(int(rng.integers(0, 4)))
        hurt.damage = damage
        tally.faults += 1
        with suppress(DeltaError, StoreError):
            reader.fetch()
        tally.check(reader, f"damaged answers {number}")
        hurt.damage = lambda key, data: data
        tally.converge(store, [reader], f"damaged answers {number}")


def two_writers(folder: Path, tally: Tally, quick: bool) -> None:
    """Processes race for the same versions; one wins each, losers go on from the head."""
    for number in range(2 if quick else 8):
        store = LocalStore(folder / str(number))
        advance(store, 1)
        reader = _reader(store)
        reader.fetch()
        writers = [forked(partial(_advanced, store, 5, who)) for who in range(1, 4)]
        tally.faults += len(writers)
        deadline = time.monotonic() + 60
        while (publisher(store).head().version < 15) and time.monotonic() < deadline:  # type: ignore[union-attr]
            with suppress(DeltaError):
                reader.fetch()
            tally.check(reader, "writers race")
        statuses = [ended(child) for child in writers]
        tally.diverged += sum(status != 0 for status in statuses)
        _settle(tally, store, [reader], "writers race")


def frozen_writer(folder: Path, tally: Tally, quick: bool) -> None:
    """A writer freezes at every put, another commits the version, the first wakes up and may not disturb it."""
    for number in range(0, 5, 2 if quick else 1):
        store = LocalStore(folder / str(number))
        advance(store, 2)
        reader = _reader(store)
        reader.fetch()
        freeze = nth_call(number, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        hurt = FaultStore(store, before=freeze)

        def zombie(hurt: FaultStore = hurt, store: LocalStore = store) -> int:
            writer, head = publisher(hurt), publisher(store).head()
            assert head is not None
            for version in (head.version + 1, head.version + 2, head.version + 3):
                try:
                    head = writer.publish(truth(version, 1), version=version, lineage=1, batch=version, parent=head)
                except VersionTaken:
                    return 0
            return 0

        child = forked(zombie)
        os.waitpid(child, os.WUNTRACED)
        tally.faults += 1
        advance(store, 2, 2)
        reader.fetch()
        os.kill(child, signal.SIGCONT)
        tally.diverged += ended(child) != 0
        tally.check(reader, f"writer frozen at put {number}")
        _settle(tally, store, [reader], f"writer frozen at put {number}")


def announcements(folder: Path, tally: Tally, quick: bool) -> None:
    """Announcements are lost, doubled, late, of versions nobody committed, or name another manifest."""
    store = LocalStore(folder)
    rng = np.random.default_rng(8)
    reader = _reader(store)
    known: list[tuple[int, str]] = []
    for number in range(10 if quick else 40):
        head = advance(store, 1)
        known.append((head.version, head.manifest_sha256))
        version, sha256 = known[int(rng.integers(0, len(known)))]
        fate = number % 5
        tally.faults += 1
        with suppress(DeltaError, StoreError):
            if fate == 1:
                reader.fetch(version, sha256)
                reader.fetch(version, sha256)
            elif fate == 2:
                reader.fetch(version + 1000)
            elif fate == 3:
                reader.fetch(version, "0" * 64)
            elif fate == 4 and reader.head_version(hint=version) > reader.version:
                reader.fetch()
        tally.check(reader, f"announcement {fate}")
    tally.converge(store, [reader], "announcements")


def crash_applying(folder: Path, tally: Tally, quick: bool) -> None:
    """An exception in the middle of building an image leaves the loaded version; the next fetch goes on."""
    store = LocalStore(folder)
    reader = _reader(store)
    for number, error in enumerate([MemoryError, KeyboardInterrupt] * (2 if quick else 6)):
        advance(store, 1)

        def crash(error: type[BaseException] = error) -> None:
            raise error

        hurt = FaultStore(store, after=nth_call(number % 3, crash, ("get",)))
        broken = _reader(hurt)
        tally.faults += 1
        with suppress(MemoryError, KeyboardInterrupt):
            broken.fetch()
        tally.check(broken, "exception in a fetch")
        with suppress(MemoryError, KeyboardInterrupt):
            reader.fetch()
        tally.converge(store, [broken, reader], "exception in a fetch")


def wrong_base(folder: Path, tally: Tally, quick: bool) -> None:
    """Bits of a loaded image flip in memory; chains fork under a reader."""
    store = LocalStore(folder)
    advance(store, 2)
    reader = _reader(store)
    rng = np.random.default_rng(4)
    for _ in range(3 if quick else 10):
        reader.fetch()
        held = reader._image
        assert held is not None
        held.data.flags.writeable = True
        held.data[int(rng.integers(0, held.data.size // 64)) * 64] ^= 1
        tally.faults += 1
        advance(store, 1)
        reader.fetch()
        tally.check(reader, "a bit of the base flipped")
    other = LocalStore(folder / "fork")
    advance(other, 20, 5)
    hurt = FaultStore(store)
    moved = _reader(hurt)
    moved.fetch()
    hurt.inner = other
    tally.faults += 1
    moved.fetch()
    tally.check(moved, "the chain forked")
    tally.converge(other, [moved], "the chain forked")


def pruned_chain(folder: Path, tally: Tally, quick: bool) -> None:
    """Objects and manifests of old versions vanish before and while readers need them."""
    for number in range(0, 14, 4 if quick else 1):
        store = LocalStore(folder / str(number))
        reader = _reader(store)
        advance(store, 2)
        reader.fetch()
        advance(store, 9)
        old = [info.key for info in store.list(f"runs/{RUN}/{POLICY}/") if _version_in(info.key) in range(8)]

        def prune(old: list[str] = old, store: LocalStore = store) -> None:
            for key in old:
                store.delete(key)

        hurt = FaultStore(store, before=nth_call(number, prune, ("get", "list")))
        late = _reader(hurt)
        tally.faults += 1
        for one in (late, reader):
            with suppress(DeltaError, StoreError):
                one.fetch()
            tally.check(one, f"pruned at call {number}")
        prune()
        tally.converge(store, [late, reader], f"pruned at call {number}")


def killed_upkeep(folder: Path, tally: Tally, quick: bool) -> None:
    """Compactor and pruning die at every put and delete, or run while readers follow; what they leave serves all."""
    for number in range(0, 60, 12 if quick else 2):
        store = LocalStore(folder / str(number))
        readers = [_reader(store) for _ in range(3)]
        for reader, stay in zip(readers, (2, 9, 4), strict=True):
            advance(store, stay)
            reader.fetch()
        advance(store, 3)
        hurt = FaultStore(store, before=nth_call(number // 2, die, ("put", "delete", "list")))

        def upkeep(hurt: FaultStore = hurt) -> int:
            for _ in range(2):
                Compactor(hurt, RUN, POLICY).run()
                prune(hurt, RUN, POLICY, grace_seconds=0, orphan_seconds=0)
            return 0

        child = forked(upkeep)
        for reader in readers[: number % 3]:
            with suppress(DeltaError):
                reader.fetch()
            tally.check(reader, f"upkeep killed at call {number}")
        tally.faults += ended(child) == -signal.SIGKILL
        Compactor(store, RUN, POLICY).run()
        prune(store, RUN, POLICY, grace_seconds=0, orphan_seconds=0)
        _settle(tally, store, readers, f"upkeep killed at call {number}")


def killed_ranks(folder: Path, tally: Tally, quick: bool) -> None:
    """A trainer of several ranks dies at every put, also between its ranks; one with other ranks resumes."""
    for number in range(0, 24, 6 if quick else 1):
        store = LocalStore(folder / str(number))
        reader = _reader(store)
        advance_ranks(store, 2, ranks=1 + number % 4)
        reader.fetch()
        hurt = FaultStore(store, before=nth_call(number, die))

        def train(hurt: FaultStore = hurt, ranks: int = 2 + number % 3) -> int:
            advance_ranks(hurt, 6, ranks, lineage=1)
            return 0

        tally.faults += ended(forked(train)) == -signal.SIGKILL
        with suppress(DeltaError):
            reader.fetch()
        tally.check(reader, f"ranks killed at put {number}")
        advance_ranks(store, 2, ranks=3, lineage=2)
        _settle(tally, store, [reader], f"ranks killed at put {number}")


def _version_in(key: str) -> int:
    parts = key.split("/")
    text = parts[4] if parts[3] in ("delta", "full") else parts[4].removesuffix(".json") if len(parts) > 4 else ""
    return int(text) if parts[3] in ("delta", "full", "manifest") and text.isdigit() else -1


def no_conditions(folder: Path, tally: Tally, quick: bool) -> None:
    """A store that ignores the condition: the probe finds it; assumed to be sound, it still serves nothing wrong."""
    for number in range(2 if quick else 8):
        store = LocalStore(folder / str(number))
        blind = FaultStore(store, blind=True)
        tally.faults += 1
        if probe_create_only(blind, rounds=2).create_only:
            tally.wrong_served += 1
            tally.notes.append("the probe accepts a store that ignores the condition")
        advance(blind, 2)
        reader = _reader(blind)
        reader.fetch()
        writers = [forked(partial(_advanced, blind, 3, who)) for who in (1, 2)]
        tally.faults += len(writers)
        for _ in range(20):
            with suppress(DeltaError):
                reader.fetch()
            tally.check(reader, "writers race without conditions")
        for child in writers:
            ended(child)
        # Two histories may be mixed beyond repair; the surviving writer's next full is a new start for everybody.
        head = publisher(store).head()
        version = head.version + 1 if head else 0
        fresh = publisher(store)
        fresh.publish(truth(version, 0), version=version, lineage=0, batch=version, parent=None, kind="full")
        tally.converge(store, [reader], "writers raced without conditions")


SCENARIOS: tuple[Scenario, ...] = (
    killed_publishing,
    killed_reading,
    broken_store,
    damaged_answers,
    two_writers,
    frozen_writer,
    announcements,
    crash_applying,
    wrong_base,
    pruned_chain,
    killed_upkeep,
    killed_ranks,
    no_conditions,
)


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    whole = Tally()
    for scenario in SCENARIOS:
        tally = Tally()
        with tempfile.TemporaryDirectory() as folder:
            scenario(Path(folder), tally, given.quick)
        for note in tally.notes[:20]:
            print(f"{scenario.__name__}: {note}")
        yield Figure(f"faults_{scenario.__name__}", tally.faults, "", anchor=(scenario.__doc__ or "").split(";")[0])
        whole.faults += tally.faults
        whole.wrong_served += tally.wrong_served
        whole.diverged += tally.diverged
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(Path(folder), 1_000 if given.quick else 10_400)
    whole.wrong_served += found.applied
    yield Figure("fuzzed", found.deltas, "", None if given.quick else 10_000, True, "damaged and forged deltas")
    yield Figure("fuzzed_applied", found.applied, "", 0, False, "became weights")
    yield Figure("fuzzed_crashed", found.crashed, "", 0, False, "raised something else than a DeltaError")
    yield Figure("fuzzed_grown_mb", found.grown_mb, "MB", 48, False, "growth of the process over all of them")
    yield Figure("faults", whole.faults, "", None if given.quick else 100, True, "injected")
    yield Figure("wrong_served", whole.wrong_served, "", 0, False, "snapshots that are not their version's weights")
    yield Figure("diverged", whole.diverged, "", 0, False, "readers or writers that did not come to the head")


if __name__ == "__main__":
    main(__doc__, measure)
