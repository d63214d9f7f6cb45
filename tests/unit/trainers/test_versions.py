"""A writer that finds its version taken: what it may put on top of whom, whenever a successor comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sim_store import Objects

from headrace.connectors.lifetime import StopSignal
from headrace.schemas.errors import Superseded
from headrace.trainers.versions import Versions


class Log:
    """The Kafka side: ``commit`` does what it is told, call by call."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def commit(self, records: Any, offsets: Any) -> None:
        self.steps.pop(0)()


def versions_of(store: Objects, log: Log) -> Versions:
    return Versions(
        store, log, run="r", name="p", policy=0, shapes={"w": (4,)}, full_every=20, stop=StopSignal()  # type: ignore[arg-type]
    )  # fmt: skip


def publish(versions: Versions, batch: int) -> int:
    weights = {"w": np.full(4, batch, np.uint16)}
    return versions.publish(weights, lineage=0, batch=batch, offsets={0: 0}).version


def test_a_successor_that_comes_after_the_proof_is_not_written_over() -> None:
    store = Objects()

    def fenced() -> None:
        raise Superseded("another trainer has taken over")

    new = versions_of(store, Log())
    old = versions_of(store, Log(lambda: publish(new, 2), fenced))
    publish(new, 0)
    old.read_head()
    publish(new, 1)
    with pytest.raises(Superseded):
        publish(old, 7)
    chain = new._commits.chain
    assert [chain.link(v).manifest.batch for v in chain.versions()] == [0, 1, 2]


def test_the_same_batch_of_another_is_adopted_after_the_proof() -> None:
    store = Objects()
    new = versions_of(store, Log())
    proofs: list[int] = []
    old = versions_of(store, Log(lambda: proofs.append(1)))
    publish(new, 0)
    old.read_head()
    publish(new, 1)
    assert publish(old, 1) == 1 and proofs == [1]
