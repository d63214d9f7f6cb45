"""Commands that read, against the local broker: what was written to a run's topics is what people see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka.cimpl import NewTopic

from headrace.connectors.kafka import Connection
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.local_broker import broker_of, forget_live, live_bootstrap, note_live
from headrace.pipeline.launch.prepare import create_topics
from headrace.pipeline.run_records import read_trajectory_heads
from headrace.pipeline.runtime.dead_letters import letter_headers
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import PolicyConfig, RunConfig, RunSection, StreamConfig, dump_config
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import group_partition
from headrace.schemas.parts import AdmittedPolicy, ManifestMember, Sequence, Source
from headrace.schemas.records import (
    Admission,
    Batched,
    Kept,
    Manifest,
    Opened,
    Prompt,
    Record,
    RunManifest,
    Step,
    Trajectory,
)

HEADRACE = Path(sys.executable).with_name("headrace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose broker is stopped and whose topics hold one prompt's whole life and a dead letter."""
    parent = tmp_path_factory.mktemp("runs")
    model = parent / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": 2}')
    (model / "tokenizer.json").write_text("{}")
    config = RunConfig(
        run=RunSection(id="read", folder=str(parent), group_partitions=2, inboxes=2, lanes=2),
        policies={"main": PolicyConfig(model=str(model))},
        streams={"main": StreamConfig(dataset="d")},
    )
    place = RunFolder.of(config)
    place.create()
    dump_config(config, place.config)
    with broker_of(place) as address:
        connection = Connection.of(config.kafka, "read", address)
        connection.ensure_topics({"run": 1, "prompts": 1})  # by an administrator, ahead: they are taken
        _refuses_what_a_deletion_left(config, address)
        create_topics(config, connection, resume=False)
        _refuses_to_create_the_run_twice(config, connection)
        _write(connection)
    return place.path


def _refuses_what_a_deletion_left(config: RunConfig, address: str) -> None:
    left = Connection.of(config.kafka, "half-gone", address)
    left.ensure_topics({"steps": 1})
    producer = left.producer("test")
    left.produce(producer, "steps", b"of the run before", partition=0)
    assert producer.flush(30) == 0
    other = config.model_copy(update={"run": config.run.model_copy(update={"id": "half-gone"})})
    for resume in (False, True):
        with pytest.raises(ConfigurationError, match="headrace topics delete --run half-gone"):
            create_topics(other, left, resume=resume)
    assert list(left.list_run_topics()) == ["steps"]


def _refuses_to_create_the_run_twice(config: RunConfig, connection: Connection) -> None:
    with pytest.raises(ConfigurationError, match="run read exists on the cluster"):
        create_topics(config, connection, resume=False)
    create_topics(config, connection, resume=True)
    manifests = [raw.decoded() for raw in connection.read_topic("run")]
    assert [type(m) for m in manifests] == [RunManifest]
    (Path(config.policies["main"].model) / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ConfigurationError, match="created with another tokenizer"):
        create_topics(config, connection, resume=True)


