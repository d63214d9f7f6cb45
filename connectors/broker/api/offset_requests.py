"""Committed offsets: commit, fetch, delete."""

from __future__ import annotations

from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.offsets import Committed, Position
from headrace.connectors.broker.storage import StorageError
from headrace.connectors.broker.wire import Body, Writer

Committing = list[tuple[str, list[tuple[int, Committed]]]]


def read_committing(call: Call, with_epoch: bool) -> Committing:
    """The topics, partitions and offsets of a commit, plain or transactional."""
    reader = call.reader

    def partition() -> tuple[int, Committed]:
        number, offset = reader.int32(), reader.int64()
        epoch = reader.int32() if with_epoch else -1
        entry = Committed(offset, epoch, reader.string())
        reader.tags()
        return number, entry

    def topic() -> tuple[str, list[tuple[int, Committed]]]:
        name, partitions = reader.string(), reader.array(partition)
        reader.tags()
        return name, partitions

    return reader.array(topic)


def write_committed(call: Call, topics: Committing, codes: dict[Position, Code], throttle: bool) -> Body:
    """The response to a commit; partitions without a code were fine. `throttle`: whether it starts with that field."""
    out = call.writer()
    if throttle:
        out.int32(0)
    return write_codes(out, [(topic, [number for number, _ in partitions]) for topic, partitions in topics], codes)


def write_codes(out: Writer, topics: list[tuple[str, list[int]]], codes: dict[Position, Code]) -> Body:
    """The rest of a response that says a code for every partition."""
    out.length(len(topics))
    for topic, partitions in topics:
        out.string(topic)
        out.length(len(partitions))
        for partition in partitions:
            out.int32(partition)
            out.int16(codes.get((topic, partition), Code.NONE))
            out.tags()
        out.tags()
    out.tags()
    return out.body()


def known_positions(call: Call, topics: Committing) -> tuple[dict[Position, Committed], dict[Position, Code]]:
    """Offsets of partitions that exist, and an error for each other one."""
    entries: dict[Position, Committed] = {}
    codes: dict[Position, Code] = {}
    for topic, partitions in topics:
        for partition, entry in partitions:
            if call.broker.topics.log(topic, partition) is None:
                codes[topic, partition] = Code.UNKNOWN_TOPIC_OR_PARTITION
            else:
                entries[topic, partition] = entry
    return entries, codes


def all_failed(topics: Committing, code: Code) -> dict[Position, Code]:
    """The same error for every partition."""
    return {(topic, partition): code for topic, partitions in topics for partition, _ in partitions}


def offset_commit(call: Call) -> Body:
    """Versions 2 to 7; refused for callers that are not members of the current generation."""
    reader, version = call.reader, call.version
    group, generation, member_id = reader.string(), reader.int32(), reader.string()
    instance_id = reader.nullable_string() if version >= 7 else None
    if version <= 4:
        reader.int64()
    topics = read_committing(call, version >= 6)
    entries, codes = known_positions(call, topics)
    try:
        now = call.broker.times.now
        call.broker.groups.check_commit(group, generation, member_id, instance_id, False, now)
        if entries:
            call.broker.offsets.commit(group, entries)
    except BrokerError as error:
        codes = all_failed(topics, error.code)
    except StorageError:
        codes = all_failed(topics, Code.COORDINATOR_NOT_AVAILABLE)
    return write_committed(call, topics, codes, version >= 3)


def offset_fetch(call: Call) -> Body:
    """Versions 1 to 7; version 7 may ask for stable offsets: UNSTABLE_OFFSET_COMMIT while a transaction has some."""
    reader, version = call.reader, call.version
    group = reader.string()

    def wanted() -> tuple[str, list[int]]:
        entry = reader.string(), reader.array(reader.int32)
        reader.tags()
        return entry

    asked = reader.nullable_array(wanted)
    stable = version >= 7 and reader.boolean()
    committed = call.broker.offsets.of(group)
    if asked is None:
        by_topic: dict[str, list[int]] = {}
        for topic, partition in committed:
            by_topic.setdefault(topic, []).append(partition)
        asked = list(by_topic.items())
    out = call.writer()
    if version >= 3:
        out.int32(0)
    out.length(len(asked))
    for topic, partitions in asked:
        out.string(topic)
        out.length(len(partitions))
        for partition in partitions:
            unstable = stable and call.broker.offsets.is_pending(group, (topic, partition))
            entry = None if unstable else committed.get((topic, partition))
            out.int32(partition)
            out.int64(entry.offset if entry is not None else -1)
            if version >= 5:
                out.int32(entry.leader_epoch if entry is not None else -1)
            out.string(entry.metadata if entry is not None else "")
            out.int16(Code.UNSTABLE_OFFSET_COMMIT if unstable else Code.NONE)
            out.tags()
        out.tags()
    if version >= 2:
        out.int16(Code.NONE)
    out.tags()
    return out.body()


def offset_delete(call: Call) -> Body:
    """Version 0: forget some offsets of a group without members."""
    reader, broker = call.reader, call.broker
    name = reader.string()
    asked = reader.array(lambda: (reader.string(), reader.array(reader.int32)))
    group = broker.groups.get(name)
    code = Code.NONE
    if group is not None and group.members:
        code = Code.NON_EMPTY_GROUP
    elif group is None and not broker.offsets.of(name):
        code = Code.GROUP_ID_NOT_FOUND
    else:
        try:
            broker.offsets.forget(name, [(topic, p) for topic, partitions in asked for p in partitions])
        except StorageError:
            code = Code.COORDINATOR_NOT_AVAILABLE
    out = call.writer()
    out.int16(code)
    out.int32(0)
    return write_codes(out, asked, {})
