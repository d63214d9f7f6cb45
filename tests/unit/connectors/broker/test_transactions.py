"""Transactions: fencing, timeouts, and all or nothing when the broker is killed between any two writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.connectors.broker.batches import read_header
from headrace.connectors.broker.broker import Broker, BrokerOptions, Times
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.offsets import Committed
from headrace.connectors.broker.storage import MemoryStorage, Storage
from headrace.connectors.broker.transactions import LONGEST_TIMEOUT_MS

Build = Callable[..., bytearray]
HERE = [("t", 0), ("t", 1), ("u", 0)]


def _start(storage: Storage, now: float = 0.0) -> Broker:
    return Broker(storage, BrokerOptions(), Times(now, int(now * 1000)))


def _with_topics(storage: Storage) -> Broker:
    broker = _start(storage)
    broker.topics.create("t", 2, {})
    broker.topics.create("u", 1, {})
    return broker


def _write(broker: Broker, batch: Build, producer: int, epoch: int, sequence: int) -> None:
    for topic, partition in HERE:
        broker.transactions.check_produce("id", producer, epoch, (topic, partition))
        log = broker.topics.log(topic, partition)
        assert log is not None
        log.append(batch([(b"k", b"v")], producer, epoch, sequence, True), 0)


def _transaction(broker: Broker, batch: Build, producer: int, epoch: int, sequence: int, offset: int) -> None:
    """Everything up to the end of one transaction."""
    broker.transactions.add_partitions("id", producer, epoch, HERE, 0.0)
    _write(broker, batch, producer, epoch, sequence)
    broker.transactions.add_group("id", producer, epoch, "g", 0.0)
    broker.transactions.add_offsets("id", producer, epoch, "g", {("in", 0): Committed(offset, -1, "m")}, 0.0)


def _visible(broker: Broker) -> list[int]:
    """Records that a read_committed reader sees, for each partition."""
    counts = []
    for topic, partition in HERE:
        log = broker.topics.log(topic, partition)
        assert log is not None
        count = 0
        for segment in log.segments:
            for header in (read_header(segment.batch(index)) for index in range(len(segment))):
                spans = [(a.first, a.last) for a in log.aborted if a.producer_id == header.producer_id]
                hidden = any(first <= header.base_offset <= last for first, last in spans)
                if header.base_offset < log.last_stable_offset and not header.is_control and not hidden:
                    count += header.record_count
        counts.append(count)
    return counts


def _committed(broker: Broker) -> int:
    entry = broker.offsets.of("g").get(("in", 0))
    return entry.offset if entry is not None else -1


def test_a_commit_shows_records_and_offsets_an_abort_neither(memory: MemoryStorage, batch: Build) -> None:
    broker = _with_topics(memory)
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    _transaction(broker, batch, producer, epoch, 0, 10)
    assert (_visible(broker), _committed(broker)) == ([0, 0, 0], -1)
    assert broker.offsets.is_pending("g", ("in", 0))
    broker.transactions.end("id", producer, epoch, True, 0.0)
    assert (_visible(broker), _committed(broker)) == ([1, 1, 1], 10)
    assert not broker.offsets.is_pending("g", ("in", 0))
    _transaction(broker, batch, producer, epoch, 1, 20)
    broker.transactions.end("id", producer, epoch, False, 0.0)
    assert (_visible(broker), _committed(broker)) == ([1, 1, 1], 10)
    assert not broker.offsets.is_pending("g", ("in", 0))


def test_a_killed_broker_commits_all_or_nothing_at_every_write(
    killable: MemoryStorage, killed: type[BaseException], batch: Build
) -> None:
    """Kill at write 1, 2, ... of one commit until it survives; after each restart the client goes on or is told."""
    outcomes = set()
    for kill_at in range(1, 60):
        storage = type(killable)()
        broker = _with_topics(storage)
        producer, epoch = broker.transactions.init("id", 60_000, None, 0.0)
        _transaction(broker, batch, producer, epoch, 0, 5)
        broker.transactions.end("id", producer, epoch, True, 0.0)
        storage.kill_at = storage.writes + kill_at  # type: ignore[attr-defined]
        ended = False
        try:
            _transaction(broker, batch, producer, epoch, 1, 6)
            broker.transactions.end("id", producer, epoch, True, 0.0)
            ended = True
        except killed:
            pass
        storage.kill_at = None  # type: ignore[attr-defined]
        broker = _start(storage)
        state = (tuple(_visible(broker)), _committed(broker))
        assert state in {((1, 1, 1), 5), ((2, 2, 2), 6)}, f"killed at write {kill_at}"
        outcomes.add(state)
        if ended:
            assert state == ((2, 2, 2), 6)
            break
        _retry(broker, batch, producer, epoch)
        assert (_visible(broker), _committed(broker)) == ([2, 2, 2], 6), f"killed at write {kill_at}"
    assert ended and len(outcomes) == 2


def _retry(broker: Broker, batch: Build, producer: int, epoch: int) -> None:
    """What the client does that got no answer: the same calls again, repeats are recognised."""
    try:
        _transaction(broker, batch, producer, epoch, 1, 6)
    except BrokerError as error:
        assert error.code is Code.INVALID_TXN_STATE
    broker.transactions.end("id", producer, epoch, True, 0.0)


def test_an_open_transaction_survives_a_restart(memory: MemoryStorage, batch: Build) -> None:
    broker = _with_topics(memory)
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    _transaction(broker, batch, producer, epoch, 0, 10)
    again = _start(memory, now=100.0)
    again.transactions.tick(100.5)
    assert again.offsets.is_pending("g", ("in", 0))
    again.transactions.end("id", producer, epoch, True, 100.6)
    assert (_visible(again), _committed(again)) == ([1, 1, 1], 10)


def test_a_new_instance_fences_the_old_one_and_aborts_what_it_left(memory: MemoryStorage, batch: Build) -> None:
    broker = _with_topics(memory)
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    _transaction(broker, batch, producer, epoch, 0, 10)
    assert broker.transactions.init("id", 1000, None, 0.0) == (producer, epoch + 1)
    assert _visible(broker) == [0, 0, 0]
    for call in (
        lambda: broker.transactions.add_partitions("id", producer, epoch, HERE, 0.0),
        lambda: broker.transactions.end("id", producer, epoch, True, 0.0),
        lambda: broker.transactions.add_offsets("id", producer, epoch, "g", {}, 0.0),
    ):
        with pytest.raises(BrokerError) as caught:
            call()
        assert caught.value.code is Code.PRODUCER_FENCED
    with pytest.raises(BrokerError) as caught:
        broker.transactions.check_produce("id", producer, epoch, HERE[0])
    assert caught.value.code is Code.INVALID_PRODUCER_EPOCH
    log = broker.topics.log(*HERE[0])
    assert log is not None
    with pytest.raises(BrokerError) as caught:
        log.append(batch([(b"k", b"v")], producer, epoch, 1, True), 0)
    assert caught.value.code is Code.INVALID_PRODUCER_EPOCH


def test_an_abandoned_transaction_is_aborted_after_its_timeout(memory: MemoryStorage, batch: Build) -> None:
    broker = _with_topics(memory)
    producer, epoch = broker.transactions.init("id", 2000, None, 0.0)
    _transaction(broker, batch, producer, epoch, 0, 10)
    assert broker.transactions.tick(1.9) == []
    assert broker.transactions.tick(2.1) == ["id"]
    assert all(log.last_stable_offset == log.end for _, _, log in broker.topics.logs())
    with pytest.raises(BrokerError) as caught:
        broker.transactions.end("id", producer, epoch, True, 2.2)
    assert caught.value.code is Code.PRODUCER_FENCED


def test_a_producer_may_raise_its_own_epoch(memory: MemoryStorage) -> None:
    broker = _start(memory)
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    assert broker.transactions.init("id", 1000, (producer, epoch), 0.0) == (producer, epoch + 1)
    with pytest.raises(BrokerError) as caught:
        broker.transactions.init("id", 1000, (producer, epoch), 0.0)
    assert caught.value.code is Code.PRODUCER_FENCED


def test_epochs_run_out_into_a_new_producer_id(memory: MemoryStorage) -> None:
    broker = _start(memory)
    first, _ = broker.transactions.init("id", 1000, None, 0.0)
    seen = [broker.transactions.init("id", 1000, None, 0.0) for _ in range(32_767)]
    assert seen[-2] == (first, 32_766)
    assert seen[-1] == (first + 1, 0)
    assert _start(memory).transactions.init("id", 1000, None, 0.0) == (first + 1, 1)


def test_calls_out_of_order_are_told(memory: MemoryStorage) -> None:
    broker = _with_topics(memory)
    with pytest.raises(BrokerError) as caught:
        broker.transactions.init("id", LONGEST_TIMEOUT_MS + 1, None, 0.0)
    assert caught.value.code is Code.INVALID_TRANSACTION_TIMEOUT
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    with pytest.raises(BrokerError) as caught:
        broker.transactions.end("id", producer, epoch, True, 0.0)
    assert caught.value.code is Code.INVALID_TXN_STATE
    with pytest.raises(BrokerError) as caught:
        broker.transactions.check_produce("id", producer, epoch, HERE[0])
    assert caught.value.code is Code.INVALID_TXN_STATE
    with pytest.raises(BrokerError) as caught:
        broker.transactions.add_partitions("id", producer + 1, epoch, HERE, 0.0)
    assert caught.value.code is Code.INVALID_PRODUCER_ID_MAPPING
    broker.transactions.add_partitions("id", producer, epoch, HERE, 0.0)
    broker.transactions.end("id", producer, epoch, True, 0.0)
    broker.transactions.end("id", producer, epoch, True, 0.0)
    with pytest.raises(BrokerError) as caught:
        broker.transactions.end("id", producer, epoch, False, 0.0)
    assert caught.value.code is Code.INVALID_TXN_STATE


def test_a_decided_commit_waits_for_disk_space(memory: MemoryStorage, batch: Build) -> None:
    broker = _with_topics(memory)
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    _transaction(broker, batch, producer, epoch, 0, 10)
    full = memory.files["topics/u/0/00000000000000000000.log"]
    full.limit = len(full.data)
    broker.transactions.end("id", producer, epoch, True, 0.0)
    assert _committed(broker) == -1
    with pytest.raises(BrokerError) as caught:
        broker.transactions.add_partitions("id", producer, epoch, HERE, 0.0)
    assert caught.value.code is Code.CONCURRENT_TRANSACTIONS
    full.limit = None
    broker.transactions.tick(0.1)
    assert (_visible(broker), _committed(broker)) == ([1, 1, 1], 10)


def test_the_journal_is_folded_without_losing_state(memory: MemoryStorage, batch: Build) -> None:
    broker = _with_topics(memory)
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    for sequence in range(3_000):
        broker.transactions.add_partitions("id", producer, epoch, HERE[:1], 0.0)
        broker.transactions.add_offsets("id", producer, epoch, "g", {("in", 0): Committed(sequence, -1, "")}, 0.0)
        broker.transactions.end("id", producer, epoch, True, 0.0)
    _transaction(broker, batch, producer, epoch, 0, 9_999)
    before = len(memory.files["transactions.jsonl"].data)
    broker.transactions.compact_journal()
    assert len(memory.files["transactions.jsonl"].data) < before / 100
    again = _start(memory)
    again.transactions.end("id", producer, epoch, True, 0.0)
    assert (_visible(again), _committed(again)) == ([1, 1, 1], 9_999)


def test_open_data_that_no_transaction_knows_is_aborted_at_start(memory: MemoryStorage, batch: Build) -> None:
    broker = _with_topics(memory)
    producer, epoch = broker.transactions.init("id", 1000, None, 0.0)
    _transaction(broker, batch, producer, epoch, 0, 10)
    del memory.files["transactions.jsonl"]
    again = _start(memory)
    assert _visible(again) == [0, 0, 0]
    assert all(log.last_stable_offset == log.end for _, _, log in again.topics.logs())
