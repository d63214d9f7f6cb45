"""Sequence numbers of idempotent producers in one partition: repeats are recognised, gaps refused, zombies fenced.

State is rebuilt from batch headers when a log is opened, so a retry that crosses a restart is still recognised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.connectors.broker.batches import Header
from headrace.connectors.broker.codes import BrokerError, Code

_REMEMBERED = 5
"""Batches remembered per producer: the most a client keeps in flight with idempotence on."""
_SEQUENCES = 1 << 31


class Appended(NamedTuple):
    """One remembered batch."""

    first_sequence: int
    last_sequence: int
    base_offset: int


@dataclass(slots=True)
class _Producer:
    epoch: int
    batches: deque[Appended] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class ProducerStates:
    """All producers that wrote to one partition."""

    def __init__(self, facts: Iterable[Any] = ()) -> None:
        self._producers: dict[int, _Producer] = {}
        for number, epoch, known in facts:
            producer = self._producers[number] = _Producer(epoch)
            producer.batches.extend(Appended(*entry) for entry in known)

    def facts(self) -> list[Any]:
        """All that is known, as JSON data for another one to be made of."""
        return [[number, x.epoch, [list(entry) for entry in x.batches]] for number, x in self._producers.items()]

    def check(self, header: Header) -> int | None:
        """The base offset under which this batch is already stored, None when it is new and may be appended.

        Raises `BrokerError`: INVALID_PRODUCER_EPOCH for a fenced producer, OUT_OF_ORDER_SEQUENCE_NUMBER for a gap.
        """
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return None
        if header.producer_epoch < producer.epoch:
            raise BrokerError(
                Code.INVALID_PRODUCER_EPOCH,
                f"producer {header.producer_id} has epoch {producer.epoch}, the batch {header.producer_epoch}",
            )
        first = header.base_sequence
        if header.producer_epoch > producer.epoch:
            expected = 0
        else:
            last = _last_sequence(header)
            for known in producer.batches:
                if known.first_sequence == first and known.last_sequence == last:
                    return known.base_offset
            if not producer.batches:
                return None
            expected = (producer.batches[-1].last_sequence + 1) % _SEQUENCES
        if first != expected:
            raise BrokerError(
                Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} sent sequence {first} where {expected} was due",
            )
        return None

    def note(self, header: Header, base_offset: int) -> None:
        """Remember an appended batch, or the epoch that a transaction marker brought."""
        producer = self._producers.get(header.producer_id)
        if producer is None or producer.epoch < header.producer_epoch:
            producer = self._producers[header.producer_id] = _Producer(header.producer_epoch)
        if not header.is_control:
            producer.batches.append(Appended(header.base_sequence, _last_sequence(header), base_offset))

    def newest_batch(self, producer_id: int) -> int | None:
        """The base offset of a producer's newest batch, None when none of its epoch is known."""
        producer = self._producers.get(producer_id)
        return producer.batches[-1].base_offset if producer is not None and producer.batches else None


def _last_sequence(header: Header) -> int:
    return (header.base_sequence + header.last_delta) % _SEQUENCES
