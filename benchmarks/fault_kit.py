"""What the fault run is made of: weights whose truth anybody can compute, a store that fails on order, forked writers.

A version's weights are a pure function of its number and lineage, so a reader's snapshot is checked without trusting
any object in the store. Processes are forked and die by SIGKILL, in the middle of a call where that is asked for.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.store import ObjectInfo, ObjectStore
from headrace.pipeline.delta_to_worker import WeightReader
from headrace.schemas.delta_layout import DeltaError, Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.trainers.step_to_delta import DeltaPublisher, VersionCommits, VersionTaken
from headrace.trainers.version_share import VersionShare

RUN, POLICY = "faults", "main"
SEGMENT = 1024
Weights = dict[str, NDArray[np.uint16]]
_SHAPES = {"embed": (96, 24), "q": (64, 40), "norm": (24,), "down": (70, 31)}


@lru_cache(maxsize=1)
def _first() -> Weights:
    rng = np.random.default_rng(11)
    return {n: (rng.standard_normal(s, np.float32).view(np.uint32) >> 16).astype(np.uint16) for n, s in _SHAPES.items()}


@lru_cache(maxsize=4096)
def truth(version: int, lineage: int) -> Weights:
    """The weights of a version as the writer of a lineage makes them."""
    rng = np.random.default_rng((version, lineage))
    weights = {name: array.copy() for name, array in _first().items()}
    for array in weights.values():
        at = rng.random(array.shape) < 0.04
        array[at] += rng.integers(0, 9, int(at.sum()), np.uint16)
    return weights


@lru_cache(maxsize=1)
def layout() -> Layout:
    """The table of the weights, with many small segments."""
    return Layout.of(_first(), dict.fromkeys(_SHAPES, "bfloat16"), segment_bytes=SEGMENT)


@dataclass
class FaultStore:
    """A store in front of another one: ``before`` and ``after`` see every call and may raise or end the process;
    ``damage`` may change what a get returns; ``blind`` takes the condition from create-only puts."""

    inner: ObjectStore
    before: Callable[[str, str], None] = lambda verb, key: None
    after: Callable[[str, str], None] = lambda verb, key: None
    damage: Callable[[str, bytes], bytes] = lambda key, data: data
    blind: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The store behind."""
        return self.inner.url

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """See ``ObjectStore.put``."""
        self._call("put", key, lambda: self.inner.put(key, data, create_only=create_only and not self.blind))

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        data: bytes = self._call("get", key, lambda: self.inner.get(key, start, end))
        return self.damage(key, data)

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore.head``."""
        info: ObjectInfo = self._call("head", key, lambda: self.inner.head(key))
        return info

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore.list``."""
        return iter(self._call("list", prefix, lambda: list(self.inner.list(prefix, start_after))))

    def delete(self, key: str) -> None:
        """See ``ObjectStore.delete``."""
        self._call("delete", key, lambda: self.inner.delete(key))

    def sweep_unfinished(self, prefix: str, before: float) -> int:
        """See ``ObjectStore.sweep_unfinished``."""
        return self.inner.sweep_unfinished(prefix, before)

    def _call(self, verb: str, key: str, call: Callable[[], Any]) -> Any:
        self.calls.append((verb, key))
        self.before(verb, key)
        answer = call()
        self.after(verb, key)
        return answer


def nth_call(number: int, act: Callable[[], None], verbs: tuple[str, ...] = ("put",)) -> Callable[[str, str], None]:
    """A hook that acts at the nth call of some verbs (from 0)."""
    seen = [-1]

    def hook(verb: str, key: str) -> None:
        seen[0] += verb in verbs
        if seen[0] == number and verb in verbs:
            act()

    return hook


def die() -> None:
    """End this process as a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], int]) -> int:
    """Start ``work`` in a process of its own; its process id. The exit status is what it returns, 99 if it raises."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a forked process: its exit status, -9 when it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def publisher(store: ObjectStore, full_every: int = 4) -> DeltaPublisher:
    """A writer of the policy."""
    return DeltaPublisher(store, RUN, POLICY, layout(), full_every)


def advance(store: ObjectStore, versions: int, lineage: int = 0, full_every: int = 4) -> CommittedVersion:
    """Resume from the store's head and publish, as a restarted trainer does; the head at the end."""
    writer = publisher(store, full_every)
    head = writer.head()
    while versions:
        number = head.version + 1 if head else 0
        try:
            head = writer.publish(truth(number, lineage), version=number, lineage=lineage, batch=number, parent=head)
            versions -= 1
        except VersionTaken as taken:
            head = taken.head
    assert head is not None
    return head


def advance_ranks(store: ObjectStore, versions: int, ranks: int, lineage: int = 0) -> CommittedVersion:
    """Resume from the store's head and publish as a trainer of several ranks does, each with its share."""
    commits = VersionCommits(store, RUN, POLICY, layout(), 4)
    shares = [VersionShare(store, commits.chain.keys, layout(), rank=rank, ranks=ranks) for rank in range(ranks)]
    head = commits.chain.head()
    if head is not None:
        image = load_image(commits.chain, head.version)
        for share in shares:
            share.seed(head, image.data, image.digests)
    for _ in range(versions):
        number = head.version + 1 if head else 0
        image_bytes = layout().image()
        layout().fill(image_bytes, truth(number, lineage))
        draft = commits.draft(number, lineage, head)
        for share in shares:
            share.room()[:] = image_bytes[share.span]
        head = commits.commit(commits.manifest(draft, lineage, number, [share.upload(draft) for share in shares]))
        for share in shares:
            share.promote(head)
    assert head is not None
    return head


@dataclass
class Tally:
    """What came out: faults injected, snapshots that were not what their version is, readers that did not converge."""

    faults: int = 0
    wrong_served: int = 0
    diverged: int = 0
    notes: list[str] = field(default_factory=list)

    def check(self, reader: WeightReader, where: str) -> None:
        """Compare what a reader serves with the truth of the version and lineage that it names."""
        if reader.version < 0:
            return
        snapshot = reader.snapshot()
        true = truth(snapshot.version.version, snapshot.version.lineage)
        if any(not np.array_equal(true[name], array) for name, array in snapshot.weights.items()):
            self.wrong_served += 1
            self.notes.append(f"{where}: version {snapshot.version.version} is served with other weights")

    def converge(self, store: ObjectStore, readers: list[WeightReader], where: str) -> None:
        """Without faults every reader must come to the store's head, and serve it rightly."""
        head = publisher(store).head()
        for reader in [*readers, WeightReader(store, RUN, POLICY)]:
            try:
                reader.fetch()
            except DeltaError as error:
                self.notes.append(f"{where}: a reader at {reader.version} is stuck: {error}")
            if head is None or reader.version < head.version:
                self.diverged += 1
                self.notes.append(f"{where}: a reader is at {reader.version}, the head is {head and head.version}")
            self.check(reader, where)
