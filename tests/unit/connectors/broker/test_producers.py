"""Sequence numbers of idempotent producers, against a client that keeps at most five batches in flight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.broker.batches import Header
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.producers import ProducerStates

LAST = 2**31 - 1


def _header(sequence: int, count: int = 1, epoch: int = 0, producer: int = 7, control: bool = False) -> Header:
    attributes = 0b110000 if control else 0
    return Header(0, 0, 0, 2, 0, attributes, count - 1, 0, 0, producer, epoch, sequence, count)


def _code(states: ProducerStates, header: Header) -> Code:
    with pytest.raises(BrokerError) as caught:
        states.check(header)
    return caught.value.code


def _appended(states: ProducerStates, header: Header, offset: int) -> int:
    """The offset under which a batch is stored, now or before."""
    known = states.check(header)
    if known is not None:
        return known
    states.note(header, offset)
    return offset


def test_an_unknown_producer_may_begin_anywhere() -> None:
    """Its earlier batches may have been deleted by retention."""
    assert ProducerStates().check(_header(12)) is None


def test_repeats_of_the_last_five_batches_are_recognised_and_older_ones_are_out_of_order() -> None:
    states = ProducerStates()
    for n in range(7):
        assert _appended(states, _header(2 * n, 2), 100 + 2 * n) == 100 + 2 * n
    for n in range(2, 7):
        assert states.check(_header(2 * n, 2)) == 100 + 2 * n
    assert _code(states, _header(2, 2)) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER


@pytest.mark.parametrize(("sequence", "count"), [(0, 1), (1, 2), (0, 3), (5, 1), (3, 1)])
def test_a_batch_that_overlaps_or_leaves_a_gap_is_out_of_order(sequence: int, count: int) -> None:
    states = ProducerStates()
    states.note(_header(0, 2), 10)
    assert _code(states, _header(sequence, count)) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert states.check(_header(2)) is None


@pytest.mark.parametrize(("first", "count", "following"), [(LAST, 1, 0), (LAST - 1, 2, 0), (LAST - 1, 5, 3)])
def test_sequences_wrap_after_2_147_483_647(first: int, count: int, following: int) -> None:
    states = ProducerStates()
    states.note(_header(first, count), 0)
    assert states.check(_header(first, count)) == 0
    assert states.check(_header(following)) is None
    assert _code(states, _header(following + 1)) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_new_epoch_begins_at_0_and_ends_the_old_one() -> None:
    states = ProducerStates()
    states.note(_header(0, 3), 0)
    assert _code(states, _header(3, epoch=1)) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert _appended(states, _header(0, epoch=1), 3) == 3
    assert _code(states, _header(3)) is Code.INVALID_PRODUCER_EPOCH
    assert states.check(_header(0, epoch=1)) == 3


def test_a_marker_of_a_new_epoch_fences_and_any_sequence_may_follow_in_it() -> None:
    states = ProducerStates()
    states.note(_header(0, 3), 0)
    states.note(_header(-1, epoch=1, control=True), 3)
    assert _code(states, _header(3)) is Code.INVALID_PRODUCER_EPOCH
    assert states.check(_header(0, epoch=1)) is None
    assert states.check(_header(9, epoch=1)) is None


def test_a_marker_of_the_same_epoch_leaves_the_sequence_as_it_was() -> None:
    states = ProducerStates()
    states.note(_header(0, 3), 0)
    states.note(_header(-1, control=True), 3)
    assert states.check(_header(3)) is None
    assert states.check(_header(0, 3)) == 0


def test_producers_do_not_know_of_each_other() -> None:
    states = ProducerStates()
    states.note(_header(0, 3), 0)
    assert states.check(_header(0, producer=8)) is None
    states.note(_header(0, producer=8, epoch=5), 3)
    assert states.check(_header(3)) is None


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_client_that_repeats_what_got_no_answer_stores_everything_once(batches: list, random) -> None:  # type: ignore[no-untyped-def, type-arg]
    """The client resends its oldest unanswered batches in order, at most five; some answers are lost."""
    states, stored, flight = ProducerStates(), [], []
    sequence = end = 0
    for count, answered in batches:
        flight.append(_header(sequence, count))
        sequence += count
        for header in flight[-5:] if random.random() < 0.3 else flight[-1:]:
            offset = _appended(states, header, end)
            if offset == end:
                stored.append(header.base_sequence)
                end += header.record_count
            assert offset == header.base_sequence, "offset and sequence run together in an empty partition"
        if answered or len(flight) == 5:
            flight.clear()
    assert stored == sorted(set(stored))
    assert end == sequence
