"""Prefixes of unfinished trajectories outlive their worker: broken off by new weights or by leaving, taken over by the
next attempt on another worker (protocol 5)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from rollout_rig import Rig

from headrace.pipeline.cli.main import main
from headrace.schemas.parts import Sampling
from headrace.schemas.records import Demand, Partial, RunEnd

pytestmark = pytest.mark.timeout(600)
NUMBERS = itertools.count(7000)
LONG = Sampling(max_new_tokens=400)
Make = Callable[..., Rig]


@pytest.fixture
def make_rig(bootstrap: str, tiny_model: Path, tmp_path: Path) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make(**rollout: Any) -> Rig:
        slow = {"step_seconds": 0.02, "mean_length": 250, "sigma": 0.1}
        settings = {"partial_tokens": 5, "max_new_tokens": 400, "options": slow, **rollout}
        rigs.append(Rig(bootstrap, tmp_path / str(len(rigs)), tiny_model, next(NUMBERS), **settings))
        read = {"demand": 1, "trajectories": 2, "partials": 2}
        places = [(rigs[-1].connection.topic(topic), p) for topic, n in read.items() for p in range(n)]
        rigs[-1].reader.assign([TopicPartition(topic, p, 0) for topic, p in places])
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.worker is not None and rig.worker.poll() is None:
            rig.worker.kill()
            rig.worker.wait(10)
        rig.reader.close()


def held(demand: Demand, group: int) -> int:
    """The offset of a held task's prefix; -1 when it has none."""
    return next((task.partial for task in demand.held if task.group == group), -1)


def partials(rig: Rig) -> list[tuple[int, Partial]]:
    return [(raw.offset, raw.decoded()) for raw in rig.records("partials")]  # type: ignore[misc]


def test_a_prefix_that_new_weights_broke_off_outlives_kill_9(make_rig: Make) -> None:
    rig = make_rig(on_new_weights="abort_resume")
    rig.begin()
    first = rig.demand()
    rig.to_worker(rig.task(first, 1, sampling=LONG))
    rig.demand(lambda d: len(d.held) == 1)
    time.sleep(0.5)
    rig.publish(1)
    told = rig.demand(lambda d: held(d, 1) >= 0 and d.policies[0].version == 1)
    offset = held(told, 1)
    (kept,) = [partial for at, partial in partials(rig) if at == offset]
    (prefix,) = kept.sequences
    assert (kept.group, kept.replica, kept.attempt, kept.worker) == (1, 0, 0, "rollout-0")
    assert prefix.end_reason == "abort"
    n = prefix.tokens.size - prefix.prompt_length
    assert 5 <= n < 250
    assert rig.worker is not None
    rig.worker.kill()
    rig.worker.wait(10)

    rig.start("rollout-1")
    second = rig.demand(lambda d: d.worker == "rollout-1")
    rig.sequence = 0
    rig.to_worker(rig.task(second, 1, attempt=1, partial=offset, sampling=LONG), "rollout-1")
    done = rig.trajectory(1)
    assert (done.status, done.attempt, done.worker) == ("train", 1, "rollout-1")
    (whole,) = done.sequences
    assert whole.tokens[: prefix.tokens.size].tolist() == prefix.tokens.tolist()
    assert whole.logprobs[: prefix.tokens.size].tolist() == prefix.logprobs.tolist()
    versions = whole.versions[whole.prompt_length :].tolist()
    assert versions == [0] * n + [1] * (len(versions) - n)
    assert done.oldest_versions == {"0": 0}
    assert rig.end() == 0


def test_a_worker_that_leaves_hands_its_prefixes_over(make_rig: Make) -> None:
    rig = make_rig()
    rig.begin()
    first = rig.demand()
    for group in (1, 2):
        rig.to_worker(rig.task(first, group, sampling=LONG))
    rig.demand(lambda d: len(d.held) == 2)
    time.sleep(0.6)
    assert rig.end() == 0
    told: list[Demand] = rig.until(lambda: (d := rig.decoded("demand")) and d[-1].capacity == 0 and d)
    assert told[-1].incarnation == first.incarnation + 1
    last = told[-2]
    assert last.incarnation == first.incarnation
    offsets = {group: held(last, group) for group in (1, 2)}
    assert min(offsets.values()) >= 0, "the last word of an incarnation names its prefixes"

    rig.start("rollout-1")
    second = rig.demand(lambda d: d.worker == "rollout-1")
    rig.sequence = 0
    rig.to_worker(rig.task(second, 1, attempt=1, partial=offsets[1], sampling=LONG), "rollout-1")
    # a wrong offset, one beyond the end and one of another task cost the prefix and nothing else
    for replica, offset in enumerate((offsets[1], 10_000, offsets[2]), 1):
        rig.to_worker(rig.task(second, 1, replica=replica, partial=offset, sampling=LONG), "rollout-1")
    (prefix,) = next(p for _, p in partials(rig) if p.group == 1).sequences
    assert rig.trajectory(1).sequences[0].tokens[: prefix.tokens.size].tolist() == prefix.tokens.tolist()
    for replica in (1, 2, 3):
        assert rig.trajectory(1, replica).status == "train"
    assert rig.log.read_text().count("begins anew") == 3
    assert rig.end() == 0


