"""The local broker under kill -9: of its clients, of itself, and with a disk that is full."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch_maker import build_batch
from confluent_kafka import KafkaError, Message
from kafka_kit import Kit, wait_until
from raw_kafka import RawClient

from headrace.connectors.broker.codes import Code
from headrace.connectors.kafka_node import free_port

WORKER = Path(__file__).parents[1] / "kit" / "eos_worker.py"
WORKER_KILLS = int(os.environ.get("HEADRACE_CHAOS_KILLS", "30"))
BROKER_KILLS = max(8, WORKER_KILLS // 4)
PARTITIONS = 4


class LocalBroker:
    """The local broker as a process that can be killed and started again at the same address."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, largest_file: int | None = None) -> None:
        """Start and wait until it listens; `largest_file` bytes makes the system refuse longer files."""
        arguments = ["--data", str(self.data), "--port", str(self.port), "--exit-with-parent"]
        limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({largest_file}, {largest_file}));" if largest_file else ""
        code = f"import resource, runpy; {limit} runpy.run_module('headrace.connectors.broker', run_name='__main__')"
        self.process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert any(line.startswith("ready") for line in self.process.stdout)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    """A running broker of this test's own."""
    broker = LocalBroker(tmp_path / "broker")
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def kit(broker: LocalBroker) -> Iterator[Kit]:
    """Clients of that broker."""
    kit = Kit(broker.bootstrap, "local")
    yield kit
    kit.close()


class Feed:
    """An idempotent producer that writes numbers until it is stopped; knows which were acknowledged."""

    def __init__(self, kit: Kit, topic: str, pause: float) -> None:
        self._producer = kit.producer(enable_idempotence=True, message_timeout_ms=60_000)
        self._topic = topic
        self._pause = pause
        self._stop = threading.Event()
        self.sent = 0
        self.acknowledged: set[int] = set()
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            number = self.sent
            self._producer.produce(
                self._topic, b"%d" % number, partition=number % PARTITIONS, on_delivery=self._delivered(number)
            )
            self.sent += 1
            self._producer.poll(0)
            time.sleep(self._pause)

    def _delivered(self, number: int) -> Callable[[KafkaError | None, Message], None]:
        def note(error: KafkaError | None, _: Message) -> None:
            if error is None:
                self.acknowledged.add(number)
            else:
                self.errors.append(error.name())

        return note

    def stop(self) -> None:
        """Stop and wait for the last acknowledgements."""
        self._stop.set()
        self._thread.join()
        assert self._producer.flush(60) == 0


class Workers:
    """Copying processes that are started again whenever they end."""

    def __init__(self, kit: Kit, source: str, sink: str, count: int) -> None:
        self._command = [sys.executable, str(WORKER), kit.bootstrap, source, sink, f"copy-{source}"]
        self._processes = {f"w{number}": self._start(f"w{number}") for number in range(count)}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self._command, name], stderr=subprocess.DEVNULL)

    def revive(self) -> None:
        """Start those that have ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                self._processes[name] = self._start(name)

    def kill(self, name: str) -> None:
        """kill -9."""
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self) -> None:
        """Kill all."""
        for name in self._processes:
            self.kill(name)


def _wait_for_all(kit: Kit, workers: Workers, sink: str, expected: int) -> Counter[int]:
    """Values of the sink with their counts, once all have come."""

    def complete() -> Counter[int] | None:
        workers.revive()
        values = Counter(int(value or b"-1") for value in kit.values(sink, PARTITIONS))
        kit.close()
        time.sleep(0.3)
        return values if len(values) >= expected else None

    found: Counter[int] = wait_until(complete, 40)
    return found


def test_the_copy_is_exact_under_kills_of_its_workers(kit: Kit) -> None:
    source, sink = kit.topic(PARTITIONS), kit.topic(PARTITIONS)
    chance = random.Random(7)
    feed = Feed(kit, source, 0.004)
    workers = Workers(kit, source, sink, 2)
    try:
        for kill in range(WORKER_KILLS):
            time.sleep(chance.uniform(0.3, 1.2))
            workers.kill(f"w{kill % 2}")
            workers.revive()
        feed.stop()
        values = _wait_for_all(kit, workers, sink, feed.sent)
    finally:
        workers.stop()
    assert feed.errors == [] and len(feed.acknowledged) == feed.sent
    assert set(values) == set(range(feed.sent))
    assert [value for value, count in values.items() if count != 1] == []


def test_kills_of_the_broker_lose_and_repeat_nothing(broker: LocalBroker, kit: Kit) -> None:
    source, sink = kit.topic(PARTITIONS), kit.topic(PARTITIONS)
    chance = random.Random(11)
    feed = Feed(kit, source, 0.003)
    workers = Workers(kit, source, sink, 1)
    try:
        for _ in range(BROKER_KILLS):
            time.sleep(chance.uniform(0.4, 1.5))
            broker.kill()
            broker.start()
            workers.revive()
        time.sleep(1)
        feed.stop()
        values = _wait_for_all(kit, workers, sink, feed.sent)
    finally:
        workers.stop()
    assert feed.errors == [] and len(feed.acknowledged) == feed.sent
    found = [[int(m.value() or b"-1") for m in kit.read(source, PARTITIONS) if m.partition() == p] for p in range(4)]
    assert found == [list(range(p, feed.sent, PARTITIONS)) for p in range(4)]
    assert set(values) == set(range(feed.sent))
    assert [value for value, count in values.items() if count != 1] == []


def test_a_full_disk_refuses_records_and_stops_nothing(tmp_path: Path) -> None:
    broker = LocalBroker(tmp_path / "broker")
    broker.start(largest_file=1_000_000)
    kit = Kit(broker.bootstrap, "local")
    try:
        topic, other = kit.topic(), kit.topic()
        codes = []
        with RawClient(broker.bootstrap) as client:
            for _ in range(20):
                now = int(time.time() * 1000)
                codes.append(client.produce(topic, build_batch([(b"k", os.urandom(100_000))], timestamps=[now]))[0])
        assert codes == [Code.NONE] * 9 + [Code.KAFKA_STORAGE_ERROR] * 11
        assert len(kit.read(topic, check_crcs=True)) == 9
        assert kit.send(other, [b"still here"]) == []
        broker.kill()
        broker.start()
        assert len(kit.read(topic, check_crcs=True)) == 9
        assert kit.send(topic, [b"again"]) == []
        assert [m.offset() for m in kit.read(topic)] == list(range(10))
    finally:
        kit.close()
        broker.kill()
