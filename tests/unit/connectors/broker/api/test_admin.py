"""Requests of administrators in every version: topics, partitions, records and settings, each refusal with its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from wire_client import WireClient, versions_of

from headrace.connectors.broker import settings
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.offsets import Committed
from headrace.connectors.broker.wire import Writer

Build = Callable[..., bytearray]
TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)
Change = tuple[str, int, str | None]


def create(
    client: WireClient,
    version: int,
    name: str,
    partitions: int = 1,
    replication: int = 1,
    assigned: Sequence[Sequence[int]] = (),
    given: Mapping[str, str | None] | None = None,
    dry_run: bool = False,
) -> Code:
    """The code of one creation."""

    def write(out: Writer) -> None:
        out.length(1)
        out.string(name)
        out.int32(partitions)
        out.int16(replication)
        out.length(len(assigned))
        for number, nodes in enumerate(assigned):
            out.int32(number)
            out.array(nodes, out.int32)
        out.length(len(given or {}))
        for key, value in (given or {}).items():
            out.string(key)
            out.string(value)
        out.int32(1_000)
        if version >= 1:
            out.int8(dry_run)

    with client.asked(Api.CREATE_TOPICS, version, write) as answer:
        if version >= 2:
            assert answer.int32() == 0
        assert answer.length() == 1
        assert answer.string() == name
        code = Code(answer.int16())
        if version >= 1:
            assert (answer.nullable_string() is None) == (code is Code.NONE)
    return code


def remove(client: WireClient, version: int, names: Sequence[str]) -> dict[str, Code]:
    """{topic: code} of a deletion."""

    def write(out: Writer) -> None:
        out.array(names, out.string)
        out.int32(1_000)

    with client.asked(Api.DELETE_TOPICS, version, write) as answer:
        if version >= 1:
            assert answer.int32() == 0
        return dict(answer.array(lambda: (answer.string(), Code(answer.int16()))))


def cut(client: WireClient, version: int, topic: str, offsets: Mapping[int, int]) -> dict[int, tuple[int, Code]]:
    """{partition: (new start, code)} of DeleteRecords."""

    def write(out: Writer) -> None:
        out.length(1)
        out.string(topic)
        out.length(len(offsets))
        for partition, offset in offsets.items():
            out.int32(partition)
            out.int64(offset)
        out.int32(1_000)

    with client.asked(Api.DELETE_RECORDS, version, write) as answer:
        assert answer.int32() == 0
        assert answer.length() == 1
        assert answer.string() == topic
        return {answer.int32(): (answer.int64(), Code(answer.int16())) for _ in range(answer.length())}


def grow(client: WireClient, version: int, name: str, count: int, dry_run: bool = False) -> Code:
    """The code of CreatePartitions."""

    def write(out: Writer) -> None:
        out.length(1)
        out.string(name)
        out.int32(count)
        out.length(-1)
        out.int32(1_000)
        out.int8(dry_run)

    with client.asked(Api.CREATE_PARTITIONS, version, write) as answer:
        assert answer.int32() == 0
        assert answer.length() == 1
        assert answer.string() == name
        code = Code(answer.int16())
        assert (answer.nullable_string() is None) == (code is Code.NONE)
    return code


def described(
    client: WireClient, version: int, kind: int, name: str, keys: Sequence[str] | None = None
) -> tuple[Code, dict[str, tuple[str, int]]]:
    """(code, {setting: (value, source or is default)})."""

    def write(out: Writer) -> None:
        out.length(1)
        out.int8(kind)
        out.string(name)
        if keys is None:
            out.length(-1)
        else:
            out.array(keys, out.string)
        if version >= 1:
            out.int8(0)
        if version >= 3:
            out.int8(0)

    found = {}
    with client.asked(Api.DESCRIBE_CONFIGS, version, write) as answer:
        assert answer.int32() == 0
        assert answer.length() == 1
        code = Code(answer.int16())
        assert answer.nullable_string() is None
        assert (answer.int8(), answer.string()) == (kind, name)
        for _ in range(answer.length()):
            key, value = answer.string(), answer.string()
            assert answer.boolean() == (kind == BROKER), "read only"
            found[key] = value, answer.int8()
            assert answer.boolean() is False, "sensitive"
            if version >= 1:
                assert answer.length() == 0, "synonyms"
            if version >= 3:
                assert answer.int8() == 2, "a string"
                assert answer.nullable_string() is None
    return code, found


def _altered(client: WireClient, api: Api, version: int, write: Callable[[Writer], None], name: str) -> Code:
    with client.asked(api, version, write) as answer:
        assert answer.int32() == 0
        assert answer.length() == 1
        code = Code(answer.int16())
        assert (answer.nullable_string() is None) == (code is Code.NONE)
        assert answer.int8() in (TOPIC, BROKER)
        assert answer.string() == name
    return code


def alter(
    client: WireClient, changes: Sequence[Change], name: str = "t", kind: int = TOPIC, dry_run: bool = False
) -> Code:
    """The code of IncrementalAlterConfigs."""

    def write(out: Writer) -> None:
        out.length(1)
        out.int8(kind)
        out.string(name)
        out.length(len(changes))
        for key, operation, value in changes:
            out.string(key)
            out.int8(operation)
            out.string(value)
        out.int8(dry_run)

    return _altered(client, Api.INCREMENTAL_ALTER_CONFIGS, 0, write, name)


def replace(client: WireClient, version: int, given: Mapping[str, str | None], dry_run: bool = False) -> Code:
    """The code of AlterConfigs on topic `t`."""

    def write(out: Writer) -> None:
        out.length(1)
        out.int8(TOPIC)
        out.string("t")
        out.length(len(given))
        for key, value in given.items():
            out.string(key)
            out.string(value)
        out.int8(dry_run)

    return _altered(client, Api.ALTER_CONFIGS, version, write, "t")


def _given(client: WireClient, name: str = "t") -> dict[str, str]:
    topic = client.broker.topics.get(name)
    assert topic is not None
    return topic.given


@pytest.mark.parametrize("version", versions_of(Api.CREATE_TOPICS))
def test_topics_are_created_once_with_counts_and_settings(client: WireClient, version: int) -> None:
    assert create(client, version, "new", 5, given={"retention.ms": "1000"}) is Code.NONE
    topic = client.broker.topics.get("new")
    assert topic is not None
    assert (len(topic.logs), topic.given) == (5, {"retention.ms": "1000"})
    assert topic.logs[4].settings.retention_ms == 1000
    assert create(client, version, "new", 5) is Code.TOPIC_ALREADY_EXISTS
    assert create(client, version, "default", -1, -1) is Code.NONE
    assert client.broker.topics.log("default", 2) is not None
    assert client.broker.topics.log("default", 3) is None
    assert create(client, version, "listed", -1, -1, assigned=[[1], [1]]) is Code.NONE
    assert client.broker.topics.log("listed", 1) is not None
    if version >= 1:
        assert create(client, version, "dry", dry_run=True) is Code.NONE
        assert create(client, version, "t", dry_run=True) is Code.TOPIC_ALREADY_EXISTS
        assert "dry" not in client.broker.topics


@pytest.mark.parametrize(
    ("over", "code"),
    [
        ({"name": ""}, Code.INVALID_TOPIC_EXCEPTION),
        ({"name": "a b"}, Code.INVALID_TOPIC_EXCEPTION),
        ({"name": ".."}, Code.INVALID_TOPIC_EXCEPTION),
        ({"name": "x" * 250}, Code.INVALID_TOPIC_EXCEPTION),
        ({"name": "new", "partitions": 0}, Code.INVALID_PARTITIONS),
        ({"name": "new", "partitions": -2}, Code.INVALID_PARTITIONS),
        ({"name": "new", "partitions": 10_001}, Code.INVALID_PARTITIONS),
        ({"name": "new", "replication": 2}, Code.INVALID_REPLICATION_FACTOR),
        ({"name": "new", "replication": 0}, Code.INVALID_REPLICATION_FACTOR),
        ({"name": "new", "given": {"no.such": "1"}}, Code.INVALID_CONFIG),
        ({"name": "new", "given": {"retention.ms": "soon"}}, Code.INVALID_CONFIG),
        ({"name": "new", "given": {"retention.ms": None}}, Code.INVALID_CONFIG),
    ],
)
def test_topics_that_cannot_be_are_refused(client: WireClient, over: dict[str, Any], code: Code) -> None:
    assert create(client, 4, **over) is code
    assert client.broker.topics.names() == ["t"]


@pytest.mark.parametrize("version", versions_of(Api.DELETE_TOPICS))
def test_a_deleted_topic_takes_its_offsets_along(client: WireClient, batch: Build, version: int) -> None:
    client.broker.topics.create("u", 1, {})
    client.broker.offsets.commit("g", {("t", 0): Committed(1, -1, ""), ("u", 0): Committed(2, -1, "")})
    client.broker.offsets.commit("h", {("t", 1): Committed(1, -1, "")})
    assert remove(client, version, ["t", "none"]) == {"t": Code.NONE, "none": Code.UNKNOWN_TOPIC_OR_PARTITION}
    assert client.broker.topics.names() == ["u"]
    assert client.broker.offsets.of("g") == {("u", 0): Committed(2, -1, "")}
    assert client.broker.offsets.groups() == ["g"]


def test_a_full_disk_that_keeps_the_offsets_of_a_deleted_topic_is_said(client: WireClient) -> None:
    client.broker.offsets.commit("g", {("t", 0): Committed(1, -1, "")})
    file = client.broker.topics._storage.files["offsets.jsonl"]  # type: ignore[attr-defined]
    file.limit = len(file.data)
    assert remove(client, 3, ["t"]) == {"t": Code.KAFKA_STORAGE_ERROR}
    journal = client.broker.topics._storage.files["topics.jsonl"]  # type: ignore[attr-defined]
    client.broker.topics.create("u", 1, {})
    journal.limit = len(journal.data)
    assert remove(client, 3, ["u"]) == {"u": Code.KAFKA_STORAGE_ERROR}
    assert "u" in client.broker.topics


@pytest.mark.parametrize("version", versions_of(Api.DELETE_RECORDS))
def test_the_start_of_a_partition_moves_forward_only(client: WireClient, batch: Build, version: int) -> None:
    log = client.broker.topics.log("t", 0)
    assert log is not None
    for _ in range(3):
        log.append(batch([(b"k", b"v")] * 2), 0)
    assert cut(client, version, "t", {0: 3, 1: 0, 9: 0}) == {
        0: (3, Code.NONE),
        1: (0, Code.NONE),
        9: (-1, Code.UNKNOWN_TOPIC_OR_PARTITION),
    }
    assert cut(client, version, "t", {0: 2}) == {0: (3, Code.NONE)}
    assert cut(client, version, "t", {0: 7}) == {0: (-1, Code.OFFSET_OUT_OF_RANGE)}
    assert cut(client, version, "t", {0: -2}) == {0: (-1, Code.OFFSET_OUT_OF_RANGE)}
    assert cut(client, version, "t", {0: -1}) == {0: (6, Code.NONE)}
    assert (log.start, log.end, log.size) == (6, 6, 0)
    assert cut(client, version, "none", {0: 0}) == {0: (-1, Code.UNKNOWN_TOPIC_OR_PARTITION)}


def test_records_of_a_compacted_topic_cannot_be_cut(client: WireClient) -> None:
    create(client, 4, "table", given={"cleanup.policy": "compact"})
    create(client, 4, "both", given={"cleanup.policy": "compact,delete"})
    assert cut(client, 1, "table", {0: 0}) == {0: (-1, Code.POLICY_VIOLATION)}
    assert cut(client, 1, "both", {0: 0}) == {0: (0, Code.NONE)}


@pytest.mark.parametrize("version", versions_of(Api.CREATE_PARTITIONS))
def test_partitions_are_added_and_never_taken_away(client: WireClient, version: int) -> None:
    assert grow(client, version, "t", 4, dry_run=True) is Code.NONE
    assert client.broker.topics.log("t", 2) is None
    assert grow(client, version, "t", 4) is Code.NONE
    assert client.broker.topics.log("t", 3) is not None
    for count in (4, 3, 0, -1, 10_001):
        assert grow(client, version, "t", count) is Code.INVALID_PARTITIONS
    assert grow(client, version, "none", 4) is Code.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("version", versions_of(Api.DESCRIBE_CONFIGS))
def test_settings_are_told_with_where_they_come_from(client: WireClient, version: int) -> None:
    client.broker.topics.alter("t", {"retention.ms": "5000"})
    code, found = described(client, version, TOPIC, "t")
    assert code is Code.NONE
    assert set(found) == set(settings.DEFAULTS)
    from_topic, from_default = (1, 5) if version >= 1 else (0, 1)
    assert found["retention.ms"] == ("5000", from_topic)
    assert found["segment.bytes"] == (settings.DEFAULTS["segment.bytes"], from_default)
    assert described(client, version, TOPIC, "t", ["retention.ms", "no.such"])[1] == {
        "retention.ms": ("5000", from_topic)
    }
    assert described(client, version, TOPIC, "none") == (Code.UNKNOWN_TOPIC_OR_PARTITION, {})
    code, found = described(client, version, BROKER, "1")
    assert (code, found["num.partitions"][0], found["auto.create.topics.enable"][0]) == (Code.NONE, "3", "true")
    assert described(client, version, 8, "x") == (Code.INVALID_REQUEST, {})


def test_single_settings_are_set_deleted_appended_and_subtracted(client: WireClient) -> None:
    assert alter(client, [("retention.ms", SET, "5000"), ("segment.ms", SET, "1000")]) is Code.NONE
    assert _given(client) == {"retention.ms": "5000", "segment.ms": "1000"}
    assert alter(client, [("segment.ms", DELETE, None)]) is Code.NONE
    assert _given(client) == {"retention.ms": "5000"}
    assert alter(client, [("cleanup.policy", APPEND, "compact")]) is Code.NONE
    assert alter(client, [("cleanup.policy", APPEND, "compact")]) is Code.NONE
    assert _given(client)["cleanup.policy"] == "delete,compact"
    log = client.broker.topics.log("t", 1)
    assert log is not None
    assert (log.settings.compacts, log.settings.deletes, log.settings.retention_ms) == (True, True, 5000)
    assert alter(client, [("cleanup.policy", SUBTRACT, "delete")]) is Code.NONE
    assert _given(client)["cleanup.policy"] == "compact"
    assert log.settings.deletes is False


@pytest.mark.parametrize(
    ("changes", "over", "code"),
    [
        ([("no.such", SET, "1")], {}, Code.INVALID_CONFIG),
        ([("no.such", DELETE, None)], {}, Code.INVALID_CONFIG),
        ([("retention.ms", SET, None)], {}, Code.INVALID_CONFIG),
        ([("retention.ms", SET, "-2")], {}, Code.INVALID_CONFIG),
        ([("retention.ms", APPEND, "1")], {}, Code.INVALID_CONFIG),
        ([("cleanup.policy", SUBTRACT, "delete")], {}, Code.INVALID_CONFIG),
        ([("cleanup.policy", APPEND, "burn")], {}, Code.INVALID_CONFIG),
        ([("segment.ms", SET, "5"), ("no.such", SET, "1")], {}, Code.INVALID_CONFIG),
        ([("retention.ms", SET, "1")], {"name": "none"}, Code.UNKNOWN_TOPIC_OR_PARTITION),
        ([("retention.ms", SET, "1")], {"kind": BROKER, "name": "1"}, Code.INVALID_REQUEST),
    ],
)
def test_a_change_that_is_refused_changes_nothing(
    client: WireClient, changes: list[Change], over: dict[str, Any], code: Code
) -> None:
    assert alter(client, changes, **over) is code
    assert _given(client) == {}


@pytest.mark.parametrize("version", versions_of(Api.ALTER_CONFIGS))
def test_replacing_settings_forgets_those_that_are_not_named(client: WireClient, version: int) -> None:
    assert alter(client, [("retention.ms", SET, "5000")]) is Code.NONE
    assert replace(client, version, {"segment.ms": "7"}, dry_run=True) is Code.NONE
    assert _given(client) == {"retention.ms": "5000"}
    assert replace(client, version, {"segment.ms": "0"}) is Code.INVALID_CONFIG
    assert _given(client) == {"retention.ms": "5000"}
    assert replace(client, version, {"segment.ms": "7"}) is Code.NONE
    assert _given(client) == {"segment.ms": "7"}
    assert replace(client, version, {}) is Code.NONE
    assert _given(client) == {}
