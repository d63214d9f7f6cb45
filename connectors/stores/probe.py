"""A start-up probe that races writers, to learn whether a store keeps the promise of create-only puts.

Goes in: a store; comes out: a verdict with counts. One put after the other is not enough: some servers answer 412 to a
late writer and still let two racing ones win, so rounds of threads meet at a barrier and write the same key at once.
"""

import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.connectors.stores.open import open_store
from headrace.connectors.stores.store import AlreadyExists, ObjectStore, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from headrace.schemas.config import StoreConfig

__all__ = ("ProbeResult", "open_for_commits", "probe_create_only", "require_create_only")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the races showed.

    writers, rounds: how many raced how often. most_winners: the most writers of one round that were told they had won
    (1 is right). foreign_bodies: rounds in which the object that stayed was not the winner's.
    """

    writers: int
    rounds: int
    most_winners: int
    foreign_bodies: int

    @property
    def create_only(self) -> bool:
        """Whether exactly one writer won every round and its object stayed."""
        return self.most_winners == 1 and self.foreign_bodies == 0


def probe_create_only(store: ObjectStore, *, writers: int = 16, rounds: int = 6) -> ProbeResult:
    """Race ``writers`` threads ``rounds`` times for one key each round, small and 64 KB bodies in turn.

    Objects go to ``probe/<random>/`` and are removed. Raises what the store's put raises, AlreadyExists excepted.
    """
    folder = f"probe/{uuid.uuid4().hex}"
    most, foreign = 0, 0
    with ThreadPoolExecutor(writers, "probe") as pool:
        for number in range(rounds):
            key = f"{folder}/{number:04d}"
            barrier = threading.Barrier(writers)
            size = 100 if number % 2 == 0 else 64 << 10

            def race(writer: int, key: str = key, barrier: threading.Barrier = barrier, size: int = size) -> bool:
                body = bytes([writer % 256]) * size
                barrier.wait(timeout=60)
                try:
                    store.put(key, body, create_only=True)
                except AlreadyExists:
                    return False
                return True

            won = list(pool.map(race, range(writers)))
            stayed = store.get(key)
            winners = [writer for writer, one in enumerate(won) if one]
            most = max(most, len(winners))
            foreign += not any(stayed == bytes([writer % 256]) * size for writer in winners)
            store.delete(key)
    return ProbeResult(writers, rounds, most, foreign)


def require_create_only(store: ObjectStore, *, writers: int = 16, rounds: int = 6) -> ProbeResult:
    """Probe and raise StoreRefused, with what was seen and what to do, when the store cannot do create-only puts."""
    result = probe_create_only(store, writers=writers, rounds=rounds)
    if not result.create_only:
        raise StoreRefused(
            f"{store.url}: the store does not keep create-only puts (If-None-Match: *): of {result.writers} racing "
            f"writers up to {result.most_winners} were told that they won, in {result.foreign_bodies} of "
            f"{result.rounds} rounds another object stayed than the winner's. Two trainers could then commit the same "
            "weight version. Take a store with conditional writes (AWS S3, R2, versitygw, SeaweedFS, a local folder), "
            'or set store.conditional_writes = "fence" to let Kafka keep a replaced trainer out.'
        )
    return result


def open_for_commits(settings: "StoreConfig", run_folder: Path | str | None = None) -> ObjectStore:
    """Open the store of ``[store]`` for a process that commits versions, and probe it unless told to assume.

    A store that does not answer is asked again for ``patience_seconds``. Raises StoreRefused when it cannot be used,
    does not keep create-only puts or stays away.
    """
    store = open_store(settings, run_folder)
    began, pause = time.monotonic(), 0.2
    while settings.conditional_writes == "probe":
        try:
            require_create_only(store)
            break
        except StoreUnavailable as error:
            gone = time.monotonic() - began
            if gone > settings.patience_seconds:
                raise StoreRefused(
                    f"{store.url} has not answered for {gone:.0f} s (store.patience_seconds): {error}; check [store] "
                    "url and endpoint_url, and that this machine reaches it"
                ) from error
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} waiting for the object store: {error}\n")
            time.sleep(pause)
            pause = min(5.0, pause * 2)
    return store
