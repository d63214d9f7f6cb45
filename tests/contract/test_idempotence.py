"""Sequence numbers, at the level of the protocol."""

from __future__ import annotations

from batch_maker import batch_of_now
from kafka_kit import Kit, wait_until
from raw_kafka import RawClient

from headrace.connectors.broker.codes import Code


def test_repeats_are_stored_once_and_gaps_are_refused(kit: Kit) -> None:
    topic = kit.topic()
    with RawClient(kit.bootstrap) as client:
        producer = wait_until(client.init_producer)

        def send(sequence: int, count: int = 2) -> tuple[Code, int]:
            return client.produce(topic, batch_of_now(count, producer, sequence))

        assert [send(0), send(2), send(4)] == [(Code.NONE, 0), (Code.NONE, 2), (Code.NONE, 4)]
        assert send(2) == (Code.NONE, 2)
        assert send(4) == (Code.NONE, 4)
        assert send(8)[0] is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert send(6) == (Code.NONE, 6)
    assert kit.watermarks(topic) == (0, 8)


def test_a_newer_epoch_starts_over_and_shuts_the_older_out(kit: Kit) -> None:
    topic = kit.topic()
    with RawClient(kit.bootstrap) as client:
        producer, _ = wait_until(client.init_producer)

        def send(epoch: int, sequence: int) -> Code:
            return client.produce(topic, batch_of_now(1, (producer, epoch), sequence))[0]

        assert send(0, 0) is Code.NONE
        assert send(1, 5) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert send(1, 0) is Code.NONE
        assert send(0, 1) is Code.INVALID_PRODUCER_EPOCH
        assert send(1, 1) is Code.NONE


def test_two_producers_do_not_mix(kit: Kit) -> None:
    topic = kit.topic()
    with RawClient(kit.bootstrap) as client:
        first, second = client.init_producer(), client.init_producer()
        assert first[0] != second[0]
        for sequence in range(8):
            for producer in (first, second):
                code, _ = client.produce(topic, batch_of_now(1, producer, sequence))
                assert code is Code.NONE
    assert kit.watermarks(topic) == (0, 16)


def test_batches_that_are_not_sound_are_refused(kit: Kit) -> None:
    topic = kit.topic()
    batch = batch_of_now(2, (-1, -1), -1)
    with RawClient(kit.bootstrap) as client:
        assert client.produce(topic, batch + batch)[0] is Code.INVALID_RECORD
        count = bytearray(batch)
        count[57:61] = (5).to_bytes(4)
        assert client.produce(topic, count)[0] in {Code.INVALID_RECORD, Code.CORRUPT_MESSAGE}
        assert client.produce(topic, batch) == (Code.NONE, 0)
    assert kit.watermarks(topic) == (0, 2)
