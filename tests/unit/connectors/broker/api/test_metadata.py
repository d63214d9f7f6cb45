"""Metadata and FindCoordinator in every version: each field in its place, and topics made by asking."""

from __future__ import annotations

import pytest
from wire_client import WireClient, versions_of

from headrace.connectors.broker.broker import Broker, BrokerOptions, Times
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.storage import MemoryStorage
from headrace.connectors.broker.wire import Reader, Writer


def _ask(client: WireClient, version: int, names: list[str] | None, create: bool = True) -> dict[str, tuple[Code, int]]:
    """{topic: (code, partitions)}, with everything else of the response checked."""

    def write(out: Writer) -> None:
        if names is None:
            out.int32(-1)
        else:
            out.array(names, out.string)
        if version >= 4:
            out.int8(create)
        if version >= 8:
            out.int8(0)
            out.int8(0)

    with client.asked(Api.METADATA, version, write) as answer:
        if version >= 3:
            assert answer.int32() == 0
        assert answer.int32() == 1, "one node"
        assert (answer.int32(), answer.string(), answer.int32()) == (1, "127.0.0.1", 9192)
        if version >= 1:
            assert answer.nullable_string() is None, "rack"
        if version >= 2:
            assert answer.string() == "headrace-local"
        if version >= 1:
            assert answer.int32() == 1, "controller"
        found = dict(answer.array(lambda: _topic(answer, version)))
        if version >= 8:
            assert answer.int32() == -(2**31)
    return found


def _topic(answer: Reader, version: int) -> tuple[str, tuple[Code, int]]:
    code, name = Code(answer.int16()), answer.string()
    if version >= 1:
        assert answer.boolean() is False, "internal"
    numbers = answer.array(lambda: _partition(answer, version))
    assert numbers == list(range(len(numbers)))
    if version >= 8:
        assert answer.int32() == -(2**31)
    return name, (code, len(numbers))


def _partition(answer: Reader, version: int) -> int:
    assert answer.int16() == Code.NONE
    number = answer.int32()
    assert answer.int32() == 1, "leader"
    if version >= 7:
        assert answer.int32() == 0, "leader epoch"
    assert answer.array(answer.int32) == answer.array(answer.int32) == [1], "replicas in sync"
    if version >= 5:
        assert answer.array(answer.int32) == [], "offline replicas"
    return number


@pytest.mark.parametrize("version", versions_of(Api.METADATA))
def test_a_topic_is_told_in_every_version(client: WireClient, version: int) -> None:
    assert _ask(client, version, ["t"]) == {"t": (Code.NONE, 2)}


@pytest.mark.parametrize("version", versions_of(Api.METADATA))
def test_all_topics_are_told_to_who_asks_for_none(client: WireClient, version: int) -> None:
    client.broker.topics.create("u", 1, {})
    everything = {"t": (Code.NONE, 2), "u": (Code.NONE, 1)}
    assert _ask(client, version, None) == everything
    assert _ask(client, version, []) == (everything if version == 0 else {})


@pytest.mark.parametrize("version", versions_of(Api.METADATA))
def test_asking_creates_a_topic_unless_the_client_says_no(client: WireClient, version: int) -> None:
    if version >= 4:
        assert _ask(client, version, ["fresh"], create=False) == {"fresh": (Code.UNKNOWN_TOPIC_OR_PARTITION, 0)}
        assert "fresh" not in client.broker.topics
    assert _ask(client, version, ["fresh", "t"]) == {"fresh": (Code.NONE, 3), "t": (Code.NONE, 2)}


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "x" * 250, "ä"])
def test_a_name_that_cannot_be_is_told_and_makes_no_topic(client: WireClient, name: str) -> None:
    assert _ask(client, 8, [name]) == {name: (Code.INVALID_TOPIC_EXCEPTION, 0)}
    assert client.broker.topics.names() == ["t"]


def test_a_broker_without_auto_creation_creates_nothing(memory: MemoryStorage) -> None:
    broker = Broker(memory, BrokerOptions(port=9192, auto_create=False), Times(0.0, 0))
    assert _ask(WireClient(broker), 1, ["fresh"]) == {"fresh": (Code.UNKNOWN_TOPIC_OR_PARTITION, 0)}


@pytest.mark.parametrize("version", versions_of(Api.FIND_COORDINATOR))
@pytest.mark.parametrize("kind", [0, 1])
def test_this_node_coordinates_groups_and_transactions(client: WireClient, version: int, kind: int) -> None:
    def write(out: Writer) -> None:
        out.string("anything")
        if version >= 1:
            out.int8(kind)

    with client.asked(Api.FIND_COORDINATOR, version, write) as answer:
        if version >= 1:
            assert answer.int32() == 0
        assert answer.int16() == Code.NONE
        if version >= 1:
            assert answer.nullable_string() is None
        assert (answer.int32(), answer.string(), answer.int32()) == (1, "127.0.0.1", 9192)


def test_a_client_without_a_name_is_served(client: WireClient) -> None:
    nameless = WireClient(client.broker, client_id=None)
    assert _ask(nameless, 8, ["t"]) == {"t": (Code.NONE, 2)}
