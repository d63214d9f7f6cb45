"""Commands that read, on a run with two policies, retries, failures and garbage: each record is told, and in order."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
from confluent_kafka import TopicPartition

from headrace.connectors.kafka import Connection
from headrace.pipeline.cli.main import main
from headrace.pipeline.run_records import read_records, read_trajectory_heads
from headrace.pipeline.runtime.dead_letters import letter_headers, letter_value
from headrace.pipeline.tracing import Event, follow
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import KafkaConfig
from headrace.schemas.ids import group_partition
from headrace.schemas.parts import AdmittedPolicy, HostedPolicy, ManifestMember, Sequence
from headrace.schemas.records import (
    Admission,
    Batched,
    Closed,
    Demand,
    Failed,
    Kept,
    Manifest,
    Opened,
    Prompt,
    Record,
    Resumed,
    Step,
    Task,
    Trajectory,
)
from headrace.schemas.topics import partition_counts

RUN = f"told-{os.getpid()}"
PROMPT = Prompt(
    prompt_id="abc", stream="main", dataset="d.jsonl", row=3, epoch=1, position=9, prompt="21=", answer="12"
)
OTHER = Prompt(prompt_id="xyz", stream="main", dataset="d.jsonl", row=4, epoch=1, position=10, prompt="43=")


def admission(group: int, prompt: Prompt, retry: int = 0) -> Admission:
    return Admission(
        group=group, prompt_id=prompt.prompt_id, stream="main", group_size=2, extra_replicas=0, admitted_ms=1,
        deadline_ms=2, watermark=-1, retry=retry,
        policies=[AdmittedPolicy(policy=p, min_version=0, cap=8) for p in (0, 1)],
    )  # fmt: skip


def opened(policy: int, group: int) -> Opened:
    return Opened(policy=policy, group=group, stream="main", prompt_id="abc", min_version=group, cap=8)


def task(group: int, replica: int, attempt: int = 0, kind: str = "train") -> Task:
    return Task(
        kind=kind, group=group, replica=replica, attempt=attempt, stream="main", worker="w1", incarnation=1, sequence=0,
        issued_ms=0, deadline_ms=1, prompt=PROMPT,
    )  # fmt: skip


def trajectory(group: int, replica: int, **more: Any) -> Trajectory:
    sequence = Sequence(
        policy=0, role="policy", prompt_length=1, end_reason="stop", oldest_version=0, newest_version=0,
        tokens=np.arange(20, dtype=np.int32), logprobs=np.zeros(20, np.float32), mask=np.ones(20, np.uint8),
        versions=np.zeros(20, np.int32),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "attempt": 0, "worker": "w1", "incarnation": 1, "stream": "main", "prompt_id": "abc", "status": "train",
        "end_reason": "stop", "reward": 1.0, "tokens": 20, "started_ms": 10, "finished_ms": 90, "prompt_text": "21=",
        "completion_text": "1\n2", "oldest_versions": {"main": 4}, "sequences": [sequence],
    }  # fmt: skip
    return Trajectory(group=group, replica=replica, **{**fields, **more})


def demand(version: int) -> Demand:
    return Demand(
        worker="rollout-0", incarnation=1, role="any", capacity=1, next_sequence=0, inbox=0, sent_ms=1,
        policies=[HostedPolicy(policy=1, version=version)],
    )  # fmt: skip


def step(policy: int, batch: int, version: int) -> Step:
    return Step(
        policy=policy, batch=batch, version=version, lineage=0, updates=1, loss=0.25, tokens=20, sequences=1,
        wait_seconds=0.1, step_seconds=0.1, publish_seconds=0.1, delta_bytes=1, changed_share=0.1, finished_ms=99,
    )  # fmt: skip


def manifest(policy: int, batch: int, *groups: int) -> Manifest:
    members = [ManifestMember(group=g, replica=r, use=0, lane=0, oldest_version=g) for g in groups for r in (0, 1)]
    return Manifest(
        policy=policy, batch=batch, start_version=9, since_version=0, fresh_groups=1, replayed_groups=0, tokens=20,
        sequences=1, trajectories=1, groups=1, composed_ms=1, members=members,
    )  # fmt: skip


FAILED = trajectory(5, 1, status="excluded", end_reason="env_error", error="no judge", reward=0.0, tokens=0,
                    sequences=[], oldest_versions={})  # fmt: skip
STORY: list[tuple[str, int, Record | bytes]] = [
    ("prompts", 0, OTHER),
    ("prompts", 0, b"\xffgarbage"),
    ("prompts", 0, PROMPT),
    ("admissions", group_partition(4, 2), admission(4, OTHER)),
    ("admissions", group_partition(5, 2), admission(5, PROMPT)),
    ("ledger", 0, opened(0, 5)),
    ("ledger", 1, opened(1, 5)),
    ("tasks", 0, task(5, 0)),
    ("tasks", 1, task(5, 1)),
    ("tasks", 1, task(5, 0, kind="eval")),
    ("trajectories", group_partition(5, 2), trajectory(5, 0)),
    ("trajectories", group_partition(5, 2), FAILED),
    ("trajectories", group_partition(5, 2), b"\x00\x01garbage"),
    ("trajectories", group_partition(4, 2), trajectory(4, 0, prompt_id="xyz")),
    ("admissions", group_partition(5, 2), Failed(
        kind="train", group=5, replica=1, attempts=3, lost_leases=0, reason="reward raised")),
    ("ledger", 0, Closed(policy=0, group=5, reason="failed", by="assemble", detail="1 of 2 usable")),
    ("ledger", 1, Kept(policy=1, group=5, raw_mean=0.5)),
    ("admissions", group_partition(6, 2), admission(6, PROMPT, retry=1)),
    ("ledger", 0, opened(0, 6)),
    ("tasks", 0, task(6, 0, attempt=1)),
    ("ledger", 0, Kept(policy=0, group=6, raw_mean=1.0)),
    ("ledger", 0, b"not ours"),
    ("ledger", 1, Batched(policy=1, batch=1, groups=[4, 5])),
    ("ledger", 0, Batched(policy=0, batch=7, groups=[6])),
    ("manifests", 1, manifest(1, 1, 4, 5)),
    ("manifests", 0, manifest(0, 7, 6)),
    ("steps", 0, step(0, 6, 6)),
    ("steps", 1, step(1, 1, 1)),
    ("demand", 0, demand(0)),
    ("demand", 0, demand(1)),
    ("demand", 0, demand(2)),
    ("steps", 0, step(0, 7, 7)),
    ("steps", 0, Resumed(policy=0, lineage=1, batch=6, version=8)),
]  # fmt: skip


@pytest.fixture(scope="module")
def connection(bootstrap: str) -> Connection:
    """A run whose records are written in the order of STORY, a millisecond or more apart."""
    made = Connection.of(KafkaConfig(), RUN, bootstrap)
    made.ensure_topics(partition_counts(["a", "b"], groups=2, inboxes=2, lanes=2))
    producer = made.producer("test")
    for at, (topic, partition, record) in enumerate(STORY):
        value = record if isinstance(record, bytes) else encode(record)
        headers = [] if isinstance(record, bytes) else headers_of(record, RUN, "0")
        key = str(record.group).encode() if isinstance(record, Trajectory) else None
        producer.produce(
            made.topic(topic), value, partition=partition, key=key, headers=list(headers),
            timestamp=1_764_478_800_000 + at,
        )  # fmt: skip
    for at in range(3):
        value = b"x" * (at * 600_000)
        headers = letter_headers(
            ValueError(f"no {at}\nrecord"), topic=f"{RUN}.prompts", partition=0, offset=at, value=value, headers=[],
            stage="assemble",
        )  # fmt: skip
        producer.produce(made.topic("dead-letters"), letter_value(value), partition=0, headers=headers)
    assert producer.flush(20) == 0
    return made


Headrace = Callable[..., str]


@pytest.fixture
def headrace(connection: Connection, bootstrap: str, capsys: pytest.CaptureFixture[str]) -> Headrace:
    """Runs a command on the run and gives what it printed; ``status`` is its exit code."""

    def run(*words: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--run", RUN, "--bootstrap", bootstrap])
        said = capsys.readouterr()
        assert int(stopped.value.code or 0) == status, said.err
        return said.out if status == 0 else said.err

    return run


def test_a_trace_tells_all_of_a_prompts_groups_in_order_and_nothing_of_others(connection: Connection) -> None:
    told = [event.text for event in follow(connection, "abc")]
    assert told == [
        "prompt of d.jsonl row 3, epoch 1: '21='",
        "admitted as group 5: 2 replicas",
        "group 5: a credit of policy 0 opens, min version 5",
        "group 5: a credit of policy 1 opens, min version 5",
        "task for group 5 replica 0 attempt 0 to w1",
        "task for group 5 replica 1 attempt 0 to w1",
        "group 5 replica 0 by w1 (main v4): stop, 20 tokens: '1\\n2' reward 1",
        "group 5 replica 1 by w1 (no version): env_error, 0 tokens: no judge",
        "group 5 replica 1 failed: reward raised",
        "group 5 closed as failed by assemble: 1 of 2 usable",
        "group 5 kept: mean reward 0.500",
        "admitted as group 6: 2 replicas, a retry",
        "group 6: a credit of policy 0 opens, min version 6",
        "task for group 6 replica 0 attempt 1 to w1",
        "group 6 kept: mean reward 1.000",
        "group 5 goes into batch 1 of policy 1",
        "group 6 goes into batch 7 of policy 0",
        "batch 1 holds 2 of its members, staleness up to 4",
        "batch 7 holds 2 of its members, staleness up to 3",
        "batch 1 trained: version 1, loss 0.2500, weights published as 1 bytes",
        "rollout-0 samples policy 1 with version 1",
        "batch 7 trained: version 7, loss 0.2500, weights published as 1 bytes",
        "lineage 1 resumes from batch 6 as version 8",
    ]


def test_every_event_names_the_place_of_its_record(connection: Connection, headrace: Headrace) -> None:
    events = json.loads(headrace("trace", "abc", "--format", "json"))
    for event in events:
        topic, rest = event["place"].split("[")
        partition, offset = rest.split("]@")
        (raw, *_) = connection.read_topic(topic, {int(partition): int(offset)})
        assert raw.offset == int(offset) and raw.timestamp_ms == event["time_ms"]
        assert Event(**event).plain() == event
    lines = headrace("trace", "abc").splitlines()
    assert len(lines) == len(events) and all(e["place"] in line for e, line in zip(events, lines, strict=True))


def test_a_prompt_that_was_never_admitted_is_one_event_and_an_unknown_one_none(
    connection: Connection, headrace: Headrace
) -> None:
    assert [e.text for e in follow(connection, "xyz")][:2] == [
        "prompt of d.jsonl row 4, epoch 1: '43='", "admitted as group 4: 2 replicas"
    ]  # fmt: skip
    assert follow(connection, "nobody") == []
    assert "no prompt nobody" in headrace("trace", "nobody", status=1)


@pytest.mark.parametrize(
    ("words", "offsets"),
    [
        ((), [0, 1, 2]),
        (("-n", "2"), [0, 1]),
        (("-n", "0"), [0, 1, 2]),
        (("-o", "1"), [1, 2]),
        (("-o", "-1"), [2]),
        (("-o", "-9"), [0, 1, 2]),
        (("-o", "3"), []),
        (("-o", "99"), []),
        (("-p", "0", "-o", "-2", "-n", "1"), [1]),
    ],
)
def test_cat_takes_count_offset_and_partition(headrace: Headrace, words: tuple[str, ...], offsets: list[int]) -> None:
    lines = [json.loads(line) for line in headrace("topics", "cat", "prompts", *words, "--format", "json").splitlines()]
    assert [line["offset"] for line in lines] == offsets


def test_cat_merges_partitions_by_time_and_shows_garbage_as_such(headrace: Headrace) -> None:
    rows = [
        json.loads(line) for line in headrace("topics", "cat", "ledger", "-n", "0", "--format", "json").splitlines()
    ]
    assert [row["timestamp_ms"] for row in rows] == sorted(row["timestamp_ms"] for row in rows)
    assert {row["partition"] for row in rows} == {0, 1}
    (bad,) = [row for row in rows if "error" in row]
    assert "record" not in bad and bad["headers"] == {}
    text = headrace("topics", "cat", "ledger", "-n", "0")
    assert text.count("not decoded: ") == 1 and text.count("  Batched  ") == 2
    only = headrace("topics", "cat", "ledger", "-n", "0", "-p", "1")
    assert "ledger[0]" not in only and only.count("ledger[1]@") == 3


def test_cat_shortens_arrays_unless_asked(headrace: Headrace) -> None:
    short = headrace("topics", "cat", "trajectories", "-n", "0")
    assert "tokens: [0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]" in short and "completion_text: '1\\n2'" in short
    assert "18, 19]" in headrace("topics", "cat", "trajectories", "-n", "0", "--full")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("topics", "cat", "ledger", "-p", "2"), "ledger has the partitions 0 to 1, not 2"),
        (("topics", "cat", "legder"), "does not exist"),
        (("topics", "describe", "legder"), "does not exist"),
    ],
)
def test_topics_and_partitions_that_do_not_exist_are_named(
    headrace: Headrace, words: tuple[str, ...], says: str
) -> None:
    assert says in headrace(*words, status=78)


def test_topics_are_listed_with_their_records_and_described_with_their_ends(headrace: Headrace) -> None:
    rows = {row["topic"]: row for row in json.loads(headrace("topics", "list", "--format", "json"))}
    written = {topic: sum(1 for t, _, _ in STORY if t == topic) for topic, _, _ in STORY}
    assert {topic: rows[topic]["offsets"] for topic in written} == written
    assert len(headrace("topics", "list").splitlines()) == len(rows) + 1
    about = json.loads(headrace("topics", "describe", "ledger", "--format", "json"))
    ends = {p["partition"]: p["end"] for p in about["partitions"]}
    assert ends == {p: sum(1 for t, q, _ in STORY if (t, q) == ("ledger", p)) for p in (0, 1)}
    assert "Batched" in headrace("topics", "describe", "ledger")


def test_dead_letters_are_listed_one_a_line_and_shown_whole(headrace: Headrace) -> None:
    letters = json.loads(headrace("dead-letters", "list", "--format", "json"))
    assert [(x["offset"], x["origin"], x["stage"]) for x in letters] == [
        (n, f"prompts[0]@{n}", "assemble") for n in range(3)
    ]
    assert [x["bytes"] for x in letters] == [0, 600_000, 64 << 10], "over 1 MB only the beginning is kept"
    assert len(headrace("dead-letters", "list").splitlines()) == 4, "a message of two lines stays in its row"
    whole = json.loads(headrace("dead-letters", "show", "2", "--format", "json"))
    assert whole["headers"]["hr-size"] == "1200000" and whole["value_hex"] == "78" * 256
    assert "ValueError: no 2" in headrace("dead-letters", "show", "2")
    assert "dead-letters[0]@3 does not exist" in headrace("dead-letters", "show", "3", status=1)


def test_lag_is_told_for_every_group_of_this_run_alone(
    connection: Connection, bootstrap: str, headrace: Headrace
) -> None:
    other = Connection.of(KafkaConfig(), f"{RUN}-2", bootstrap)
    other.ensure_topics(partition_counts(["a"], groups=2, inboxes=2, lanes=2))
    for place, group, offsets in (
        (connection, "batch", {0: 2, 1: 3}),
        (connection, "assemble", {}),
        (other, "batch", {0: 0}),
    ):
        consumer = place.consumer("test", f"{place.run}.{group}")
        if offsets:
            consumer.commit(
                offsets=[TopicPartition(place.topic("ledger"), p, at) for p, at in offsets.items()], asynchronous=False
            )
        consumer.close()
    rows = json.loads(headrace("groups", "lag", "--format", "json"))
    end = {p: sum(1 for t, q, _ in STORY if (t, q) == ("ledger", p)) for p in (0, 1)}
    assert [(r["group"], r["partition"], r["position"], r["end"], r["lag"]) for r in rows] == [
        ("batch", p, at, end[p], end[p] - at) for p, at in ((0, 2), (1, 3))
    ]
    assert headrace("groups", "lag").splitlines()[1].split()[:2] == ["batch", "ledger"]


def test_heads_are_those_of_whole_records_and_garbage_is_passed_over(connection: Connection) -> None:
    heads = sorted(read_trajectory_heads(connection), key=lambda head: (head.group, head.replica))
    whole = [r for _, r in read_records(connection, "trajectories") if isinstance(r, Trajectory)]
    whole.sort(key=lambda record: (record.group, record.replica))
    assert [(h.group, h.replica) for h in heads] == [(4, 0), (5, 0), (5, 1)]
    for head, record in zip(heads, whole, strict=True):
        assert {name: getattr(record, name) for name in head.__slots__} == {
            name: getattr(head, name) for name in head.__slots__
        }


def test_tail_prints_the_last_records_and_those_that_come(
    connection: Connection, headrace: Headrace, bootstrap: str
) -> None:
    late = Prompt(prompt_id="late", stream="main", dataset="d.jsonl", row=5, epoch=1, position=11, prompt="54=")

    def produce_late() -> None:
        producer = connection.producer("late")
        producer.produce(
            connection.topic("prompts"), encode(late), partition=0, headers=list(headers_of(late, RUN, "0"))
        )
        assert producer.flush(20) == 0

    timer = Timer(1.0, produce_late)
    timer.start()
    lines = headrace("topics", "tail", "prompts", "-n", "1", "--seconds", "5", "--format", "json").splitlines()
    timer.join()
    told = [json.loads(line) for line in lines]
    assert [line["value"]["prompt_id"] for line in told] == ["abc", "late"]
    assert headrace("topics", "tail", "ledger", "-n", "0", "--seconds", "0.3") == ""
    assert "has the partitions 0 to 0" in headrace("topics", "tail", "prompts", "-p", "3", "--seconds", "1", status=78)


def test_create_makes_what_the_map_says_and_leaves_what_is_there(
    bootstrap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"ahead-{os.getpid()}"
    words = ["topics", "create", "--run", run, "--bootstrap", bootstrap, "--format", "json"]
    told = []
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert not stopped.value.code
        told.append(json.loads(capsys.readouterr().out))
    assert set(told[0]["created"]) == set(told[0]["topics"]) and told[1]["created"] == []
    made = Connection.of(KafkaConfig(), run, bootstrap)
    assert made.list_run_topics() == told[0]["topics"] == partition_counts(["main"], groups=8, inboxes=64, lanes=8)
    made.delete_run_topics()


def test_a_dead_letter_goes_back_once_with_its_own_bytes_key_and_headers(
    connection: Connection, headrace: Headrace, tmp_path: Path
) -> None:
    value, run = b"", connection.topic("prompts")
    producer = connection.producer("letters")
    places: list[int] = []
    for size in (7, 2 << 20):
        value = b"y" * size
        own: list[tuple[str, bytes | None]] = [("mine", b"kept")]
        headers = letter_headers(
            ValueError("no"), topic=run, partition=0, offset=1, value=value, headers=own, stage="schedule"
        )
        producer.produce(
            connection.topic("dead-letters"), letter_value(value), partition=0, key=b"k", headers=headers,
            on_delivery=lambda _, message: places.append(message.offset() or 0),
        )  # fmt: skip
    assert producer.flush(20) == 0
    small, large = places
    place = json.loads(headrace("dead-letters", "requeue", str(small), "--format", "json"))["place"]
    offset = int(place.split("@")[1])
    back = next(iter(connection.read_topic("prompts", {0: offset})))
    assert (back.key, back.value) == (b"k", b"y" * 7)
    assert back.headers == [("mine", b"kept"), ("hr-requeued", str(small).encode())]
    assert f"was put back as {place}" in headrace("dead-letters", "requeue", str(small), status=78)
    assert headrace("dead-letters", "requeue", str(small), "--again").startswith(f"dead-letters[0]@{small} is prompts")
    assert "only the first 65536 of 2097152 bytes" in headrace("dead-letters", "requeue", str(large), status=78)
    mended = tmp_path / "mended"
    mended.write_bytes(b"whole")
    headrace("dead-letters", "requeue", str(large), "--value", str(mended))
    *_, last = connection.read_topic("prompts", {0: offset})
    assert last.value == b"whole"
    assert "does not exist" in headrace("dead-letters", "requeue", "999", status=78)


def test_delete_spares_a_run_at_work(bootstrap: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"busy-{os.getpid()}"
    made = Connection.of(KafkaConfig(), run, bootstrap)
    made.ensure_topics({"prompts": 1})
    consumer = made.consumer("member", f"{run}.schedule")
    consumer.subscribe([made.topic("prompts")])
    words = ["topics", "delete", "--run", run, "--bootstrap", bootstrap]
    try:
        end = time.monotonic() + 60
        while not consumer.assignment() and time.monotonic() < end:
            consumer.poll(0.2)
        with pytest.raises(SystemExit) as refused:
            main(words)
        assert refused.value.code == 78 and f"{run}.schedule" in capsys.readouterr().err
        assert made.list_run_topics() == {"prompts": 1}
    finally:
        consumer.close()
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not stopped.value.code and made.list_run_topics() == {}
