"""Publishing under competition: commits in the store and Kafka, takeovers, versions that others have taken."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_feed import Feed, make_config

from headrace.connectors.kafka import Connection, Consumer
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import ObjectStore, StoreUnavailable
from headrace.pipeline.delta_to_worker import WeightReader
from headrace.schemas.delta_layout import Layout
from headrace.schemas.errors import Superseded
from headrace.schemas.records import Head, Rollback, Stop
from headrace.trainers.lineage import Point
from headrace.trainers.step_log import StepLog
from headrace.trainers.step_to_delta import DeltaPublisher
from headrace.trainers.versions import Versions

OFFSETS = dict.fromkeys(range(4), 0)


@pytest.fixture
def fed(bootstrap: str, tmp_path: Path) -> Feed:
    config = make_config(Path("none"), tmp_path, f"versions-{uuid.uuid4().hex[:8]}")
    return Feed(Connection.of(config.kafka, config.run.id, bootstrap), config)


@pytest.fixture
def log_of(fed: Feed) -> Iterator[Callable[[], StepLog]]:
    """Opens the log as another trainer each time."""
    consumers: list[Consumer] = []

    def make() -> StepLog:
        run = fed.config.run.id
        consumers.append(fed.connection.consumer("trainer", group=f"{run}.trainer.main"))
        log = StepLog(
            fed.connection,
            policy=0,
            name="main",
            transactional_id=f"{run}.trainer.main",
            client_id="trainer",
            consumer=consumers[-1],
            stop=StopSignal(),
        )
        log.open()
        return log

    yield make
    for consumer in consumers:
        consumer.close()


def weights(value: float) -> dict[str, np.ndarray]:
    bits = np.full(64, value, np.float32).view(np.uint32) >> 16
    return {"w": bits.astype(np.uint16).reshape(8, 8)}


def versions_of(store: ObjectStore, log: StepLog, run: str, **more: Any) -> Versions:
    shapes = {name: array.shape for name, array in weights(0).items()}
    return Versions(store, log, run=run, name="main", policy=0, shapes=shapes, full_every=20, stop=StopSignal(), **more)


def test_records_and_offsets_are_one_transaction(fed: Feed, log_of: Any) -> None:
    log = log_of()
    log.commit([Rollback(policy=0, lineage=1, base_lineage=0, base_batch=3, base_version=3)], {0: 5, 1: 6, 2: 7, 3: 8})
    assert log.seen().lineage == 1
    from confluent_kafka import TopicPartition

    group = fed.connection.consumer("look", group=f"{fed.config.run.id}.trainer.main")
    places = [TopicPartition(fed.connection.topic("batches.main"), lane) for lane in range(4)]
    assert [place.offset for place in group.committed(places, timeout=10)] == [5, 6, 7, 8]
    group.close()


def test_the_later_of_two_trainers_stays(fed: Feed, log_of: Any) -> None:
    first = log_of()
    second = log_of()
    with pytest.raises(Superseded):
        first.commit([Stop(reason="steps", policy=0)], OFFSETS)
    assert not second.seen().stopped
    second.commit([Stop(reason="steps", policy=0)], OFFSETS)
    assert second.seen().stopped


def test_a_chain_of_versions(fed: Feed, log_of: Any, tmp_path: Path) -> None:
    versions = versions_of(LocalStore(tmp_path / "s"), log_of(), fed.config.run.id)
    assert versions.read_head() is None
    for batch in range(3):
        committed = versions.publish(weights(batch), lineage=0, batch=batch, offsets=OFFSETS)
        versions.announce([], OFFSETS)
        assert (committed.version, committed.batch) == (batch, batch)
    heads = [r for r in fed.records("deltas") if isinstance(r, Head)]
    assert (heads[-1].version, heads[-1].manifest_sha256) == (2, committed.manifest_sha256)
    assert versions.read_head() == Point(lineage=0, batch=2, version=2)


@pytest.mark.parametrize(("batch", "version"), [(1, 1), (2, 2)], ids=["its own batch", "another batch"])
def test_a_version_that_somebody_took(fed: Feed, log_of: Any, tmp_path: Path, batch: int, version: int) -> None:
    """A zombie of this trainer commits version 1 between our look at the head and our commit."""
    store, run = LocalStore(tmp_path / "s"), fed.config.run.id
    versions = versions_of(store, log_of(), run)
    start = versions.publish(weights(0), lineage=0, batch=0, offsets=OFFSETS)
    zombie = DeltaPublisher(store, run, "main", Layout.of(weights(0), {"w": "bfloat16"}))
    zombie.publish(weights(5), version=1, lineage=0, batch=1, parent=start)
    committed = versions.publish(weights(1), lineage=0, batch=batch, offsets=OFFSETS)
    assert (committed.version, committed.batch, committed.lineage) == (version, batch, 0)
    after = versions.publish(weights(2), lineage=0, batch=batch + 1, offsets=OFFSETS)
    assert after.version == version + 1
    found = DeltaPublisher(store, run, "main", Layout.of(weights(0), {"w": "bfloat16"})).load_baseline(after)
    assert np.array_equal(found["w"], weights(2)["w"])


def test_who_is_fenced_publishes_nothing_after_a_lost_race(fed: Feed, log_of: Any, tmp_path: Path) -> None:
    store, run = LocalStore(tmp_path / "s"), fed.config.run.id
    old = versions_of(store, log_of(), run)
    old.publish(weights(0), lineage=0, batch=0, offsets=OFFSETS)
    new = versions_of(store, log_of(), run)
    new.read_head()
    new.publish(weights(1), lineage=0, batch=1, offsets=OFFSETS)
    with pytest.raises(Superseded):
        old.publish(weights(2), lineage=0, batch=2, offsets=OFFSETS)
    assert new.read_head() == Point(lineage=0, batch=1, version=1)


class Flaky(LocalStore):
    """A store that is away for a number of puts."""

    away = 3

    def put(self, key: str, data: Any, *, create_only: bool = False) -> None:
        if self.away:
            self.away -= 1
            raise StoreUnavailable("away")
        super().put(key, data, create_only=create_only)


def test_publishing_waits_for_the_store(fed: Feed, log_of: Any, tmp_path: Path) -> None:
    versions = versions_of(Flaky(tmp_path / "s"), log_of(), fed.config.run.id)
    assert versions.publish(weights(0), lineage=0, batch=0, offsets=OFFSETS).version == 0


def test_on_a_store_without_conditions_kafka_keeps_a_replaced_trainer_out(
    fed: Feed, log_of: Any, tmp_path: Path
) -> None:
    class Ignores(LocalStore):
        def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
            super().put(key, data)

    store, run = Ignores(tmp_path), fed.config.run.id
    old = versions_of(store, log_of(), run, fenced=True)
    old.publish(weights(0), lineage=0, batch=0, offsets=OFFSETS)
    new = versions_of(store, log_of(), run, fenced=True)
    new.read_head()
    with pytest.raises(Superseded):
        old.publish(weights(1), lineage=0, batch=1, offsets=OFFSETS)
    assert new.publish(weights(2), lineage=0, batch=1, offsets=OFFSETS).version == 1
    assert np.array_equal(new.weights()["w"], weights(2)["w"])


def test_adapters_are_fulls_without_a_history(fed: Feed, log_of: Any, tmp_path: Path) -> None:
    store, run = LocalStore(tmp_path), fed.config.run.id
    versions = versions_of(store, log_of(), run, kind="full")
    for batch in range(3):
        assert versions.publish(weights(batch), lineage=0, batch=batch, offsets=OFFSETS).kind == "full"
    assert list(store.list(f"runs/{run}/main/delta/")) == []
    reader = WeightReader(store, run, "main")
    assert reader.fetch().hops == 1
    assert np.array_equal(reader.snapshot().weights["w"], weights(2)["w"])
