"""Requests of administrators: topics, partitions, records, settings."""

from __future__ import annotations

from headrace.connectors.broker import settings
from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.storage import StorageError
from headrace.connectors.broker.wire import Body, Writer

_TOPIC = 2
_BROKER = 4
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)
_FROM_DEFAULT, _FROM_TOPIC = 5, 1
_TYPE_STRING = 2


def create_topics(call: Call) -> Body:
    """Versions 0 to 4; partition count -1 takes the broker's default, explicit replica lists must name one node."""
    reader, version = call.reader, call.version

    def topic() -> tuple[str, int, int, list[int], dict[str, str | None]]:
        name, partitions, replication = reader.string(), reader.int32(), reader.int16()
        assigned = reader.array(lambda: (reader.int32(), reader.array(reader.int32))[0])
        given = dict(reader.array(lambda: (reader.string(), reader.nullable_string())))
        return name, partitions, replication, assigned, given

    asked = reader.array(topic)
    reader.int32()
    dry_run = version >= 1 and reader.boolean()
    out = call.writer()
    if version >= 2:
        out.int32(0)
    out.length(len(asked))
    for name, partitions, replication, assigned, given in asked:
        code, reason = Code.NONE, None
        try:
            count = len(assigned) or (call.broker.topics.default_partitions if partitions == -1 else partitions)
            _create(call, name, count, replication, given, dry_run)
        except BrokerError as error:
            code, reason = error.code, error.reason
        out.string(name)
        out.int16(code)
        if version >= 1:
            out.string(reason)
    return out.body()


def _create(call: Call, name: str, count: int, replication: int, given: dict[str, str | None], dry_run: bool) -> None:
    topics = call.broker.topics
    topics.check_new(name, count, given)
    if replication not in (-1, 1):
        raise BrokerError(Code.INVALID_REPLICATION_FACTOR, f"replication {replication}: the local broker is one node")
    if not dry_run:
        topics.create(name, count, {key: value for key, value in given.items() if value is not None})


def delete_topics(call: Call) -> Body:
    """Versions 0 to 3; committed offsets of the topic go with it."""
    names = call.reader.array(call.reader.string)
    out = call.throttled_writer(1)
    out.length(len(names))
    for name in names:
        code = Code.NONE
        try:
            call.broker.topics.delete(name)
            call.broker.offsets.forget_topic(name)
        except BrokerError as error:
            code = error.code
        except StorageError:
            code = Code.KAFKA_STORAGE_ERROR
        out.string(name)
        out.int16(code)
    return out.body()


def delete_records(call: Call) -> Body:
    """Versions 0 and 1: move the start of partitions; whole segments below it leave the disk."""
    reader = call.reader
    asked = reader.array(lambda: (reader.string(), reader.array(lambda: (reader.int32(), reader.int64()))))
    out = call.writer()
    out.int32(0)
    out.length(len(asked))
    for topic, partitions in asked:
        out.string(topic)
        out.length(len(partitions))
        for partition, offset in partitions:
            low, code = -1, Code.NONE
            try:
                low = call.broker.topics.delete_records(topic, partition, offset)
            except BrokerError as error:
                code = error.code
            out.int32(partition)
            out.int64(low)
            out.int16(code)
    return out.body()


def create_partitions(call: Call) -> Body:
    """Versions 0 and 1: raise the number of partitions."""
    reader = call.reader

    def topic() -> tuple[str, int]:
        name, count = reader.string(), reader.int32()
        reader.nullable_array(lambda: reader.array(reader.int32))
        return name, count

    asked = reader.array(topic)
    reader.int32()
    dry_run = reader.boolean()
    out = call.writer()
    out.int32(0)
    out.length(len(asked))
    for name, count in asked:
        code, reason = Code.NONE, None
        try:
            call.broker.topics.add_partitions(name, count, dry_run)
        except BrokerError as error:
            code, reason = error.code, error.reason
        out.string(name)
        out.int16(code)
        out.string(reason)
    return out.body()


