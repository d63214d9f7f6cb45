"""Produce: batches of clients into logs, with the checks of transactions and sequences."""

from __future__ import annotations

from headrace.connectors.broker.api.call import Call, Later
from headrace.connectors.broker.batches import HEADER_SIZE, read_header
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.wire import Body

Outcome = tuple[int, Code, int, int, str]
"""(partition, code, base offset, start of the log, reason)"""


def produce(call: Call) -> Body | Later:
    """Versions 3 to 8: append each partition's batch; an error of one partition leaves the others alone."""
    reader = call.reader
    transactional_id = reader.nullable_string()
    acks = reader.int16()
    reader.int32()
    topics: list[tuple[str, list[Outcome]]] = []
    for _ in range(reader.length()):
        topic = reader.string()
        outcomes = []
        for _ in range(reader.length()):
            partition = reader.int32()
            outcomes.append(_append(call, topic, partition, transactional_id, reader.nullable_bytes()))
        topics.append((topic, outcomes))
    return Later.NONE if acks == 0 else _response(call, topics)


def _append(call: Call, topic: str, partition: int, transactional_id: str | None, batch: memoryview | None) -> Outcome:
    broker = call.broker
    log = broker.topics.log(topic, partition)
    if log is None:
        return partition, Code.UNKNOWN_TOPIC_OR_PARTITION, -1, -1, f"no partition {topic}[{partition}]"
    try:
        if batch is None or len(batch) < HEADER_SIZE:
            raise BrokerError(Code.INVALID_RECORD, f"{topic}[{partition}]: no batch")
        header = read_header(batch)
        if header.is_transactional:
            position = (topic, partition)
            broker.transactions.check_produce(transactional_id, header.producer_id, header.producer_epoch, position)
        return partition, Code.NONE, log.append(batch, broker.times.wall_ms), log.start, ""
    except BrokerError as error:
        return partition, error.code, -1, -1, error.reason


def _response(call: Call, topics: list[tuple[str, list[Outcome]]]) -> Body:
    out = call.writer()
    out.length(len(topics))
    for topic, outcomes in topics:
        out.string(topic)
        out.length(len(outcomes))
        for partition, code, base, start, reason in outcomes:
            out.int32(partition)
            out.int16(code)
            out.int64(base)
            out.int64(-1)
            if call.version >= 5:
                out.int64(start)
            if call.version >= 8:
                out.length(0)
                out.string(reason or None)
    out.int32(0)
    return out.body()
