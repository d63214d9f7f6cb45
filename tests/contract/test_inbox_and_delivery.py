"""What a rollout worker takes from its inbox and what it brings to its topics, through a real broker."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.connectors.blobs import get_sequences
from headrace.connectors.kafka import Connection
from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.rollout.delivery import Delivery
from headrace.pipeline.rollout.inbox import Inbox
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import KafkaConfig
from headrace.schemas.ids import group_partition, inbox_of
from headrace.schemas.parts import Sequence, Source
from headrace.schemas.records import (
    Cancel,
    EvalResult,
    Partial,
    Prompt,
    Record,
    Resume,
    Score,
    Stop,
    Suspend,
    Task,
    Trajectory,
)
from headrace.schemas.topics import partition_counts

NUMBERS = itertools.count()
ME, OTHER = "rollout-0", "rollout-7"


@pytest.fixture
def connection(bootstrap: str) -> Connection:
    """A run of its own with one inbox, which all workers share."""
    made = Connection.of(KafkaConfig(), f"inbox-{os.getpid()}-{next(NUMBERS)}", bootstrap)
    made.ensure_topics(partition_counts(["main"], groups=2, inboxes=1, lanes=2))
    return made


def task(sequence: int, worker: str = ME, incarnation: int = 5) -> Task:
    prompt = Prompt(prompt_id="a", stream="main", dataset="d", row=0, epoch=0, position=0, prompt="?")
    return Task(
        kind="train", group=sequence, replica=0, attempt=0, stream="main", worker=worker, incarnation=incarnation,
        sequence=sequence, issued_ms=0, deadline_ms=1, prompt=prompt,
    )  # fmt: skip


def cancel(worker: str = ME, incarnation: int = 5) -> Cancel:
    return Cancel(kind="train", group=0, replica=0, attempt=0, worker=worker, incarnation=incarnation, reason="closed")


class Writer:
    """Writes to the inboxes of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._producer = connection.producer("schedule")

    def write(self, *records: Record | bytes) -> None:
        for record in records:
            value = record if isinstance(record, bytes) else encode(record)
            headers = [] if isinstance(record, bytes) else [*headers_of(record, self._connection.run, "0")]
            self._connection.produce(self._producer, "tasks", value, partition=0, headers=headers)
        assert self._producer.flush(20) == 0


def read_all(inbox: Inbox, count: int) -> list[tuple[Source, Record]]:
    """Records until there are ``count``; one look more finds nothing."""
    found: list[tuple[Source, Record]] = []
    for _ in range(100):
        found += inbox.read(0.2)
        if len(found) >= count:
            break
    return found + inbox.read(0.05)


def test_an_inbox_holds_what_is_meant_for_this_incarnation_in_order(connection: Connection) -> None:
    writer = Writer(connection)
    writer.write(task(0), task(1))
    inbox = Inbox(connection, ME, 5)
    assert inbox.partition == inbox_of(ME, 1) == 0
    mine: list[Record] = [
        task(0),
        cancel(),
        Suspend(worker=ME),
        Resume(worker=ME),
        task(1),
        Stop(reason="steps", policy=0),
    ]
    writer.write(
        task(0, OTHER), mine[0], task(0, incarnation=4), mine[1], cancel(OTHER), cancel(incarnation=6), mine[2],
        Suspend(worker=OTHER), mine[3], Resume(worker=OTHER), b"\xffgarbage", mine[4], mine[5],
    )  # fmt: skip
    found = read_all(inbox, len(mine))
    assert [type(r).__name__ for _, r in found] == [type(r).__name__ for r in mine]
    assert [r.sequence for _, r in found if isinstance(r, Task)] == [0, 1]
    assert inbox.next_sequence == 2
    assert [place.offset for place, _ in found] == sorted(place.offset for place, _ in found)
    assert found[0][0] == Source(topic="tasks", partition=0, offset=3), "what was there before it began is not read"
    ((raw, _),) = inbox.undecodable
    assert raw.value == b"\xffgarbage"
    inbox.close()


def test_a_sequence_number_is_taken_once_and_may_jump(connection: Connection) -> None:
    inbox, writer = Inbox(connection, ME, 5), Writer(connection)
    writer.write(task(0), task(0), task(3), task(1), task(4), Stop(reason="steps", policy=0))
    found = read_all(inbox, 4)
    assert [r.sequence for _, r in found if isinstance(r, Task)] == [0, 3, 4]
    assert inbox.next_sequence == 5
    inbox.close()


