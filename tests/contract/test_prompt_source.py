"""The prompt source as a process: exact resume, bounded lead, held-out prompts first, faults of a dataset by name."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from headrace.connectors.kafka import Connection
from headrace.pipeline.dataset_to_prompt import LEAD, STREAM_LEAD
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.ids import consumer_group
from headrace.schemas.records import End, Prompt, RunEnd, Taken
from headrace.schemas.topics import partition_counts

pytestmark = pytest.mark.timeout(600)
NUMBERS = itertools.count()


class Bench:
    """A run in which only the source of the stream ``main`` is real."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.folder = folder
        self.bootstrap = bootstrap
        self.process: subprocess.Popen[str] | None = None
        self.dataset = folder / "train.jsonl"
        self.run = f"source-{os.getpid()}-{next(NUMBERS)}"
        self.connection: Connection | None = None

    def rows(self, count: int, name: str = "train.jsonl", first: int = 0) -> Path:
        path = self.folder / name
        rows = ({"prompt": f"{i}=", "answer": str(i)} for i in range(first, first + count))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def start(self, stream: dict[str, Any], name: str = "main", **sections: Any) -> None:
        """Start the source of a stream; ``stream`` are settings of ``main``, ``sections`` those of the run."""
        streams = {"main": {"dataset": str(self.dataset), **stream}, **sections.pop("streams", {})}
        config = RunConfig.model_validate(
            {
                "run": {"id": self.run, "folder": str(self.folder)},
                "kafka": {"bootstrap": self.bootstrap},
                "policies": {"main": {"model": "none"}},
                "streams": streams,
                **sections,
            }
        )
        if self.connection is None:
            self.connection = Connection.of(config.kafka, self.run)
            self.connection.ensure_topics(partition_counts(["main"], groups=2, inboxes=2, lanes=2))
        dump_config(config, self.folder / "config.json")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.pipeline.dataset_to_prompt", "--config", str(self.folder / "config.json"),
             "--stream", name, "--instance", f"source-{name}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def finish(self, seconds: float = 60) -> tuple[int, str]:
        assert self.process is not None
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out

    def published(self) -> list[Any]:
        assert self.connection is not None
        return [raw.decoded() for raw in self.connection.read_topic("prompts")]

    def tell(self, record: RunEnd | Taken, key: bytes) -> None:
        """Write into the topic ``run``, as schedule does."""
        assert self.connection is not None
        producer = self.connection.producer("rig")
        headers = headers_of(record, self.run, "0")
        self.connection.produce(producer, "run", encode(record), partition=0, key=key, headers=headers)
        producer.flush(10)

    def schedule_reads_to(self, offset: int) -> None:
        assert self.connection is not None
        consumer = self.connection.consumer("rig", consumer_group(self.run, "schedule"))
        consumer.commit(offsets=[TopicPartition(self.connection.topic("prompts"), 0, offset)], asynchronous=False)
        consumer.close()


