"""Consumer groups: sharing, death, static members, and who may commit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from kafka_kit import Kit, unique, wait_until
from raw_kafka import RawClient

from headrace.connectors.broker.codes import Code

_MEMBER = """
import sys
from confluent_kafka import Consumer
bootstrap, group, topic, strategy = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "session.timeout.ms": 2000,
    "heartbeat.interval.ms": 300, "partition.assignment.strategy": strategy, "log_level": 0})
consumer.subscribe([topic])
while True:
    consumer.poll(0.2)
    if consumer.assignment():
        print("assigned", flush=True)
"""


class Member:
    """One consumer, polled by a thread of its own; `owned` and `events` follow its rebalances."""

    def __init__(self, kit: Kit, group: str, topic: str, **given: Any) -> None:
        self.consumer = kit.consumer(group, **given)
        self.owned: set[int] = set()
        self.events: list[str] = []
        self.errors: list[str] = []
        self._incremental = given.get("partition_assignment_strategy") == "cooperative-sticky"
        self._stop = threading.Event()
        self.consumer.subscribe([topic], on_assign=self._assigned, on_revoke=self._revoked)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _assigned(self, _: Consumer, positions: list[TopicPartition]) -> None:
        given = {position.partition for position in positions}
        self.events.append(f"assigned {sorted(given)}")
        self.owned = self.owned | given if self._incremental else given

    def _revoked(self, _: Consumer, positions: list[TopicPartition]) -> None:
        taken = {position.partition for position in positions}
        self.events.append(f"revoked {sorted(taken)}")
        self.owned = self.owned - taken

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                message = self.consumer.poll(0.1)
            except KafkaException as error:
                self.errors.append(error.args[0].name())
                return
            if message is not None and message.error() is not None:
                self.errors.append(message.error().name())

    def stop(self) -> None:
        """Stop polling and close the consumer."""
        self._stop.set()
        self._thread.join(10)
        self.consumer.close()


@pytest.fixture
def join(kit: Kit) -> Iterator[Callable[..., Member]]:
    """Starts members and stops those that still run at the end."""
    members: list[Member] = []

    def start(group: str, topic: str, **given: Any) -> Member:
        members.append(Member(kit, group, topic, **given))
        return members[-1]

    yield start
    for member in members:
        member.stop()


def _shared(members: list[Member], count: int) -> bool:
    """Whether the members own all of `count` partitions, none twice, each at least one."""
    owned = [partition for member in members for partition in member.owned]
    return sorted(owned) == list(range(count)) and all(member.owned for member in members)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_members_share_the_partitions_and_take_over_from_those_that_leave(
    kit: Kit, join: Callable[..., Member], strategy: str
) -> None:
    topic, group = kit.topic(partitions=6), unique("group")
    members = [join(group, topic, partition_assignment_strategy=strategy) for _ in range(3)]
    wait_until(lambda: _shared(members, 6), 30)
    members.pop(1).stop()
    wait_until(lambda: _shared(members, 6), 20)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_killed_member_is_replaced_after_its_session(kit: Kit, join: Callable[..., Member], strategy: str) -> None:
    topic, group = kit.topic(partitions=4), unique("group")
    command = [sys.executable, "-c", _MEMBER, kit.bootstrap, group, topic, strategy]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        survivor = join(group, topic, partition_assignment_strategy=strategy, session_timeout_ms=2000)
        wait_until(lambda: len(survivor.owned) == 2, 20)
        process.kill()
        killed = time.monotonic()
        wait_until(lambda: len(survivor.owned) == 4, 20)
        assert 1 < time.monotonic() - killed < 6
    finally:
        process.kill()
        process.wait()


def test_a_static_member_comes_back_without_a_rebalance(kit: Kit, join: Callable[..., Member]) -> None:
    topic, group = kit.topic(partitions=4), unique("group")
    stayer = join(group, topic, group_instance_id="stays")
    leaver = join(group, topic, group_instance_id="leaves")
    wait_until(lambda: _shared([stayer, leaver], 4), 20)
    owned, events = leaver.owned, list(stayer.events)
    leaver.stop()
    back = join(group, topic, group_instance_id="leaves")
    wait_until(lambda: back.owned == owned, 5)
    time.sleep(0.5)
    assert stayer.events == events


def test_a_static_member_started_twice_is_fenced(kit: Kit, join: Callable[..., Member]) -> None:
    topic, group = kit.topic(), unique("group")
    first = join(group, topic, group_instance_id="one")
    wait_until(lambda: first.owned, 20)
    second = join(group, topic, group_instance_id="one")
    wait_until(lambda: second.owned, 20)
    wait_until(lambda: {"_FATAL", "FENCED_INSTANCE_ID"} & set(first.errors), 10)


def test_committed_offsets_are_where_the_next_member_starts(kit: Kit) -> None:
    topic, group = kit.topic(), unique("group")
    kit.send(topic, [b"%d" % i for i in range(20)])

    def first_value() -> bytes | None:
        consumer = kit.consumer(group)
        consumer.subscribe([topic])
        message = wait_until(lambda: consumer.poll(1), 20)
        if message.offset() == 0:
            consumer.commit(offsets=[TopicPartition(topic, 0, 12)], asynchronous=False)
        consumer.close()
        value: bytes | None = message.value()
        return value

    assert [first_value(), first_value()] == [b"0", b"12"]


def test_a_member_that_stopped_polling_may_not_commit(kit: Kit) -> None:
    topic, group = kit.topic(), unique("group")
    kit.send(topic, [b"x"])
    silent = kit.consumer(group, session_timeout_ms=1500, max_poll_interval_ms=2000)
    silent.subscribe([topic])
    wait_until(lambda: silent.poll(0.5), 20)
    time.sleep(3)
    with pytest.raises(KafkaException) as caught:
        silent.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    assert caught.value.args[0].code() in {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION}


def test_commits_need_the_membership_of_now(kit: Kit) -> None:
    topic, group = kit.topic(), unique("group")
    with RawClient(kit.bootstrap) as client:

        def commit(**who: Any) -> Code:
            return client.commit_offset(group, topic, 5, **who)

        wait_until(lambda: commit() is Code.NONE)
        assert commit(generation=3, member="ghost") in {Code.UNKNOWN_MEMBER_ID, Code.ILLEGAL_GENERATION}
        consumer = kit.consumer(group, group_instance_id="real")
        consumer.subscribe([topic])
        wait_until(lambda: consumer.poll(0.1) is None and consumer.assignment(), 20)
        described = kit.admin.describe_consumer_groups([group])[group].result(10)
        member = described.members[0].member_id
        assert commit() is Code.UNKNOWN_MEMBER_ID
        assert commit(generation=1, member="ghost") is Code.UNKNOWN_MEMBER_ID
        assert commit(generation=77, member=member) is Code.ILLEGAL_GENERATION
        assert commit(generation=1, member="ghost", instance="real") is Code.FENCED_INSTANCE_ID
        assert commit(generation=1, member=member, instance="real") is Code.NONE