def test_a_read_gives_at_most_so_many_and_loses_none(connection: Connection) -> None:
    inbox, writer = Inbox(connection, ME, 5), Writer(connection)
    writer.write(*(task(n) for n in range(25)))
    sizes, numbers = [], []
    while len(numbers) < 25:
        found = inbox.read(5.0, most=10)
        sizes.append(len(found))
        numbers += [r.sequence for _, r in found if isinstance(r, Task)]
    assert numbers == list(range(25)) and max(sizes) <= 10
    inbox.close()


# delivery


def sequence(tokens: int = 4, **over: Any) -> Sequence:
    fields: dict[str, Any] = {
        "policy": 0, "role": "policy", "prompt_length": 1, "end_reason": "stop", "oldest_version": 3,
        "newest_version": 3, "tokens": np.arange(tokens, dtype=np.int32), "logprobs": np.zeros(tokens, np.float32),
        "mask": np.array([0] + [1] * (tokens - 1), np.uint8), "versions": np.array([-1] + [3] * (tokens - 1), np.int32),
    }  # fmt: skip
    return Sequence(**{**fields, **over})


def trajectory(**over: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "group": 5, "replica": 1, "attempt": 2, "worker": ME, "incarnation": 5, "stream": "main", "prompt_id": "a",
        "status": "train", "end_reason": "stop", "reward": 1.0, "tokens": 3, "started_ms": 1, "finished_ms": 2,
        "prompt_text": "21=", "completion_text": "12", "oldest_versions": {"0": 3}, "sequences": [sequence()],
    }  # fmt: skip
    return Trajectory(**{**fields, **over})


class Desk:
    """A delivery, and what came of it."""

    def __init__(self, connection: Connection, store: LocalStore | None, offload_bytes: int = 1 << 20) -> None:
        self.connection = connection
        self.delivery = Delivery(connection, ME, partitions=2, store=store, offload_bytes=offload_bytes, retries=1)

    def play(self, *results: Coroutine[Any, Any, None]) -> None:
        """Bring results and serve acknowledgements until all are there."""

        async def all_of_them() -> None:
            tasks = [asyncio.create_task(one) for one in results]
            while not all(one.done() for one in tasks):
                self.delivery.poll(0.01)
                await asyncio.sleep(0)
            for one in tasks:
                one.result()

        asyncio.run(asyncio.wait_for(all_of_them(), 30))
        assert self.delivery.unacknowledged == 0

    def written(self, topic: str) -> list[Any]:
        assert self.delivery.close(20) == 0
        return [raw.decoded() for raw in self.connection.read_topic(topic)]

    def letters(self) -> list[dict[str, str]]:
        assert self.delivery.close(20) == 0
        return [
            {name: (value or b"").decode() for name, value in raw.headers}
            for raw in self.connection.read_topic("dead-letters")
        ]


@pytest.fixture
def desk(connection: Connection) -> Iterator[Desk]:
    made = Desk(connection, None)
    yield made
    assert made.delivery.close(20) == 0


def test_a_result_lies_in_its_groups_partition_under_its_key(desk: Desk) -> None:
    desk.play(*(desk.delivery.trajectory(trajectory(group=g)) for g in range(8)))
    raws = list(desk.connection.read_topic("trajectories"))
    assert sorted(raw.decoded().group for raw in raws) == list(range(8))  # type: ignore[attr-defined]
    for raw in raws:
        group = raw.decoded().group  # type: ignore[attr-defined]
        assert raw.key == str(group).encode() and raw.partition == group_partition(group, 2)
        assert dict(raw.headers)["hr-record"] == b"Trajectory"


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"completion_text": "bad \ud800"}, "InvalidRecord"),
        ({"prompt_text": "\udfff"}, "InvalidRecord"),
        ({"reward": float("nan")}, "InvalidRecord"),
        ({"reward": float("inf")}, "InvalidRecord"),
        ({"sequences": [sequence(logprobs=np.array([0, 0, np.nan, 0], np.float32))]}, "InvalidRecord"),
        ({"sequences": [sequence(mask=np.ones(3, np.uint8))]}, "InvalidRecord"),
        ({"sequences": [sequence(400_000)]}, "no object store can take them"),
    ],
)
def test_what_may_not_travel_is_a_dead_letter_and_an_excluded_result(
    desk: Desk, over: dict[str, Any], says: str
) -> None:
    desk.play(desk.delivery.trajectory(trajectory(**over)))
    (made,) = desk.written("trajectories")
    assert (made.group, made.replica, made.attempt, made.status) == (5, 1, 2, "excluded")
    assert says in made.error and made.sequences == [] and (made.reward, made.tokens) == (0.0, 0)
    (letter,) = desk.letters()
    assert letter["hr-stage"] == "task_to_trajectory" and letter["__streams.errors.message"]
    assert desk.delivery.dead_letters == 1


