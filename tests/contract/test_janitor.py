"""What the janitor takes from a cluster: finished and orphaned runs, never a live one, and nobody else's topics."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewTopic

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.cli.main import main
from headrace.pipeline.janitor import Rules, delete_run, verdicts
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import KafkaConfig
from headrace.schemas.ids import blob_key
from headrace.schemas.records import Demand, Record, RunEnd
from headrace.schemas.topics import partition_counts

DAY_MS = 86_400_000
NOW_MS = int(time.time() * 1000)


def make(bootstrap: str, records: list[tuple[str, Record, float]]) -> Connection:
    """A run with records (topic, record, age in days)."""
    connection = Connection.of(KafkaConfig(), f"jan-{uuid.uuid4().hex[:8]}", bootstrap)
    connection.ensure_topics(partition_counts(["main"], groups=1, inboxes=1, lanes=1))
    producer = connection.producer("test")
    for topic, record, age in records:
        connection.produce(
            producer, topic, encode(record), partition=0, key=b"k", headers=headers_of(record, connection.run, "0"),
            timestamp=NOW_MS - int(age * DAY_MS),
        )  # fmt: skip
    assert producer.flush(30) == 0
    return connection


def demand() -> Demand:
    return Demand(
        worker="w", incarnation=1, role="any", capacity=1, next_sequence=0, inbox=0, sent_ms=1, policies=[], held=[]
    )


def ended(age: float) -> tuple[str, Record, float]:
    return "run", RunEnd(reason="steps", ended_ms=NOW_MS - int(age * DAY_MS)), age


def say(bootstrap: str, rules: Rules | None = None) -> dict[str, tuple[str, bool]]:
    return {v.run: (v.state, v.goes) for v in verdicts(KafkaConfig(), bootstrap, rules or Rules())}


def test_only_runs_that_nobody_needs_go(bootstrap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long_ended = make(bootstrap, [("demand", demand(), 20), ended(20)])
    just_ended = make(bootstrap, [("demand", demand(), 3), ended(3)])
    stopped = make(bootstrap, [("demand", demand(), 10)])
    forgotten = make(bootstrap, [("demand", demand(), 40)])
    alive = make(bootstrap, [("demand", demand(), 0), ended(20)])
    joined = make(bootstrap, [("demand", demand(), 40), ended(40)])
    made_ahead = make(bootstrap, [])
    foreign = f"jan-{uuid.uuid4().hex[:8]}"
    admin = long_ended.admin()
    admin.create_topics([NewTopic(f"{foreign}.tasks", 1, 1)])[f"{foreign}.tasks"].result(20)
    member = joined.consumer("m", f"{joined.run}.assemble")
    member.subscribe([joined.topic("trajectories")])
    until = time.monotonic() + 30
    while not member.assignment() and time.monotonic() < until:
        member.poll(0.1)
    assert member.assignment()
    try:
        wanted = {
            long_ended.run: ("finished", True),
            just_ended.run: ("finished", False),
            stopped.run: ("stopped", False),
            forgotten.run: ("orphaned", True),
            alive.run: ("live", False),
            joined.run: ("live", False),
            made_ahead.run: ("empty", False),
            foreign: ("foreign", False),
        }
        found = say(bootstrap)
        assert {run: found[run] for run in wanted} == wanted

        store = LocalStore(tmp_path)
        store.put(blob_key(long_ended.run, 1, 0, 0), b"arrays")
        store.put(blob_key(alive.run, 1, 0, 0), b"arrays")
        with pytest.raises(SystemExit) as done:
            main(["janitor", "runs", "--bootstrap", bootstrap, "--store", str(tmp_path), "--format", "json"])
        assert done.value.code in (None, 0)
        said = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
        assert {said[run]["done"] for run in (long_ended.run, forgotten.run)} == {"goes"}
        assert long_ended.list_run_topics(), "without --delete nothing goes"

        with pytest.raises(SystemExit):
            main(["janitor", "runs", "--bootstrap", bootstrap, "--store", str(tmp_path), "--delete"])
        assert "has members" in capsys.readouterr().out
        for connection, stays in ((long_ended, False), (forgotten, False), (just_ended, True), (stopped, True)):
            assert bool(connection.list_run_topics()) is stays
        assert alive.list_run_topics()
        assert joined.list_run_topics()
        assert f"{foreign}.tasks" in admin.list_topics(timeout=10).topics
        assert [info.key.split("/")[1] for info in store.list("runs/")] == [alive.run]
    finally:
        member.close()


def test_a_run_that_came_back_to_life_after_the_verdict_stays(bootstrap: str) -> None:
    connection = make(bootstrap, [("demand", demand(), 40)])
    assert say(bootstrap)[connection.run] == ("orphaned", True)
    producer = connection.producer("test")
    connection.produce(producer, "demand", encode(demand()), partition=0, headers=[])
    assert producer.flush(30) == 0
    verdict, _ = delete_run(KafkaConfig(), bootstrap, connection.run, Rules())
    assert verdict is not None
    assert (verdict.state, verdict.goes) == ("live", False)
    assert connection.list_run_topics()
    assert delete_run(KafkaConfig(), bootstrap, "jan-was-never-there", Rules()) == (None, 0)
