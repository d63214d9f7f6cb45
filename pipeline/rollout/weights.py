"""Follows the published weights of the hosted policies in a thread: announcements are hints, the store is the truth.

Goes in: a store and the topic ``deltas``; comes out: verified snapshots for the worker's thread to install between
two decode steps. A store that is away, or a version that does not verify, leaves the worker on its version and is
said once.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from confluent_kafka import Consumer, KafkaException, TopicPartition

from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.stores.chain import NothingCommitted
from headrace.connectors.stores.store import NoSuchKey, ObjectStore, StoreError, StoreRefused
from headrace.pipeline.delta_to_worker import Snapshot, WeightReader
from headrace.schemas.delta_layout import DeltaError
from headrace.schemas.errors import HeadraceError, UndecodableRecord
from headrace.schemas.records import Head

__all__ = ("WeightFeed",)

_WARM_SECONDS = 10.0
"""Stores close connections that are idle for longer; between two versions they are used a little."""


class WeightFeed:
    """Snapshots of the policies of a run, newest only.

    names: policies in the order of their index. poll_seconds: longest time between two looks at the store. host_copy:
    keep weights in memory as the base of the next version (see ``WeightReader``). follow: bring what is newest;
    without, only what is asked for.
    """

    def __init__(
        self,
        store: ObjectStore,
        connection: Connection,
        names: list[str],
        client_id: str,
        *,
        poll_seconds: float,
        host_copy: bool = True,
        follow: bool = True,
    ) -> None:
        self._store = store
        self._connection = connection
        self._names = names
        self._client_id = client_id
        self._poll_seconds = poll_seconds
        self._readers = [WeightReader(store, connection.run, name, host_copy=host_copy) for name in names]
        self._fresh: SimpleQueue[tuple[int, Snapshot]] = SimpleQueue()
        self._told: dict[int, str] = {}
        self._asked: SimpleQueue[tuple[int, int | None]] = SimpleQueue()
        self._refused: SimpleQueue[tuple[int, int, str]] = SimpleQueue()
        self._stop = threading.Event()
        self._started = False
        work = self._follow if follow else self._serve
        self._thread = threading.Thread(target=work, name="weights", daemon=True)
        self.fetch_seconds = 0.0
        """Time spent in fetching so far."""

    def first(self, stopped: Callable[[float], bool]) -> list[Snapshot]:
        """The head of every policy, waiting for version 0; empty when ``stopped`` (asked with a time to wait) says so.

        Raises StoreRefused and what a damaged chain raises: a worker joins only with verified weights.
        """
        out: list[Snapshot] = []
        for policy, reader in enumerate(self._readers):
            while True:
                try:
                    reader.fetch()
                    break
                except StoreRefused:
                    raise
                except NothingCommitted:
                    self._tell(policy, f"waiting for version 0 of policy {self._names[policy]} in {self._store.url}")
                except StoreError as error:
                    self._tell(policy, f"waiting for the object store: {error}")
                if stopped(0.1):
                    return []
            self._told.pop(policy, "")
            out.append(reader.snapshot())
        return out

    def start(self) -> None:
        """Follow from here on."""
        self._thread.start()
        self._started = True

    def ask(self, policy: int, version: int | None) -> None:
        """Bring a version, None: the newest; for feeds that do not follow."""
        self._asked.put((policy, version))

    def refused(self) -> list[tuple[int, int, str]]:
        """Policy, version and reason of what was asked for and cannot be had; each once."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self._refused.get_nowait())
        return found

    def take(self) -> list[tuple[int, Snapshot]]:
        """Policies with a newer version than taken before, with its snapshot; does not wait.

        Raises HeadraceError once the thread has ended by a failure of its own: a worker that is never told of new
        weights would hold its tasks to their deadlines.
        """
        if self._started and not self._thread.is_alive() and not self._stop.is_set():
            raise HeadraceError("the thread that fetches weights has ended; its traceback stands above")
        newest: dict[int, Snapshot] = {}
        while True:
            try:
                policy, snapshot = self._fresh.get_nowait()
            except Empty:
                return list(newest.items())
            newest[policy] = snapshot

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        consumer = self._connection.consumer(f"{self._client_id}.deltas", auto_offset_reset="latest")
        topic = self._connection.topic("deltas")
        consumer.assign([TopicPartition(topic, p) for p in range(len(self._names))])
        looked = warmed = 0.0
        while not self._stop.is_set():
            try:
                heads = _newest(consumer, self._connection.run, min(self._poll_seconds, 0.2))
            except KafkaException as error:
                sys.stderr.write(f"weights: announcements cannot be read ({error}); asking the store\n")
                heads = {}
                self._stop.wait(self._poll_seconds)
            if time.monotonic() - warmed > _WARM_SECONDS:
                warmed = time.monotonic()
                for reader in self._readers:
                    reader.keep_warm()
            if not heads and time.monotonic() - looked < self._poll_seconds:
                continue
            looked = time.monotonic()
            for policy in range(len(self._names)):
                self._look(policy, heads.get(policy))
        consumer.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                policy, version = self._asked.get(timeout=0.2)
            except Empty:
                continue
            self._bring(policy, version)

    def _bring(self, policy: int, version: int | None) -> None:
        """One version that was asked for, waiting for a store that is away."""
        reader, began = self._readers[policy], time.monotonic()
        while not self._stop.is_set():
            try:
                reader.fetch(version)
                self._fresh.put((policy, reader.snapshot()))
                self.fetch_seconds += time.monotonic() - began
                self._told.pop(policy, "")
                return
            except (NoSuchKey, DeltaError) as error:
                if version is not None:
                    self._refused.put((policy, version, f"version {version} of {self._names[policy]}: {error}"))
                return
            except StoreError as error:
                self._tell(policy, f"waiting for the object store: {error}")
                self._stop.wait(self._poll_seconds)

    def _look(self, policy: int, head: Head | None) -> None:
        reader = self._readers[policy]
        began = time.monotonic()
        try:
            told = head is not None and head.version > reader.version
            if told or reader.head_version() > reader.version:
                if head is not None and told:
                    reader.fetch(head.version, head.manifest_sha256, head.manifest)
                else:
                    reader.fetch()
                self._fresh.put((policy, reader.snapshot()))
                self.fetch_seconds += time.monotonic() - began
            if self._told.pop(policy, ""):
                self._tell(policy, f"policy {self._names[policy]}: going on with version {reader.version}", keep=False)
        except (StoreError, DeltaError) as error:
            self._tell(policy, f"policy {self._names[policy]} stays at version {reader.version}: {error}")

    def _tell(self, policy: int, text: str, *, keep: bool = True) -> None:
        """Say something once until something else is said of the policy."""
        if self._told.get(policy) == text:
            return
        if keep:
            self._told[policy] = text
        sys.stdout.write(f"rollout: {text}\n")
        sys.stdout.flush()


def _newest(consumer: Consumer, run: str, seconds: float) -> dict[int, Head]:
    """The newest announcement of every policy among those that wait; waits up to ``seconds`` for the first."""
    heads: dict[int, Head] = {}
    while (message := consumer.poll(0 if heads else seconds)) is not None:
        with suppress(UndecodableRecord):
            record = None if message.error() else RawRecord.of(message, run).decoded()
            if isinstance(record, Head):
                heads[record.policy] = record
    return heads