def describe_configs(call: Call) -> Body:
    """Versions 0 to 3: all settings of a topic with their source; of the broker, its few."""
    reader, version = call.reader, call.version
    asked = reader.array(lambda: (reader.int8(), reader.string(), reader.nullable_array(reader.string)))
    if version >= 1:
        reader.boolean()
    if version >= 3:
        reader.boolean()
    out = call.writer()
    out.int32(0)
    out.length(len(asked))
    for kind, name, keys in asked:
        code, values, given = _settings(call, kind, name)
        out.int16(code)
        out.string(None)
        out.int8(kind)
        out.string(name)
        shown = [key for key in values if keys is None or key in keys]
        out.length(len(shown))
        for key in shown:
            _entry(out, version, key, values[key], key in given, kind == _BROKER)
    return out.body()


def _settings(call: Call, kind: int, name: str) -> tuple[Code, dict[str, str], dict[str, str]]:
    """(code, all values, those that were set)."""
    if kind == _TOPIC:
        topic = call.broker.topics.get(name)
        if topic is None:
            return Code.UNKNOWN_TOPIC_OR_PARTITION, {}, {}
        return Code.NONE, {**settings.DEFAULTS, **topic.given}, topic.given
    if kind == _BROKER:
        options = call.broker.options
        values = {
            "auto.create.topics.enable": str(options.auto_create).lower(),
            "num.partitions": str(options.default_partitions),
            "group.initial.rebalance.delay.ms": str(round(options.first_join_delay * 1000)),
        }
        return Code.NONE, values, {}
    return Code.INVALID_REQUEST, {}, {}


def _entry(out: Writer, version: int, key: str, value: str, was_set: bool, read_only: bool) -> None:
    out.string(key)
    out.string(value)
    out.int8(read_only)
    if version >= 1:
        out.int8(_FROM_TOPIC if was_set else _FROM_DEFAULT)
    else:
        out.int8(not was_set)
    out.int8(0)
    if version >= 1:
        out.length(0)
    if version >= 3:
        out.int8(_TYPE_STRING)
        out.string(None)


Change = tuple[str, int, str | None]
"""(setting, operation, value)"""


def incremental_alter_configs(call: Call) -> Body:
    """Version 0: set, delete, append to and subtract from settings of topics."""
    reader = call.reader

    def change() -> Change:
        return reader.string(), reader.int8(), reader.nullable_string()

    asked = reader.array(lambda: (reader.int8(), reader.string(), reader.array(change)))
    return _alter(call, asked, replace=False, dry_run=reader.boolean())


def alter_configs(call: Call) -> Body:
    """Versions 0 and 1: replace all settings of topics."""
    reader = call.reader

    def change() -> Change:
        return reader.string(), _SET, reader.nullable_string()

    asked = reader.array(lambda: (reader.int8(), reader.string(), reader.array(change)))
    return _alter(call, asked, replace=True, dry_run=reader.boolean())


def _alter(call: Call, asked: list[tuple[int, str, list[Change]]], replace: bool, dry_run: bool) -> Body:
    out = call.writer()
    out.int32(0)
    out.length(len(asked))
    for kind, name, changes in asked:
        code, reason = Code.NONE, None
        try:
            _alter_one(call, kind, name, changes, replace, dry_run)
        except BrokerError as error:
            code, reason = error.code, error.reason
        out.int16(code)
        out.string(reason)
        out.int8(kind)
        out.string(name)
    return out.body()


def _alter_one(call: Call, kind: int, name: str, changes: list[Change], replace: bool, dry_run: bool) -> None:
    if kind != _TOPIC:
        raise BrokerError(Code.INVALID_REQUEST, "only settings of topics can be changed")
    topic = call.broker.topics.get(name)
    if topic is None:
        raise BrokerError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {name}")
    given = {} if replace else dict(topic.given)
    for key, operation, value in changes:
        _change(given, key, operation, value)
    if not dry_run:
        call.broker.topics.alter(name, given)


def _change(given: dict[str, str], key: str, operation: int, value: str | None) -> None:
    """Apply one change to the settings that a topic has."""
    if operation == _DELETE:
        settings.check(key, settings.DEFAULTS.get(key))
        given.pop(key, None)
        return
    if operation in (_APPEND, _SUBTRACT):
        if key not in settings.LISTS:
            raise BrokerError(Code.INVALID_CONFIG, f"{key} is not a list")
        parts = given.get(key, settings.DEFAULTS[key]).split(",")
        named = (value or "").split(",")
        if operation == _APPEND:
            parts += [part for part in named if part not in parts]
        else:
            parts = [part for part in parts if part not in named]
        value = ",".join(parts)
    settings.check(key, value)
    given[key] = value or ""
