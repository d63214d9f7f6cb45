"""How a trainer reads its lanes: whole batches, in order, checked, and nothing that was trained before."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
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

    def make(
        rank: int = 0,
        ranks: int = 1,
        stop: StopSignal | None = None,
        ahead: int = 1 << 20,
        whole: Callable[[Item], Item] | None = None,
    ) -> BatchReader:
        reader = BatchReader(
            fed.connection,
            policy=0,
            name="main",
            lanes=lanes_of(rank, ranks, LANES),
            manifests=rank == 0,
            client_id=f"reader.{rank}",
            group=f"{fed.config.run.id}.trainer.main",
            stop=stop or StopSignal(),
            ahead=ahead,
        )
        if whole is not None:
            reader.fetch_with(whole)
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


def held(reader: BatchReader) -> int:
    return sum(len(waiting) for waiting in reader._items.values())


def eventually(found: Callable[[], bool]) -> None:
    for _ in range(600):
        if found():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")


def test_what_is_composed_ahead_is_read_before_it_is_asked_for(fed: Feed, reader_of: Any) -> None:
    """Batches arrive while nobody waits; what is asked for then needs no broker."""
    for batch in (1, 2):
        fed.batch(batch)
    reader = reader_of()
    eventually(lambda: held(reader) == 32)
    eventually(lambda: len(reader._orders) == 2)
    reader._halt()
    for batch in (1, 2):
        assert len(reader.take(manifest(reader, batch))) == 16
    assert (held(reader), reader._held) == (0, 0)


def test_reading_ahead_is_bounded_and_nobody_starves(fed: Feed, reader_of: Any) -> None:
    """Lanes are full of later batches; what is waited for comes all the same, and little else."""
    for batch in range(1, 5):
        fed.batch(batch, lanes=[batch % 2])
    reader = reader_of(ahead=1)
    eventually(lambda: held(reader) > 0)
    most = 0
    for batch in range(1, 5):
        order = manifest(reader, batch)
        most = max(most, held(reader))
        assert keys(reader.take(order)) == keys(make_items(batch, groups=4, size=4, version=batch - 1, seed=0))
    assert most < 48, "of 64 items"


def test_large_items_are_fetched_while_they_are_read_ahead(fed: Feed, reader_of: Any) -> None:
    fetched: list[str] = []

    def whole(item: Item) -> Item:
        fetched.append(threading.current_thread().name)
        return replace(item, sequences=[])

    fed.batch(1)
    reader = reader_of(whole=whole)
    eventually(lambda: len(fetched) == 16)
    assert set(fetched) == {"read-ahead"}
    assert all(item.sequences == [] for item in reader.take(manifest(reader, 1)))


def test_an_error_of_the_reading_thread_is_raised_where_one_waits(fed: Feed, reader_of: Any) -> None:
    def whole(item: Item) -> Item:
        raise ConfigurationError(f"no store for {item.group}")

    fed.batch(1)
    reader = reader_of(whole=whole)
    order = manifest(reader_of(), 1)
    with pytest.raises(ConfigurationError, match="no store for 1000"):
        reader.take(order)


def test_starting_again_forgets_what_was_read_ahead(fed: Feed, reader_of: Any) -> None:
    for batch in (1, 2):
        fed.batch(batch)
    reader = reader_of()
    eventually(lambda: held(reader) == 32)
    reader.start(Positions(manifests=0, lanes=dict.fromkeys(range(LANES), 0)))
    for batch in (1, 2):
        assert len(reader.take(manifest(reader, batch))) == 16
