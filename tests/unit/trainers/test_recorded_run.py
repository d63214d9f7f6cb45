"""Which batches a recorded run trained in its final lineage, and to which versions."""

from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores.local import LocalStore
from headrace.schemas.delta_layout import Layout
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Record, Resumed, Rollback, Step, Stop
from headrace.trainers.recorded_run import Recorded, folded, recorded_digest, weights_digest
from headrace.trainers.step_to_delta import DeltaPublisher


def step(batch: int, version: int, lineage: int = 0) -> Step:
    return Step(
        policy=0, batch=batch, version=version, lineage=lineage, updates=1, loss=0.0, tokens=1, sequences=1,
        wait_seconds=0.0, step_seconds=0.0, publish_seconds=0.0, delta_bytes=1, changed_share=1.0, finished_ms=1,
    )  # fmt: skip


def test_a_rollback_leaves_the_batches_before_it_and_takes_the_others() -> None:
    records: list[Record] = [
        step(1, 1), step(2, 2), step(3, 3),
        Rollback(policy=0, lineage=1, base_lineage=0, base_batch=1, base_version=1),
        Resumed(policy=0, lineage=1, batch=1, version=4),
        step(2, 5, 1), Stop(reason="steps", policy=0),
    ]  # fmt: skip
    found = folded(records)
    assert (found.versions, found.last, found.seen.lineage) == ({0: 0, 1: 1, 2: 5}, 2, 1)


def test_a_resumed_stands_for_the_step_that_was_never_written() -> None:
    back = Rollback(policy=0, lineage=1, base_lineage=0, base_batch=2, base_version=2)
    assert folded([step(1, 1), back, Resumed(policy=0, lineage=1, batch=2, version=3)]).versions == {0: 0, 1: 1, 2: 3}


@pytest.mark.parametrize(
    ("asked", "given"), [((1, 0), (1, 5)), ((2, 4), (2, 4)), ((5, 5), (5, 5)), ((5, 0), (5, 5))], ids=str
)
def test_spans_are_within_what_was_trained(asked: tuple[int, int], given: tuple[int, int]) -> None:
    assert folded([step(k, k) for k in range(1, 6)]).span(*asked) == given


@pytest.mark.parametrize("asked", [(1, 6), (6, 0), (0, 3), (4, 3)], ids=str)
def test_other_spans_are_refused_with_what_there_is(asked: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match="1 to 5"):
        folded([step(k, k) for k in range(1, 6)]).span(*asked)


def test_a_run_that_trained_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no batch"):
        folded([]).span(1, 0)


def test_the_digest_of_weights_is_that_of_their_published_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"a": rng.integers(0, 9999, (7, 5)).astype(np.uint16), "b": rng.integers(0, 9999, 3).astype(np.uint16)}
    store = LocalStore(tmp_path)
    publisher = DeltaPublisher(store, "r", "main", Layout.of(weights, dict.fromkeys(weights, "bfloat16")))
    publisher.publish(weights, version=0, lineage=0, batch=0, parent=None)
    assert weights_digest(weights) == recorded_digest(store, "r", "main", 0) != ""
    weights["b"][1] ^= 1
    assert weights_digest(weights) != recorded_digest(store, "r", "main", 0)
    assert recorded_digest(store, "r", "main", 1) == recorded_digest(store, "r", "main", None) == ""


def test_the_initial_weights_are_version_0() -> None:
    assert Recorded(folded([]).seen).versions == {0: 0}
