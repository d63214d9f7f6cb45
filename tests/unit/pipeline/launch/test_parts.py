"""The parts of a run follow from its configuration: which processes, under which names, with which settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.pipeline.launch.parts import Part, Rollback, broker_part, parts_of
from headrace.schemas.config import RunConfig

FILE = Path("/somewhere/config.json")


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "policies": {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none"}},
            **sections,
        }
    )


def named(made: list[Part]) -> dict[str, Part]:
    return {part.name: part for part in made}


def option(part: Part, name: str) -> str:
    return part.command[part.command.index(name) + 1]


def test_every_stream_policy_and_worker_has_its_process() -> None:
    made = parts_of(
        config(
            policies={"a": {"model": "none"}, "b": {"model": "none"}},
            streams={"s": {"dataset": "none"}, "t": {"dataset": "none"}},
            rollout={"workers": 3},
        ),
        FILE,
        "h:1",
    )
    assert [(part.name, part.role) for part in made] == [
        ("operators-0", "operators"), ("source-s", "source"), ("source-t", "source"), ("trainer-a", "trainer"),
        ("trainer-b", "trainer"), ("rollout-0", "rollout"), ("rollout-1", "rollout"), ("rollout-2", "rollout"),
    ]  # fmt: skip
    assert all(option(part, "--instance") == part.name for part in made), "a restart takes over under its name"
    assert all(option(part, "--config") == str(FILE) and option(part, "--bootstrap") == "h:1" for part in made)
    assert all("--exit-with-parent" in part.command for part in made), "none outlives the launcher"
    assert [option(named(made)[f"trainer-{p}"], "--policy") for p in "ab"] == ["a", "b"]
    assert [option(named(made)[f"source-{s}"], "--stream") for s in "st"] == ["s", "t"]


def test_workers_that_only_evaluate_leave_the_others_to_training() -> None:
    made = named(parts_of(config(rollout={"workers": 2}, eval={"dataset": "d", "workers": 2}), FILE, "h:1"))
    roles = {name: option(part, "--role") for name, part in made.items() if part.role == "rollout"}
    assert roles == {"rollout-0": "train", "rollout-1": "train", "eval-0": "eval", "eval-1": "eval"}
    for without in (config(), config(eval={"workers": 2})):
        alone = named(parts_of(without, FILE, "h:1"))
        assert "eval-0" not in alone and option(alone["rollout-0"], "--role") == "any"


def test_the_store_is_looked_after_when_the_configuration_says_so() -> None:
    made = parts_of(config(store={"compact_seconds": 10, "prune_seconds": 60}), FILE, "h:1")[-2:]
    assert [(part.name, part.role, option(part, "--task")) for part in made] == [
        ("compact", "upkeep", "compact"), ("prune", "upkeep", "prune"),
    ]  # fmt: skip
    assert all("--exit-with-parent" in part.command for part in made)
    assert all(part.role != "upkeep" for part in parts_of(config(), FILE, "h:1"))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_several_ranks_start_under_torchrun_and_one_does_not(ranks: int) -> None:
    trainer = named(parts_of(config(trainer={"ranks": ranks}, run={"lanes": 10}), FILE, "h:1"))["trainer-main"]
    words = list(trainer.command)
    assert words[:2] == [sys.executable, "-m"]
    assert (words[2] == "torch.distributed.run") == (ranks > 1)
    if ranks > 1:
        assert option(trainer, "--nproc-per-node") == str(ranks)
        assert option(trainer, "--max-restarts") == "0", "the supervisor restarts all ranks together"
    assert words.index("headrace.trainers") < words.index("--config")


@pytest.mark.parametrize(
    ("rollback", "words"),
    [
        (None, []),
        (Rollback(7), ["--resume-from", "7"]),
        (Rollback(0), ["--resume-from", "0"]),
        (Rollback(7, discard=True), ["--resume-from", "7", "--discard"]),
    ],
)
def test_only_trainers_are_told_of_a_rollback(rollback: Rollback | None, words: list[str]) -> None:
    made = parts_of(config(), FILE, "h:1", rollback=rollback)
    trainer = named(made)["trainer-main"]
    at = trainer.command.index("--policy") + 2
    assert list(trainer.command[at:]) == words
    others = [word for part in made if part.role != "trainer" for word in part.command]
    assert not {"--resume-from", "--discard"} & set(others)


def test_a_frozen_policy_has_nothing_to_go_back_to() -> None:
    policies = {"main": {"model": "m"}, "judge": {"model": "m", "frozen": True}}
    made = named(parts_of(config(policies=policies), FILE, "h:1", rollback=Rollback(7)))
    assert "--resume-from" in made["trainer-main"].command and "--resume-from" not in made["trainer-judge"].command


def test_threads_are_those_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = named(parts_of(config(rollout={"threads": 3}, trainer={"threads": 2}), FILE, "h:1"))
    threads = {name: part.full_environment()["OMP_NUM_THREADS"] for name, part in made.items()}
    assert threads == {"operators-0": "1", "source-main": "1", "trainer-main": "2", "rollout-0": "3"}


def test_a_persons_environment_wins_over_defaults_and_the_parts_own_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    found = Part(name="x", role="rollout", command=(), environment={"OMP_NUM_THREADS": "2"}).full_environment()
    assert (found["HF_HUB_OFFLINE"], found["OMP_NUM_THREADS"], found["DO_NOT_TRACK"]) == ("0", "2", "1")
    assert found["PATH"] == os.environ["PATH"]


def test_the_broker_serves_a_folder_on_a_port_and_ends_with_its_parent() -> None:
    part = broker_part(Path("/data"), 0)
    assert (part.name, part.role, option(part, "--data"), option(part, "--port")) == ("broker", "broker", "/data", "0")
    assert "--exit-with-parent" in part.command
