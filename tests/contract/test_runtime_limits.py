"""A worker at its limits: a turn longer than the group's patience, a flood of unusable records, no broker at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_servers import LIBS, SERVERS, Server
from toy_worker import Chain, check_chain, make_run, running, send, toy, toy_config, wait_for_chain

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime.dead_letters import UnusableFlood
from headrace.pipeline.runtime.stage import Context, Received
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.config import KafkaConfig, RunConfig, dump_config
from headrace.schemas.topics import partition_counts


class Slow(Chain):
    """Takes longer for record 3 than ``max.poll.interval.ms`` allows, every time."""

    seconds = 5.0
    times = 0

    def process(self, received: Received, context: Context) -> None:
        super().process(received, context)
        if getattr(received.record, "group", None) == 3:
            type(self).times += 1
            time.sleep(self.seconds)


def test_a_turn_longer_than_max_poll_interval_neither_loops_nor_duplicates(bootstrap: str) -> None:
    settings = {"session.timeout.ms": "2000", "heartbeat.interval.ms": "300", "max.poll.interval.ms": "3000"}
    config, connection = make_run(bootstrap, settings)
    Slow.times = 0
    stop = StopSignal()
    send(connection, "admissions", [(0, toy(n)) for n in range(6)])
    with running(Worker(connection, config, "assemble", "a", Slow, stop=stop), stop) as errors:
        check_chain(wait_for_chain(connection, 6), range(6))
        send(connection, "admissions", [(n % 4, toy(n)) for n in range(6, 40)])
        check_chain(wait_for_chain(connection, 40), range(40))
    assert not errors
    assert 1 <= Slow.times <= 3, "the interval grows with the first expulsion, so the turn is not repeated for ever"


def test_a_reader_without_a_group_may_take_its_time(bootstrap: str) -> None:
    """Trainers read by ``assign()``: a step longer than the interval costs them nothing."""
    settings = {"session.timeout.ms": "1000", "heartbeat.interval.ms": "300", "max.poll.interval.ms": "1000"}
    _, connection = make_run(bootstrap, settings)
    send(connection, "batches.main", [(0, toy(0))])
    from confluent_kafka import TopicPartition

    consumer = connection.consumer("trainer", f"{connection.run}.trainer.main")
    consumer.assign([TopicPartition(connection.topic("batches.main"), 0, 0)])
    seen: list[Any] = [consumer.poll(20)]
    time.sleep(2.5)
    send(connection, "batches.main", [(0, toy(1))])
    seen.append(consumer.poll(20))
    consumer.close()
    assert [(m.error(), m.offset()) for m in seen] == [(None, 0), (None, 1)]


def test_a_flood_of_unusable_records_ends_the_worker_with_its_letters_written(bootstrap: str) -> None:
    config, connection = make_run(bootstrap, unusable_window=50)
    send(connection, "admissions", [(0, toy(0)), *((0, b"\xff garbage %d" % n) for n in range(100))])
    said = []
    for _ in range(2):
        stop = StopSignal()
        with running(Worker(connection, config, "assemble", "a", Chain, stop=stop), stop) as errors:
            end = time.monotonic() + 60
            while not errors and time.monotonic() < end:
                time.sleep(0.05)
        assert [type(error) for error in errors] == [UnusableFlood]
        said.append(str(errors[0]))
    assert "26 of the last 27 records of admissions could not be used" in said[0]
    assert f"{config.run.id}.admissions[0]@26" in said[0]
    assert "26 of the last 26 records" in said[1], "a restart goes on behind what is set aside"
    letters = [letter.value for letter in connection.read_topic("dead-letters")]
    assert letters == [b"\xff garbage %d" % n for n in range(52)], "each once"
    check_chain(wait_for_chain(connection, 1), range(1))


KINDS = ["local", *([pytest.param("kafka", marks=pytest.mark.kafka)] if os.environ.get(LIBS) else [])]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A broker of this test's own, because it is away for a while."""
    server = SERVERS[request.param](tmp_path / "broker")
    server.start()
    yield server
    server.kill()


class Parts:
    """Processes of a run."""

    def __init__(self, config: Path, bootstrap: str) -> None:
        self._config, self._bootstrap = config, bootstrap
        self._started: list[subprocess.Popen[str]] = []

    def start(self, module: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", module, "--config", str(self._config), "--bootstrap", self._bootstrap]
        process = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def hears(process: subprocess.Popen[str], text: str) -> str:
    """The line with the text; fails when the process ends without it."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"ended with {process.wait()} and without {text!r}: {''.join(lines)}")


def test_every_part_that_starts_without_a_broker_waits_and_says_for_what(server: Server, tmp_path: Path) -> None:
    config: RunConfig = toy_config("early")
    dump_config(config, tmp_path / "config.json")
    connection = Connection.of(KafkaConfig(), "early", server.bootstrap)
    connection.ensure_topics(partition_counts(["main"], groups=4, inboxes=4, lanes=2))
    server.kill()
    parts = Parts(tmp_path / "config.json", server.bootstrap)
    try:
        waiting = {
            "operators": parts.start("headrace.pipeline.runtime", "--instance", "ops"),
            "source": parts.start("headrace.pipeline.dataset_to_prompt", "--instance", "s", "--stream", "main"),
            "worker": parts.start("headrace.pipeline.task_to_trajectory", "--instance", "rollout-0"),
            "trainer": parts.start("headrace.trainers", "--instance", "trainer-main", "--policy", "main"),
        }
        for name, process in waiting.items():
            assert server.bootstrap in hears(process, "waiting for Kafka at"), name
        for name in ("source", "worker", "trainer"):
            waiting[name].terminate()
            assert waiting[name].wait(20) == 0, f"{name} ends in order while it waits"
        assert waiting["operators"].poll() is None
        server.start()
        hears(waiting["operators"], "runs tasks [0, 1, 2, 3]")
    finally:
        parts.end()