def _write(connection: Connection) -> None:
    producer = connection.producer("test")

    def put(topic: str, record: Record, partition: int = 0) -> None:
        key = b"1" if topic == "manifests" else b"5"
        connection.produce(
            producer, topic, encode(record), partition=partition, key=key, headers=headers_of(record, "read", "0")
        )
        producer.flush(20)

    sequence = Sequence(
        policy=0, role="policy", prompt_length=1, end_reason="stop", oldest_version=0, newest_version=0,
        tokens=np.arange(20, dtype=np.int32), logprobs=np.zeros(20, np.float32), mask=np.ones(20, np.uint8),
        versions=np.zeros(20, np.int32),
    )  # fmt: skip
    place = Source(topic="prompts", partition=0, offset=0)
    put("prompts", Prompt(prompt_id="abc", stream="main", dataset="d.jsonl", row=3, epoch=0, position=0, prompt="21="))
    put("admissions", Admission(
        group=5, prompt_id="abc", stream="main", group_size=1, extra_replicas=0, admitted_ms=1, deadline_ms=2,
        watermark=4, policies=[AdmittedPolicy(policy=0, min_version=0, cap=8)], sources=[place],
    ), group_partition(5, 2))  # fmt: skip
    put("ledger", Opened(policy=0, group=5, stream="main", prompt_id="abc", min_version=0, cap=8))
    put("trajectories", Trajectory(
        group=5, replica=0, attempt=0, worker="rollout-0", incarnation=1, stream="main", prompt_id="abc",
        status="train", end_reason="stop", reward=1.0, tokens=20, started_ms=10, finished_ms=90, prompt_text="21=",
        completion_text="12", oldest_versions={"main": 0}, sequences=[sequence],
    ), group_partition(5, 2))  # fmt: skip
    put("ledger", Kept(policy=0, group=5, raw_mean=1.0))
    put("ledger", Batched(policy=0, batch=1, groups=[5]))
    put("manifests", Manifest(
        policy=0, batch=1, start_version=0, since_version=0, fresh_groups=1, replayed_groups=0, tokens=20, sequences=1,
        trajectories=1, groups=1, composed_ms=1,
        members=[ManifestMember(group=5, replica=0, use=0, lane=0, oldest_version=0)],
    ))  # fmt: skip
    put("steps", Step(
        policy=0, batch=1, version=1, lineage=0, updates=1, loss=0.5, tokens=20, sequences=1, wait_seconds=0.1,
        step_seconds=0.1, publish_seconds=0.1, delta_bytes=1, changed_share=0.1, finished_ms=99,
    ))  # fmt: skip
    value = b"\xffgarbage"
    headers = letter_headers(
        ValueError("no record"), topic="read.prompts", partition=0, offset=0, value=value, headers=[], stage="assemble"
    )
    connection.produce(producer, "dead-letters", value, partition=0, headers=headers)
    producer.flush(20)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The run's broker, kept for all commands of this file."""
    with broker_of(RunFolder.existing(folder)) as address:
        yield address


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *words], capture_output=True, text=True, timeout=120, check=False)


