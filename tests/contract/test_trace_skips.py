"""``headrace trace`` of a prompt that an operator before rollout has dropped: who did, when, and why."""

from __future__ import annotations

import os

from headrace.connectors.kafka import Connection
from headrace.pipeline.tracing import follow
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import KafkaConfig
from headrace.schemas.parts import AdmittedPolicy, Source
from headrace.schemas.records import Admission, Prompt, Skipped
from headrace.schemas.topics import partition_counts

RUN = f"skips-{os.getpid()}"


def prompt(name: str, epoch: int) -> Prompt:
    return Prompt(prompt_id=name, stream="main", dataset="d.jsonl", row=5, epoch=epoch, position=epoch, prompt="54=")


def skipped(name: str, offset: int, epoch: int) -> Skipped:
    return Skipped(
        policy=1, stream="main", prompt_id=name, epoch=epoch, position=epoch, operator="greso", reason="probably_hard",
        detail="2 groups in a row were hard; kept with 0.3000, drew 0.5000",
        sources=[Source(topic="prompts", partition=0, offset=offset)],
    )  # fmt: skip


def test_a_skipped_prompt_says_which_operator_and_why_and_its_admission_stands_beside(bootstrap: str) -> None:
    connection = Connection.of(KafkaConfig(), RUN, bootstrap)
    connection.ensure_topics(partition_counts(["a", "b"], groups=2, inboxes=2, lanes=2))
    producer = connection.producer("test")
    admission = Admission(
        group=0, prompt_id="p", stream="main", group_size=2, extra_replicas=0, admitted_ms=1, deadline_ms=2,
        watermark=-1, policies=[AdmittedPolicy(policy=1, min_version=0, cap=8)],
        sources=[Source(topic="prompts", partition=0, offset=0)],
    )  # fmt: skip
    for at, (topic, partition, record) in enumerate(
        [
            ("prompts", 0, prompt("p", 0)),
            ("prompts", 0, prompt("q", 0)),
            ("admissions", 0, admission),
            ("ledger", 1, skipped("q", 1, 0)),
            ("prompts", 0, prompt("p", 1)),
            ("ledger", 1, skipped("p", 2, 1)),
        ]
    ):
        producer.produce(
            connection.topic(topic), encode(record), partition=partition, headers=list(headers_of(record, RUN, "0")),
            timestamp=1_764_478_800_000 + at,
        )  # fmt: skip
    assert producer.flush(20) == 0
    assert [event.text for event in follow(connection, "p")] == [
        "prompt of d.jsonl row 5, epoch 0: '54='",
        "admitted as group 0: 2 replicas",
        "prompt of d.jsonl row 5, epoch 1: '54='",
        "skipped in epoch 1 by greso: probably_hard: 2 groups in a row were hard; kept with 0.3000, drew 0.5000",
    ]
    assert follow(connection, "q")[-1].place == "ledger[1]@0"
