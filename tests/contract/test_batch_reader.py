"""How a trainer reads its lanes: whole batches, in order, checked, and nothing that was trained before."""

import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_feed import Feed, make_config, make_items

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import End, Item, Manifest
from headrace.trainers.checkpoint import Positions
from headrace.trainers.lanes import BatchReader, BrokenBatch, Stopped, lanes_of

LANES = 4


@pytest.fixture
def fed(bootstrap: str, tmp_path: Path) -> Feed:
    config = make_config(Path("none"), tmp_path, f"lanes-{uuid.uuid4().hex[:8]}", lanes=LANES)
    return Feed(Connection.of(config.kafka, config.run.id, bootstrap), config)


@pytest.fixture
def reader_of(fed: Feed) -> Iterator[Any]:
    """Makes readers of a rank; closes them."""
    made: list[BatchReader] = []

    def make(rank: int = 0, ranks: int = 1, stop: StopSignal | None = None) -> BatchReader:
        reader = BatchReader(
            fed.connection,
            policy=0,
            name="main",
            lanes=lanes_of(rank, ranks, LANES),
            manifests=rank == 0,
            client_id=f"reader.{rank}",
            group=f"{fed.config.run.id}.trainer.main",
            stop=stop or StopSignal(),
        )
        made.append(reader)
        reader.start(Positions(manifests=0, lanes=dict.fromkeys(range(LANES), 0)))
        return reader

    yield make
    for reader in made:
        reader.close()


def manifest(reader: BatchReader, batch: int) -> Manifest:
    order = reader.order(batch)
    assert isinstance(order, Manifest)
    return order


def keys(items: list[Item]) -> list[tuple[int, int]]:
    return sorted((item.group, item.replica) for item in items)


def test_batches_come_whole_and_in_order(fed: Feed, reader_of: Any) -> None:
    for batch in (1, 2):
        fed.batch(batch)
    fed.end("epochs")
    reader = reader_of()
    for batch in (1, 2):
        wanted = make_items(batch, groups=4, size=4, version=batch - 1, seed=0)
        assert keys(reader.take(manifest(reader, batch))) == keys(wanted)
    end = reader.order(3)
    assert isinstance(end, End) and end.reason == "epochs"


def test_ranks_share_the_lanes(fed: Feed, reader_of: Any) -> None:
    fed.batch(1, groups=6, lanes=[1, 2])
    first, second = reader_of(0, 2), reader_of(1, 2)
    order = manifest(first, 1)
    mine, theirs = first.take(order), second.take(order)
    assert {item.lane for item in mine} == {2}
    assert {item.lane for item in theirs} == {1}
    assert len(mine) + len(theirs) == 24
    assert {**first.lane_offsets, **second.lane_offsets}[3] == 0, "a lane that was not read keeps its start"


def test_reading_goes_on_from_its_positions(fed: Feed, reader_of: Any) -> None:
    for batch in (1, 2):
        fed.batch(batch)
    reader = reader_of()
    reader.take(manifest(reader, 1))
    positions = Positions(manifests=reader.manifest_offset, lanes=reader.lane_offsets)
    again = reader_of()
    again.start(positions)
    assert keys(again.take(manifest(again, 2))) == keys(make_items(2, groups=4, size=4, version=1, seed=0))


def test_batches_before_the_one_asked_for_are_passed_over(fed: Feed, reader_of: Any) -> None:
    for batch in (1, 2, 3):
        fed.batch(batch)
    reader = reader_of()
    assert {item.batch for item in reader.take(manifest(reader, 3))} == {3}


def test_it_waits_until_the_lanes_hold_the_counts(fed: Feed, reader_of: Any) -> None:
    fed.batch(1)
    reader = reader_of()
    order = manifest(reader, 1)
    later = replace(order, batch=2)
    timer = threading.Timer(0.5, lambda: fed.batch(2))
    timer.start()
    lanes = manifest(reader_of(), 1).lanes
    with pytest.raises(BrokenBatch, match="digest"):
        reader.take(replace(later, lanes=lanes))
    timer.join()


def test_changed_items_are_refused(fed: Feed, reader_of: Any) -> None:
    fed.batch(1)
    reader = reader_of()
    order = manifest(reader, 1)
    first, *others = order.lanes
    with pytest.raises(BrokenBatch, match=r"batches\.main\[0\]@0\.\."):
        reader.take(replace(order, lanes=[replace(first, digest="0" * 32), *others]))


def test_a_gap_in_the_manifests_is_refused(fed: Feed, reader_of: Any) -> None:
    fed.batch(2)
    reader = reader_of()
    with pytest.raises(BrokenBatch, match="batch 1 was expected"):
        reader.order(1)


def test_deleted_records_are_named(fed: Feed, reader_of: Any) -> None:
    fed.batch(1)
    reader = reader_of()
    reader.start(Positions(manifests=10_000, lanes=dict.fromkeys(range(LANES), 0)))
    with pytest.raises(ConfigurationError, match=r"manifests\[0\]@"):
        reader.order(1)


def test_a_stop_ends_the_wait(fed: Feed, reader_of: Any) -> None:
    stop = StopSignal()
    reader = reader_of(stop=stop)
    threading.Timer(0.3, lambda: stop.set("SIGTERM")).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        reader.order(1)