def ok(*words: str) -> str:
    done = headrace(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_finished_runs_broker_is_started_for_the_command_and_ends_with_it(folder: Path) -> None:
    out = ok("topics", "cat", "trajectories", "-n", "1", "--folder", str(folder))
    assert "completion_text: 12" in out and "tokens: [0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]" in out
    assert (folder / "broker" / "clean-stop").exists()


def test_topics_by_run_and_address(address: str) -> None:
    place = ("--run", "read", "--bootstrap", address)
    topics = {row["topic"]: row for row in json.loads(ok("topics", "list", *place, "--format", "json"))}
    assert topics["trajectories"] == {
        "topic": "trajectories", "partitions": 2, "offsets": 1, "carries": "Trajectory Score"
    }  # fmt: skip
    about = json.loads(ok("topics", "describe", "ledger", *place, "--format", "json"))
    assert about["partitions"] == [{"partition": 0, "first": 0, "end": 3}]
    assert "Opened, Skipped, Kept" in ok("topics", "describe", "ledger", *place)


def test_cat_chooses_by_offset_and_count(address: str) -> None:
    place = ("--run", "read", "--bootstrap", address, "--format", "json")
    lines = [json.loads(line) for line in ok("topics", "cat", "ledger", "-o", "-2", *place).splitlines()]
    assert [line["record"] for line in lines] == ["Kept", "Batched"]
    assert lines[0]["headers"]["hr-record"] == "Kept" and lines[0]["key"] == "5"
    assert len(ok("topics", "cat", "ledger", "-n", "1", *place).splitlines()) == 1


def test_a_run_that_the_cluster_does_not_have_is_no_empty_table(address: str) -> None:
    for words in (("topics", "list"), ("groups", "lag")):
        done = headrace(*words, "--run", "nobody", "--bootstrap", address)
        assert done.returncode == 78 and "has no topic of a run nobody" in done.stderr


def test_a_topic_of_somebody_else_under_the_runs_prefix_is_shown_as_that(address: str) -> None:
    connection = Connection.of(RunConfig.model_fields["kafka"].default, "read", address)
    connection.admin().create_topics([NewTopic("read.my-notes", 1, 1)])["read.my-notes"].result(20)
    place = ("--run", "read", "--bootstrap", address)
    assert "of somebody else" in ok("topics", "list", *place)
    assert json.loads(ok("topics", "describe", "my-notes", *place, "--format", "json"))["settings"] == {}


def test_a_topic_that_does_not_exist_is_named(address: str) -> None:
    done = headrace("topics", "cat", "ledgers", "--run", "read", "--bootstrap", address)
    assert done.returncode == 78 and "read.ledgers does not exist" in done.stderr and "Traceback" not in done.stderr


def test_trace_tells_the_prompts_whole_life(address: str) -> None:
    out = ok("trace", "abc", "--run", "read", "--bootstrap", address)
    told = [
        "prompt of d.jsonl row 3", "admitted as group 5", "a credit of policy 0 opens", "'12' reward 1", "kept",
        "goes into batch 1", "batch 1 holds 1 of its members, staleness up to 0", "batch 1 trained: version 1",
    ]  # fmt: skip
    assert [words for words in told if words not in out] == []
    assert headrace("trace", "nobody", "--run", "read", "--bootstrap", address).returncode == 1


def test_dead_letters_are_listed_and_shown(address: str) -> None:
    place = ("--run", "read", "--bootstrap", address)
    (letter,) = json.loads(ok("dead-letters", "list", *place, "--format", "json"))
    assert (letter["origin"], letter["stage"], letter["message"]) == ("prompts[0]@0", "assemble", "no record")
    assert "garbage" in ok("dead-letters", "show", "0", *place)
    assert headrace("dead-letters", "show", "7", *place).returncode == 1


def test_lag_is_the_way_to_the_end(address: str) -> None:
    from confluent_kafka import TopicPartition

    connection = Connection.of(RunConfig.model_fields["kafka"].default, "read", address)
    consumer = connection.consumer("test", "read.batch")
    consumer.assign([TopicPartition(connection.topic("ledger"), 0, 0)])
    consumer.commit(offsets=[TopicPartition(connection.topic("ledger"), 0, 1)], asynchronous=False)
    mark = TopicPartition(connection.topic("batch-state-changelog"), 0, 0, "hr1 operators-0 1")
    consumer.commit(offsets=[mark], asynchronous=False)
    consumer.close()
    other = Connection.of(RunConfig.model_fields["kafka"].default, "half-gone", address)
    elsewhere = connection.consumer("else", "read.elsewhere")
    elsewhere.commit(offsets=[TopicPartition(other.topic("steps"), 0, 1)], asynchronous=False)
    elsewhere.close()
    rows = json.loads(ok("groups", "lag", "--run", "read", "--bootstrap", address, "--format", "json"))
    assert rows == [{"group": "batch", "topic": "ledger", "partition": 0, "position": 1, "end": 3, "lag": 2}]


def test_workers_of_a_run_that_nobody_joined(folder: Path, address: str) -> None:
    done = headrace("workers", "suspend", "--all", "--folder", str(folder), "--bootstrap", address)
    assert done.returncode == 78 and "none has joined yet" in done.stderr and "Traceback" not in done.stderr


def test_heads_of_trajectories_are_read_without_their_arrays(address: str) -> None:
    connection = Connection.of(RunConfig.model_fields["kafka"].default, "read", address)
    (head,) = read_trajectory_heads(connection)
    assert (head.group, head.reward, head.started_ms, head.finished_ms, head.completion_text) == (5, 1.0, 10, 90, "12")


def test_verify_of_a_run_cut_short_says_what_breaks(folder: Path, address: str) -> None:
    done = headrace("verify", str(folder), "--bootstrap", address, "--format", "json")
    found = {p["name"]: p["breaches"] for p in json.loads(done.stdout)["properties"] if p["breaches"]}
    assert done.returncode == 1
    assert list(found) == ["every delta chain verifies"]


def test_doctor_tries_broker_and_store(address: str, tmp_path: Path) -> None:
    findings = json.loads(ok("doctor", "--bootstrap", address, "--store", str(tmp_path), "--format", "json"))
    states = {f["subject"]: f["state"] for f in findings}
    assert states["kafka"] == states["store"] == "ok"
    assert headrace("doctor", "--bootstrap", "127.0.0.1:1").returncode == 1


def test_a_live_run_is_found_by_its_note(folder: Path) -> None:
    place = RunFolder.existing(folder)
    note_live(place, "127.0.0.1:1")
    assert live_bootstrap(place) == "127.0.0.1:1"
    (folder / "live.json").write_text('{"bootstrap": "127.0.0.1:1", "launcher": 999999999}')
    assert live_bootstrap(place) == ""
    forget_live(place)
    assert live_bootstrap(place) == ""
