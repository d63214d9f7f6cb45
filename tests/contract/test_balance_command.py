"""`headrace balance` on a run's topics: the report of the last versions, garbage passed over, a command that acts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.connectors.kafka import Connection
from headrace.pipeline.balance_feed import BalanceFeed, show_metrics
from headrace.pipeline.cli.main import main
from headrace.pipeline.runtime.metrics import Registry
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import HeadraceError
from headrace.schemas.parts import HeldTask
from headrace.schemas.records import Batched, Demand, Kept, Record, RunEnd, RunManifest, Step, Trajectory
from headrace.schemas.topics import partition_counts

NOW = time.time_ns() // 1_000_000
STEPS, SECONDS = 14, 2.0
"""The first steps lie before the window of ten."""


def at(second: float) -> int:
    return NOW + round(1000 * second)


class Topics:
    """A run's topics, written at given times."""

    def __init__(self, bootstrap: str, run: str) -> None:
        self.connection = Connection.of(KafkaConfig(), run, bootstrap)
        self.connection.ensure_topics(partition_counts(["main"], groups=2, inboxes=1, lanes=1))
        self.producer = self.connection.producer("test")

    def write(self, topic: str, record: Record, second: float, partition: int = 0) -> None:
        key = type(record).__name__.encode()  # `run` is compacted
        headers = headers_of(record, self.connection.run, "0")
        self.connection.produce(
            self.producer, topic, encode(record), partition=partition, key=key, headers=headers, timestamp=at(second)
        )

    def flush(self) -> None:
        assert self.producer.flush(20) == 0


def fill(topics: Topics, waited: float) -> None:
    """A run of one policy whose trainer waits so long in every step, with two workers."""
    topics.write("run", RunManifest(run=topics.connection.run, created_ms=1, tokenizer_digest="", policies=["main"]), 0)
    for n in range(STEPS):
        step = Step(
            policy=0, batch=n + 1, version=n + 1, lineage=0, updates=1, loss=0.0, tokens=9, sequences=1,
            wait_seconds=waited, step_seconds=1.0, publish_seconds=0.0, delta_bytes=0, changed_share=0.0,
            finished_ms=at(n * SECONDS),
        )  # fmt: skip
        topics.write("steps", step, n * SECONDS)
        topics.write("ledger", Kept(policy=0, group=n), n * SECONDS + 0.5)
        topics.write("ledger", Batched(policy=0, batch=n + 1, groups=[n]), n * SECONDS + 0.6)
        for worker, held in (("a", 4), ("b", 2)):
            tasks = [HeldTask(kind="train", group=g, replica=0, attempt=0) for g in range(held)]
            demand = Demand(
                worker=worker, incarnation=1, role="any", capacity=5, next_sequence=0, inbox=0,
                sent_ms=at(n * SECONDS), held=tasks,
            )  # fmt: skip
            topics.write("demand", demand, n * SECONDS)
        trajectory = Trajectory(
            group=n, replica=0, attempt=0, worker="a", incarnation=1, stream="main", prompt_id="x", status="train",
            end_reason="stop", reward=1.0, tokens=100, started_ms=at(0), finished_ms=at(n * SECONDS + 0.1),
        )  # fmt: skip
        topics.write("trajectories", trajectory, n * SECONDS + 0.1, partition=n % 2)
    topics.connection.produce(topics.producer, "demand", b"no record", partition=0)
    topics.connection.produce(topics.producer, "trajectories", b"", partition=0)
    topics.flush()


@pytest.fixture
def make(bootstrap: str, request: pytest.FixtureRequest) -> Callable[[float], Topics]:
    def topics(waited: float) -> Topics:
        made = Topics(bootstrap, f"balance-{os.getpid()}-{len(request.node.name)}-{round(waited * 10)}")
        fill(made, waited)
        return made

    return topics


def headrace(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["balance", *words])
    return int(stopped.value.code or 0)


def test_the_report_is_over_the_last_versions(
    make: Callable[[float], Topics], bootstrap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = make(0.02)
    words = ("--run", topics.connection.run, "--bootstrap", bootstrap)
    assert headrace(*words, "--format", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["policies"][0]["steps"] == 10
    assert report["wait_share"] == pytest.approx(0.01)
    assert report["busy_share"] == pytest.approx(0.75, abs=0.01)
    assert (report["branch"], report["size"], report["target"]) == ("shrink", 2, 2)
    made = {worker["worker"]: worker["trajectories"] for worker in report["workers"]}
    assert made == {"a": 11, "b": 0}
    assert headrace(*words) == 0
    text = capsys.readouterr().out
    assert "shrink: 2 workers, should be 2" in text and "tokens/s" in text


def test_a_starving_trainer_calls_the_command_within_bounds(
    make: Callable[[float], Topics], bootstrap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = make(1.5)
    topics.write("run", RunEnd(reason="steps", ended_ms=1), 27)
    topics.flush()
    out = tmp_path / "said"
    code = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + chr(10))"
    command = f'{sys.executable} -c "{code}" {out} {{size}} {{target}} {{branch}}'
    words = ("--run", topics.connection.run, "--bootstrap", bootstrap, "--apply", command, "--max", "5")
    assert headrace(*words) == 0
    assert out.read_text() == "2 5 grow\n"
    assert "apply: grow from 2 to 5" in capsys.readouterr().out


def test_what_comes_later_is_read_on_and_shown_as_gauges(make: Callable[[float], Topics]) -> None:
    topics = make(0.1)
    feed = BalanceFeed(topics.connection, 10)
    feed.catch_up()
    seen = feed.balance.steps_seen
    feed.catch_up()
    assert feed.balance.steps_seen == seen == STEPS and not feed.ended
    topics.write("run", RunEnd(reason="steps", ended_ms=1), 27)
    topics.flush()
    feed.catch_up()
    report, metrics = feed.balance.report(), Registry()
    assert feed.ended and report is not None
    show_metrics(report, metrics)
    assert metrics.value("balance_target_workers") == report.target
    assert metrics.value("balance_policy_wait_share", policy="main") == pytest.approx(0.05)
    assert metrics.value("balance_worker_busy_share", worker="a") == pytest.approx(1.0, abs=0.01)


def test_a_run_that_was_never_created_is_refused(bootstrap: str) -> None:
    connection = Connection.of(KafkaConfig(), f"bare-{os.getpid()}", bootstrap)
    connection.ensure_topics(partition_counts(["main"], groups=1, inboxes=1, lanes=1))
    with pytest.raises(HeadraceError, match="holds no manifest"):
        BalanceFeed(connection, 10)
