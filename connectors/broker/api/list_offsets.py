"""ListOffsets: where a partition starts and ends, and which record was first at a time."""

from __future__ import annotations

from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.codes import Code
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.wire import Body

_READ_COMMITTED = 1
_EARLIEST, _LATEST, _MAX_TIMESTAMP = -2, -1, -3


def list_offsets(call: Call) -> Body:
    """Versions 1 to 5: earliest, latest (last stable offset for read_committed), by time, largest timestamp."""
    reader, version = call.reader, call.version
    reader.int32()
    committed_only = version >= 2 and reader.int8() == _READ_COMMITTED
    out = call.writer()
    if version >= 2:
        out.int32(0)
    topics = reader.length()
    out.length(topics)
    for _ in range(topics):
        topic = reader.string()
        out.string(topic)
        partitions = reader.length()
        out.length(partitions)
        for _ in range(partitions):
            partition = reader.int32()
            if version >= 4:
                reader.int32()
            log = call.broker.topics.log(topic, partition)
            timestamp, offset = _find(log, reader.int64(), committed_only) if log is not None else (-1, -1)
            out.int32(partition)
            out.int16(Code.NONE if log is not None else Code.UNKNOWN_TOPIC_OR_PARTITION)
            out.int64(timestamp)
            out.int64(offset)
            if version >= 4:
                out.int32(0 if log is not None else -1)
    return out.body()


def _find(log: PartitionLog, wanted: int, committed_only: bool) -> tuple[int, int]:
    if wanted == _EARLIEST:
        return -1, log.start
    if wanted == _LATEST:
        return -1, log.last_stable_offset if committed_only else log.end
    if wanted == _MAX_TIMESTAMP:
        return log.newest_record()
    found = log.offset_for_timestamp(wanted)
    return found if not committed_only or found[1] < log.last_stable_offset else (-1, -1)
