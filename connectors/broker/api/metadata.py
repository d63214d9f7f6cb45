"""What a client asks before anything else: versions, brokers, topics, coordinators. The node is always number 1."""

from __future__ import annotations

from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.wire import Body, Writer

NODE = 1
CLUSTER = "headrace-local"
_NO_OPERATIONS = -(2**31)


def metadata(call: Call) -> Body:
    """Versions 0 to 8: this node and the topics asked for, created on the way where that is allowed."""
    reader, version = call.reader, call.version
    names = reader.nullable_array(reader.string)
    may_create = reader.boolean() if version >= 4 else True
    topics = call.broker.topics
    if names is None or (version == 0 and not names):
        wanted = [(name, Code.NONE) for name in topics.names()]
    else:
        wanted = [(name, _present(call, name, may_create)) for name in names]
    out = call.writer()
    if version >= 3:
        out.int32(0)
    out.length(1)
    _node(call, out)
    if version >= 1:
        out.string(None)
    if version >= 2:
        out.string(CLUSTER)
    if version >= 1:
        out.int32(NODE)
    out.length(len(wanted))
    for name, code in wanted:
        _topic(call, out, name, code)
    if version >= 8:
        out.int32(_NO_OPERATIONS)
    return out.body()


def _present(call: Call, name: str, may_create: bool) -> Code:
    topics, options = call.broker.topics, call.broker.options
    if name in topics:
        return Code.NONE
    if not (may_create and options.auto_create):
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    try:
        topics.create(name, topics.default_partitions, {})
    except BrokerError as error:
        return error.code
    return Code.NONE


def _node(call: Call, out: Writer) -> None:
    out.int32(NODE)
    out.string(call.broker.options.host)
    out.int32(call.broker.options.port)


def _topic(call: Call, out: Writer, name: str, code: Code) -> None:
    version = call.version
    topic = call.broker.topics.get(name)
    out.int16(code)
    out.string(name)
    if version >= 1:
        out.int8(0)
    out.length(len(topic.logs) if topic is not None else 0)
    for partition in range(len(topic.logs) if topic is not None else 0):
        out.int16(Code.NONE)
        out.int32(partition)
        out.int32(NODE)
        if version >= 7:
            out.int32(0)
        out.array([NODE], out.int32)
        out.array([NODE], out.int32)
        if version >= 5:
            out.length(0)
    if version >= 8:
        out.int32(_NO_OPERATIONS)


def find_coordinator(call: Call) -> Body:
    """Versions 0 to 2: this node, for groups and transactional ids alike."""
    out = call.throttled_writer(1)
    out.int16(Code.NONE)
    if call.version >= 1:
        out.string(None)
    _node(call, out)
    return out.body()
