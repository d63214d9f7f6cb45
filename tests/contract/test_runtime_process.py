"""The process that runs the stages: how it ends, and that two of one name do not live side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_worker import PARTITIONS, toy_config

from headrace.connectors.kafka import Connection
from headrace.schemas.config import KafkaConfig, dump_config
from headrace.schemas.errors import EXIT_CONFIGURATION, EXIT_SUPERSEDED
from headrace.schemas.topics import partition_counts

Process = subprocess.Popen[str]


class Runs:
    """Starts stage processes of one run."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        run = f"proc-{uuid.uuid4().hex[:8]}"
        self.connection = Connection.of(KafkaConfig(), run, bootstrap)
        self._config = folder / "config.json"
        dump_config(toy_config(run), self._config)
        self._bootstrap = bootstrap
        self._started: list[Process] = []

    def create(self) -> None:
        self.connection.ensure_topics(partition_counts(["main"], groups=PARTITIONS, inboxes=4, lanes=2))

    def start(self, *options: str, instance: str = "ops") -> Process:
        command = ["-m", "headrace.pipeline.runtime", "--config", str(self._config), "--instance", instance]
        process = subprocess.Popen(
            [sys.executable, *command, "--bootstrap", self._bootstrap, "--exit-with-parent", *options],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HEADRACE_LOG": "INFO"},
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stderr):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def runs(bootstrap: str, tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(bootstrap, tmp_path)
    yield runs
    runs.end()


def until(process: Process, text: str, seconds: float = 40) -> None:
    """Read the process's log until a line has the text."""
    assert process.stderr is not None
    end = time.monotonic() + seconds
    for line in process.stderr:
        if text in line:
            return
        assert time.monotonic() < end, f"no {text!r}"
    raise AssertionError(f"ended without {text!r}")


def last_words(process: Process, code: int) -> str:
    """What the process wrote until it ended by itself with the exit code."""
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(30) == code
    return said


def test_stages_start_and_stop_with_their_parent(runs: Runs) -> None:
    runs.create()
    process = runs.start("--stages", "schedule,assemble")
    until(process, "runs tasks [0]")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0


def test_a_later_process_of_the_same_name_ends_the_earlier_one(runs: Runs) -> None:
    runs.create()
    first = runs.start("--stages", "assemble")
    until(first, "runs tasks")
    second = runs.start("--stages", "assemble")
    until(second, "runs tasks [0, 1, 2, 3]")
    assert first.wait(30) == EXIT_SUPERSEDED
    time.sleep(1)
    assert second.poll() is None


def test_what_a_person_must_change_ends_with_78_and_says_so(runs: Runs) -> None:
    said = last_words(runs.start("--stages", "schedule"), EXIT_CONFIGURATION)
    assert f"{runs.connection.run}.prompts" in said
    assert "create the run's topics first" in said
    assert "no stage 'assembly'" in last_words(runs.start("--stages", "assembly"), EXIT_CONFIGURATION)