def test_large_arrays_travel_through_the_store_and_come_back(connection: Connection, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    desk = Desk(connection, store, offload_bytes=1000)
    small, large = trajectory(), trajectory(replica=3, sequences=[sequence(500), sequence(7, policy=1)])
    desk.play(desk.delivery.trajectory(small), desk.delivery.trajectory(large))
    found = {t.replica: t for t in desk.written("trajectories")}
    assert found[1].blob is None and len(found[1].sequences) == 1
    kept = found[3]
    assert kept.sequences == [] and kept.blob is not None and kept.status == "train" and kept.tokens == 3
    again = get_sequences(store, kept.blob)
    assert [s.tokens.tolist() for s in again] == [s.tokens.tolist() for s in large.sequences]
    assert [s.policy for s in again] == [0, 1]
    assert desk.letters() == []


@pytest.mark.parametrize(("length", "kept"), [(64 << 10, 64 << 10), ((64 << 10) + 9, 64 << 10)])
def test_long_texts_are_cut_and_say_by_how_much(desk: Desk, length: int, kept: int) -> None:
    desk.play(desk.delivery.trajectory(trajectory(completion_text="x" * length)))
    (made,) = desk.written("trajectories")
    assert made.completion_text.startswith("x" * kept) and made.prompt_text == "21="
    assert made.completion_text[kept:] == ("" if length == kept else "... [9 more]")
    assert len(made.sequences) == 1, "the tokens are the data"


def test_a_very_long_error_and_odd_text_can_be_said(desk: Desk) -> None:
    bad = trajectory(completion_text="\ud800" * 5000)
    desk.play(desk.delivery.trajectory(bad))
    (made,) = desk.written("trajectories")
    assert made.status == "excluded" and 0 < len(made.error) <= 20_000


def evaluated(**over: Any) -> EvalResult:
    fields: dict[str, Any] = {
        "policy": 0, "suite": "heldout", "prompt_id": "a", "replica": 0, "version": 3, "oldest_version": 3,
        "newest_version": 3, "reward": 1.0, "tokens": 3, "end_reason": "stop", "finished_ms": 1, "prompt_text": "21=",
        "completion_text": "12",
    }  # fmt: skip
    return EvalResult(**{**fields, **over})


@pytest.mark.parametrize("over", [{"reward": float("nan")}, {"completion_text": "\ud800"}])
def test_an_evaluation_that_may_not_travel_is_a_result_with_an_error(desk: Desk, over: dict[str, Any]) -> None:
    desk.play(desk.delivery.evaluation(evaluated()), desk.delivery.evaluation(evaluated(replica=1, **over)))
    found = {r.replica: r for r in desk.written("evals")}
    assert found[0] == evaluated()
    assert (found[1].reward, found[1].completion_text) == (0.0, "") and found[1].error
    assert len(desk.letters()) == 1


def test_scores_lie_with_the_trajectories_of_their_group(desk: Desk) -> None:
    score = Score(group=3, worker=ME, finished_ms=1, error="none")
    desk.play(desk.delivery.score(score))
    (raw,) = desk.connection.read_topic("trajectories")
    assert raw.partition == group_partition(3, 2) and raw.key == b"3" and raw.decoded() == score


def test_what_nobody_waits_for_is_written_all_the_same(desk: Desk) -> None:
    part = Partial(group=5, replica=0, attempt=0, worker=ME, incarnation=5, written_ms=1, sequences=[sequence()])
    desk.delivery.send("partials", part, 1)
    (found,) = desk.written("partials")
    assert found.group == 5 and replace(found, sequences=[]) == replace(part, sequences=[])
