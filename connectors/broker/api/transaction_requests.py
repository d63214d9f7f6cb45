"""Requests of idempotent and transactional producers."""

from __future__ import annotations

from collections.abc import Callable

from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.api.offset_requests import (
    all_failed,
    known_positions,
    read_committing,
    write_codes,
    write_committed,
)
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.wire import Body


def _told(code: Code, fenced_known: bool) -> Code:
    """The code this version of a request knows: older ones learn of fencing as INVALID_PRODUCER_EPOCH."""
    if code is Code.PRODUCER_FENCED and not fenced_known:
        return Code.INVALID_PRODUCER_EPOCH
    return code


def _attempt(action: Callable[[], object], fenced_known: bool) -> Code:
    try:
        action()
    except BrokerError as error:
        return _told(error.code, fenced_known)
    return Code.NONE


def init_producer_id(call: Call) -> Body:
    """Versions 0 to 4: a producer id with its epoch; for a transactional id, fences earlier instances."""
    reader, version, broker = call.reader, call.version, call.broker
    name, timeout_ms = reader.nullable_string(), reader.int32()
    known = (reader.int64(), reader.int16()) if version >= 3 else (-1, -1)
    producer, epoch, code = -1, -1, Code.NONE
    now = broker.times.now
    try:
        if name is None:
            producer, epoch = broker.transactions.new_producer(now)
        else:
            claimed = known if known[0] >= 0 else None
            producer, epoch = broker.transactions.init(name, timeout_ms, claimed, now)
    except BrokerError as error:
        code = _told(error.code, version >= 4)
    out = call.writer()
    out.int32(0)
    out.int16(code)
    out.int64(producer)
    out.int16(epoch)
    out.tags()
    return out.body()


def add_partitions_to_txn(call: Call) -> Body:
    """Versions 0 to 2: all partitions or none."""
    reader, broker = call.reader, call.broker
    name, producer, epoch = reader.string(), reader.int64(), reader.int16()
    topics = reader.array(lambda: (reader.string(), reader.array(reader.int32)))
    positions = [(topic, partition) for topic, partitions in topics for partition in partitions]
    unknown = {position for position in positions if broker.topics.log(*position) is None}
    code = Code.OPERATION_NOT_ATTEMPTED
    if not unknown:
        code = _attempt(
            lambda: broker.transactions.add_partitions(name, producer, epoch, positions, broker.times.now),
            call.version >= 2,
        )
    out = call.writer()
    out.int32(0)
    codes = {p: Code.UNKNOWN_TOPIC_OR_PARTITION if p in unknown else code for p in positions}
    return write_codes(out, topics, codes)


def _only_code(call: Call, code: Code) -> Body:
    out = call.writer()
    out.int32(0)
    out.int16(code)
    return out.body()


def add_offsets_to_txn(call: Call) -> Body:
    """Versions 0 to 2."""
    reader, broker = call.reader, call.broker
    name, producer, epoch, group = reader.string(), reader.int64(), reader.int16(), reader.string()
    code = _attempt(
        lambda: broker.transactions.add_group(name, producer, epoch, group, broker.times.now), call.version >= 2
    )
    return _only_code(call, code)


def end_txn(call: Call) -> Body:
    """Versions 0 to 2: commit or abort; the answer means that the decision is durable."""
    reader, broker = call.reader, call.broker
    name, producer, epoch, commit = reader.string(), reader.int64(), reader.int16(), reader.boolean()
    code = _attempt(lambda: broker.transactions.end(name, producer, epoch, commit, broker.times.now), call.version >= 2)
    return _only_code(call, code)


def txn_offset_commit(call: Call) -> Body:
    """Versions 0 to 3; version 3 carries the group membership, which is checked as for a plain commit."""
    reader, version, broker = call.reader, call.version, call.broker
    name, group = reader.string(), reader.string()
    producer, epoch = reader.int64(), reader.int16()
    generation, member_id, instance_id = -1, "", None
    if version >= 3:
        generation, member_id, instance_id = reader.int32(), reader.string(), reader.nullable_string()
    topics = read_committing(call, version >= 2)
    entries, codes = known_positions(call, topics)
    now = broker.times.now
    try:
        broker.groups.check_commit(group, generation, member_id, instance_id, True, now)
        broker.transactions.add_offsets(name, producer, epoch, group, entries, now)
    except BrokerError as error:
        codes = all_failed(topics, _told(error.code, False))
    return write_committed(call, topics, codes, True)