@pytest.fixture
def bench(bootstrap: str, tmp_path: Path) -> Iterator[Bench]:
    """A bench whose source is ended."""
    made = Bench(bootstrap, tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait(10)


def _until(test: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := test():
            return found
        time.sleep(0.2)
    raise AssertionError("not in time")


def test_epochs_end_and_a_second_start_adds_nothing(bench: Bench) -> None:
    bench.rows(20)
    held_out = bench.rows(6, "eval.jsonl", first=1000)
    evaluation = {"dataset": str(held_out), "limit": 5}
    for _ in range(2):
        bench.start({"epochs": 3}, eval=evaluation)
        assert bench.finish()[0] == 0
        records = bench.published()
        held, rest, (end,) = records[:5], records[5:65], records[65:]
        assert [(p.stream, p.row, p.position) for p in held] == [("@eval", i, i) for i in range(5)]
        assert [p.position for p in rest] == list(range(60))
        assert {p.stream for p in rest} == {"main"}
        for epoch in range(3):
            assert sorted(p.row for p in rest[20 * epoch : 20 * epoch + 20]) == list(range(20))
        assert (end.reason, end.count, end.stream) == ("epochs", 60, "main")
        assert isinstance(end, End)


def test_it_stays_a_bounded_stretch_ahead_and_ends_with_the_run(bench: Bench) -> None:
    bench.rows(1000)
    bench.start({})
    assert bench.connection is not None
    connection = bench.connection

    def full() -> bool:
        return connection.end_offsets("prompts")[0] >= LEAD - 1

    _until(full)
    time.sleep(1.5)
    first = [p.position for p in bench.published()]
    assert first == list(range(len(first)))
    assert LEAD - 64 <= len(first) <= LEAD
    bench.schedule_reads_to(2000)
    _until(lambda: connection.end_offsets("prompts")[0] >= LEAD + 1900)
    assert bench.process is not None
    bench.process.kill()
    bench.finish()
    bench.schedule_reads_to(4000)
    bench.start({})
    _until(lambda: connection.end_offsets("prompts")[0] >= LEAD + 3900)
    positions = [p.position for p in bench.published()]
    assert positions == list(range(len(positions))), "a killed source loses and repeats nothing"
    bench.tell(RunEnd(reason="steps", ended_ms=1), b"end")
    assert bench.finish()[0] == 0


def test_of_several_streams_each_stays_a_stretch_ahead_of_what_is_used_of_it(bench: Bench) -> None:
    """So no stream can fill the topic while schedule looks for a prompt of another one."""
    bench.rows(100)
    streams = {"other": {"dataset": str(bench.dataset)}}
    bench.start({}, streams=dict(streams))
    connection = bench.connection
    assert connection is not None

    def published(count: int) -> None:
        _until(lambda: connection.end_offsets("prompts")[0] >= count)
        time.sleep(1.2)
        assert [p.position for p in bench.published()] == list(range(count))

    published(STREAM_LEAD)
    bench.schedule_reads_to(STREAM_LEAD)
    bench.tell(Taken(stream="other", position=4096), b"taken/other")
    bench.tell(Taken(stream="main", position=64), b"taken/main")
    published(STREAM_LEAD + 64)
    assert bench.process is not None
    bench.process.kill()
    bench.finish()
    bench.tell(Taken(stream="main", position=128), b"taken/main")
    bench.start({}, streams=dict(streams))
    published(STREAM_LEAD + 128)
    bench.tell(RunEnd(reason="steps", ended_ms=1), b"end")
    assert bench.finish()[0] == 0


def test_a_dataset_that_changed_under_the_run_is_refused(bench: Bench) -> None:
    bench.rows(20)
    bench.start({"epochs": 2})
    assert bench.finish()[0] == 0
    bench.rows(21)
    bench.start({"epochs": 4})
    code, said = bench.finish()
    assert code == 78
    assert "the dataset of stream main" in said
    assert "has changed" in said
    bench.rows(20)
    bench.start({"epochs": 2}, run={"id": bench.run, "folder": str(bench.folder), "seed": 5})
    assert bench.finish()[0] == 78


def test_bad_rows_fail_at_load_or_become_dead_letters(bench: Bench) -> None:
    rows = bench.rows(3).read_text().splitlines()
    bench.dataset.write_text("\n".join([rows[0], '{"question": "x"}', rows[1], "{garbage", rows[2]]) + "\n")
    bench.start({"epochs": 1})
    code, said = bench.finish()
    assert code == 78
    assert f"{bench.dataset} line 2: column 'prompt' is missing" in said
    assert "line 4: not JSON" in said
    assert bench.published() == []
    bench.start({"epochs": 1, "on_bad_row": "dead-letter"})
    assert bench.finish()[0] == 0
    prompts = [r for r in bench.published() if isinstance(r, Prompt)]
    assert sorted(p.row for p in prompts) == [0, 2, 4]
    assert bench.connection is not None
    letters = list(bench.connection.read_topic("dead-letters"))
    assert [letter.value for letter in letters] == [b'{"question": "x"}', b"{garbage"]
    assert b"line 2: column 'prompt' is missing" in (dict(letters[0].headers)["__streams.errors.message"] or b"")


def test_held_out_prompts_stand_before_those_of_every_stream(bench: Bench) -> None:
    bench.rows(5)
    held_out = bench.rows(3, "eval.jsonl", first=1000)
    sections = {"streams": {"other": {"dataset": str(bench.dataset), "epochs": 1}}, "eval": {"dataset": str(held_out)}}
    bench.start({"epochs": 1}, "other", **{k: dict(v) for k, v in sections.items()})
    second = bench.process
    time.sleep(2)
    assert second is not None
    assert second.poll() is None, "it waits for the first stream's source"
    bench.start({"epochs": 1}, "main", **{k: dict(v) for k, v in sections.items()})
    assert bench.finish()[0] == 0
    bench.process = second
    assert bench.finish()[0] == 0
    records = bench.published()
    assert [r.stream for r in records[:3]] == ["@eval"] * 3
    assert sorted(r.stream for r in records[3:]) == ["main"] * 6 + ["other"] * 6
    assert [type(r).__name__ for r in records if r.stream == "other"] == ["Prompt"] * 5 + ["End"]


def test_two_sources_of_one_name_publish_every_position_once(bench: Bench) -> None:
    bench.rows(500)
    bench.start({"epochs": 6})
    first = bench.process
    bench.start({"epochs": 6})
    second = bench.process
    assert first is not None
    assert second is not None
    codes = {process.wait(120) for process in (first, second)}
    assert 0 in codes
    prompts = [r for r in bench.published() if isinstance(r, Prompt)]
    assert [p.position for p in prompts] == list(range(3000))