def test_finish_ends_what_it_began_before_the_new_weights_come_in(make_rig: Make) -> None:
    rig = make_rig(on_new_weights="finish", options={"step_seconds": 0.02, "mean_length": 60, "sigma": 0})
    rig.begin()
    first = rig.demand()
    rig.to_worker(rig.task(first, 1, sampling=LONG))
    rig.demand(lambda d: len(d.held) == 1)
    rig.publish(1)
    rig.to_worker(rig.task(first, 2, sampling=LONG, min_version=1))
    old, new = rig.trajectory(1), rig.trajectory(2)
    assert set(old.sequences[0].versions[6:].tolist()) == {0}
    assert set(new.sequences[0].versions[6:].tolist()) == {1}
    assert partials(rig) == []
    assert rig.end() == 0


def test_a_suspended_worker_keeps_its_tasks_and_samples_nothing(
    make_rig: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = make_rig()
    rig.begin()
    first = rig.demand()
    assert workers(rig, capsys, "list")[0]["state"] == "idle"
    rig.to_worker(rig.task(first, 1, sampling=LONG))
    rig.demand(lambda d: len(d.held) == 1)
    (told,) = workers(rig, capsys, "suspend", "rollout-*", "--keep")
    assert (told["state"], told["slots"], told["capacity"], told["tasks"]) == ("suspended", 8, 0, {"train": 1})
    time.sleep(1.0)
    assert rig.decoded("trajectories") == []
    rig.publish(1)
    rig.demand(lambda d: d.policies[0].version == 1)
    (told,) = workers(rig, capsys, "list")
    assert (told["state"], told["versions"], told["role"]) == ("suspended", {"main": 1}, "any")
    (told,) = workers(rig, capsys, "resume", "--all")
    assert told["state"] in ("sampling", "idle") and told["capacity"] == first.capacity
    labels = rig.trajectory(1).sequences[0].versions[6:].tolist()
    assert labels == sorted(labels)
    assert labels[-1] == 1
    assert rig.end() == 0
    assert workers(rig, capsys, "list")[0]["state"] == "gone"


def test_a_suspended_worker_hands_over_what_it_holds_and_goes_on_when_it_is_resumed(
    make_rig: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = make_rig()
    rig.begin()
    first = rig.demand()
    rig.to_worker(rig.task(first, 1, sampling=LONG))
    rig.demand(lambda d: len(d.held) == 1)
    time.sleep(0.5)
    (told,) = workers(rig, capsys, "suspend", "rollout-0")
    assert (told["state"], told["held"], told["incarnation"]) == ("suspended", [], first.incarnation + 1)
    last = [demand for demand in rig.decoded("demand") if demand.incarnation == first.incarnation][-1]
    offset = held(last, 1)
    assert offset >= 0, "the last word of an incarnation names its prefixes"
    assert "gives up 1 tasks" in rig.log.read_text()
    refused = "rollout-0 is suspended already; headrace workers resume rollout-0"
    assert refused in refusal(rig, capsys, "suspend", "rollout-0")
    assert "no worker is called gpu-*; heard were rollout-0" in refusal(rig, capsys, "resume", "gpu-*")
    assert "say which: headrace workers resume WORKER" in refusal(rig, capsys, "resume")

    rig.to_worker(rig.task(first, 2, sampling=LONG))  # written before schedule had heard: of the old incarnation
    (told,) = workers(rig, capsys, "resume", "rollout-0")
    assert told["capacity"] == first.capacity
    assert "rollout-0 is not suspended: it is idle" in refusal(rig, capsys, "resume", "rollout-0")
    again = rig.demand(lambda d: d.capacity > 0)
    rig.to_worker(rig.task(again, 1, attempt=1, partial=offset, sampling=LONG, sequence=again.next_sequence))
    done = rig.trajectory(1)
    assert (done.status, done.attempt) == ("train", 1)
    (prefix,) = next(p for at, p in partials(rig) if at == offset).sequences
    assert done.sequences[0].tokens[: prefix.tokens.size].tolist() == prefix.tokens.tolist()
    assert [t.group for t in rig.decoded("trajectories")] == [1]
    assert rig.end() == 0
    assert "rollout-0 left" in refusal(rig, capsys, "suspend", "rollout-0")
    rig.write("run", RunEnd(reason="steps", ended_ms=1), 0, key=b"end")
    assert f"run {rig.config.run.id} has ended" in refusal(rig, capsys, "resume", "--all")


def workers(rig: Rig, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What `headrace workers ... --format json` prints; first the same list is shown to people."""
    assert headrace(rig, *words, "--format", "json") == 0
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert headrace(rig, "list") == 0
    assert all(one["worker"] in (text := capsys.readouterr().out) and one["state"] in text for one in told[:1])
    return told


def refusal(rig: Rig, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says that changes nothing."""
    assert headrace(rig, *words) == 78
    return capsys.readouterr().err


def headrace(rig: Rig, *words: str) -> int:
    """`headrace workers` on the rig's run; its exit status."""
    place = ("--run", rig.config.run.id, "--bootstrap", rig.connection.bootstrap)
    with pytest.raises(SystemExit) as stopped:
        main(["workers", *words, *place])
    return int(stopped.value.code or 0)
