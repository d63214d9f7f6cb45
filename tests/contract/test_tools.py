"""Other people's clients and tools: kcat, kafka-python, aiokafka, Apache Kafka's own command line."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import aiokafka
import kafka
import pytest
from confluent_kafka import TopicPartition
from kafka_kit import Kit, unique
from raw_kafka import RawClient

from headrace.connectors.broker.codes import Api, Code

JARS = os.environ.get("HEADRACE_KAFKA_LIBS", "")
needs_kcat = pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (apt-get install kcat)")


def _kcat(kit: Kit, *words: str, text: str | None = None) -> str:
    command = ["kcat", "-b", kit.bootstrap, *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_kcat
def test_kcat_writes_lists_and_reads(kit: Kit) -> None:
    topic = kit.topic(partitions=2)
    _kcat(kit, "-P", "-t", topic, "-K", ":", "-p", "0", "-H", "hr-record=Prompt", text="k1:v1\nk2:v2\nk3:v3\n")
    assert f'topic "{topic}" with 2 partitions' in _kcat(kit, "-L", "-t", topic)
    everything = ("-o", "beginning", "-e", "-q", "-X", "check.crcs=true", "-f", "%k=%s@%o %h\\n")
    assert _kcat(kit, "-C", "-t", topic, "-p", "0", *everything).split("\n")[:2] == [
        "k1=v1@0 hr-record=Prompt",
        "k2=v2@1 hr-record=Prompt",
    ]
    assert _kcat(kit, "-C", "-t", topic, "-p", "0", "-o", "-1", "-c", "1", "-q") == "v3\n"
    assert _kcat(kit, "-Q", "-t", f"{topic}:0:-1") == f"{topic} [0] offset 3\n"
    group = ("-G", unique("group"), "-X", "auto.offset.reset=earliest", "-c", "3", "-q", topic)
    assert _kcat(kit, *group) == "v1\nv2\nv3\n"


def test_kafka_python_writes_and_reads(kit: Kit) -> None:
    topic = kit.topic()
    producer = kafka.KafkaProducer(bootstrap_servers=kit.bootstrap)
    producer.send(topic, b"hello", key=b"k", partition=0).get(10)
    producer.close()
    consumer = kafka.KafkaConsumer(
        topic, bootstrap_servers=kit.bootstrap, group_id=unique("group"), auto_offset_reset="earliest"
    )
    message = next(consumer)
    assert (message.key, message.value) == (b"k", b"hello")
    consumer.commit()
    consumer.close()


def test_aiokafka_writes_transactions_and_reads_in_a_group(kit: Kit) -> None:
    topic = kit.topic()

    async def talk() -> list[bytes | None]:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=kit.bootstrap, transactional_id=unique("id"))
        await producer.start()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"one", partition=0)
            await producer.send_and_wait(topic, b"two", partition=0)
        await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=kit.bootstrap,
            group_id=unique("group"),
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        await consumer.start()
        found = [(await consumer.getone()).value for _ in range(2)]
        await consumer.commit()
        await consumer.stop()
        return found

    assert asyncio.run(asyncio.wait_for(talk(), 30)) == [b"one", b"two"]


def test_an_unknown_version_of_the_first_question_is_answered(kit: Kit) -> None:
    """A client newer than the broker learns what the broker has, and falls back (KIP-511)."""
    with RawClient(kit.bootstrap) as client:
        client.send(Api.API_VERSIONS, 99, lambda out: out.tags(), flexible=True)
        reader = client.receive()
        assert Code(reader.int16()) is Code.UNSUPPORTED_VERSION
        keys = {reader.int16(): (reader.int16(), reader.int16()) for _ in range(reader.int32())}
    assert Api.API_VERSIONS in keys


if JARS:

    @pytest.mark.kafka
    def test_the_command_line_of_apache_kafka(kit: Kit) -> None:
        topic, group = kit.topic(partitions=3), unique("group")
        kit.send(topic, [b"a", b"b"])
        kit.consumer(group).commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        libs = Path(JARS)

        def tool(name: str, *words: str) -> str:
            command = ["java", "-Xmx128m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", f"{libs}/*"]
            command += [f"org.apache.kafka.tools.{name}", "--bootstrap-server", kit.bootstrap, *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr + done.stdout
            return done.stdout

        assert "PartitionCount: 3" in tool("TopicCommand", "--describe", "--topic", topic)
        assert f"{topic}:0:2" in tool("GetOffsetShell", "--topic", topic)
        described = tool("consumer.group.ConsumerGroupCommand", "--describe", "--group", group)
        assert [line.split()[3:6] for line in described.splitlines() if topic in line] == [["1", "2", "1"]]
