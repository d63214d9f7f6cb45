"""The rollout worker as a process: the test plays ``schedule``, trainer and reader on a real broker (protocol 5)."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_rig import Rig

from headrace.connectors.blobs import get_sequences
from headrace.schemas.ids import group_partition, inbox_of
from headrace.schemas.parts import PolicyBound
from headrace.schemas.records import Cancel, EvalResult, Resume, RunEnd, RunManifest, Stop, Suspend

pytestmark = pytest.mark.timeout(240)


Make = Callable[..., Rig]


@pytest.fixture
def make_rig(bootstrap: str, tiny_model: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes rigs; their workers are ended."""
    rigs: list[Rig] = []

    def make(**rollout: Any) -> Rig:
        number = hash(tmp_path) % 10**6 + len(rigs)
        rigs.append(Rig(bootstrap, tmp_path / str(len(rigs)), tiny_model, number, **rollout))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.worker is not None and rig.worker.poll() is None:
            rig.worker.kill()
            rig.worker.wait(10)
        rig.reader.close()


def test_a_worker_joins_works_swaps_weights_and_stops(make_rig: Make) -> None:
    rig = make_rig(engine="transformers")
    rig.begin()
    first = rig.demand()
    assert (first.capacity, first.next_sequence, first.held) == (9, 0, [])
    assert [(p.policy, p.version) for p in first.policies] == [(0, 0)]
    assert first.inbox == inbox_of("rollout-0", 4)

    for replica in range(9):
        rig.to_worker(rig.task(first, 1, replica))
    done = [rig.trajectory(1, replica) for replica in range(9)]
    for one in done:
        assert (one.status, one.worker, one.incarnation) == ("train", "rollout-0", first.incarnation)
        (sequence,) = one.sequences
        assert sequence.prompt_length == 6
        assert sequence.mask.tolist() == [0] * 6 + [1] * one.tokens
        assert set(sequence.versions[6:].tolist()) == {0}
        assert one.oldest_versions == {"0": 0}
        assert one.sources[0].topic == "tasks"
        assert one.rewards[0].name == "exact_match"
    assert len({tuple(one.sequences[0].tokens.tolist()) for one in done}) > 1, "replicas must differ"
    raw = rig.records("trajectories")[0]
    assert raw.partition == group_partition(1, 2)
    rig.demand(lambda d: d.held == [] and d.next_sequence == 9)

    # a task for a version that is not there yet waits for it, and is sampled by nothing older
    rig.to_worker(rig.task(first, 2, min_version=3))
    rig.demand(lambda d: [h.group for h in d.held] == [2])
    time.sleep(0.5)
    assert not [t for t in rig.decoded("trajectories") if t.group == 2]
    rig.publish(3)
    assert rig.trajectory(2).sequences[0].oldest_version == 3
    rig.demand(lambda d: d.policies[0].version == 3 and not d.held)

    rig.to_worker(Stop(reason="steps"))
    assert rig.worker is not None
    assert rig.worker.wait(20) == 0


def test_tasks_of_others_and_of_another_incarnation_are_left_alone(make_rig: Make) -> None:
    rig = make_rig()
    rig.begin()
    demand = rig.demand()
    rig.to_worker(rig.task(demand, 1, incarnation=demand.incarnation - 1, sequence=0))
    rig.to_worker(rig.task(demand, 2, worker="rollout-7", sequence=0))
    rig.to_worker(rig.task(demand, 3, sequence=0))
    rig.to_worker(rig.task(demand, 3, sequence=0))
    rig.trajectory(3)
    rig.demand(lambda d: d.next_sequence == 1 and not d.held)
    assert [t.group for t in rig.decoded("trajectories")] == [3]


def test_suspend_cancel_resume_and_deadline(make_rig: Make) -> None:
    rig = make_rig()
    rig.begin()
    demand = rig.demand()
    rig.to_worker(Suspend(worker="rollout-0"))
    rig.to_worker(rig.task(demand, 1))
    rig.to_worker(rig.task(demand, 2))
    rig.to_worker(rig.task(demand, 3, deadline_ms=int(time.time() * 1000) + 700))
    rig.demand(lambda d: len(d.held) == 3)
    late = rig.trajectory(3)
    assert (late.status, late.end_reason) == ("excluded", "env_timeout")
    assert "deadline" in late.error
    rig.to_worker(
        Cancel(kind="train", group=1, replica=0, attempt=0, worker="rollout-0", incarnation=demand.incarnation)
    )
    rig.demand(lambda d: [h.group for h in d.held] == [2])
    rig.to_worker(Resume(worker="rollout-0"))
    assert rig.trajectory(2).status == "train"
    rig.demand(lambda d: not d.held)
    assert sorted(t.group for t in rig.decoded("trajectories")) == [2, 3]


def test_a_new_incarnation_starts_at_the_end_of_its_inbox_and_sigterm_exits_0(make_rig: Make) -> None:
    rig = make_rig()
    rig.begin()
    first = rig.demand()
    assert rig.worker is not None
    rig.worker.send_signal(signal.SIGKILL)
    rig.worker.wait(10)
    rig.to_worker(rig.task(first, 1))
    rig.start()
    second = rig.demand(lambda d: d.incarnation != first.incarnation)
    assert second.incarnation > first.incarnation
    assert (second.held, second.next_sequence) == ([], 0)
    began = time.monotonic()
    assert rig.end() == 0
    assert time.monotonic() - began < 5
    assert rig.records("trajectories", 1.0) == []


def test_a_worker_that_starts_after_the_runs_end_exits(make_rig: Make) -> None:
    rig = make_rig()
    rig.write("run", rig.manifest, 0, key=b"manifest")
    rig.write("run", RunEnd(reason="steps", ended_ms=1), 0, key=b"end")
    rig.publish(0)
    rig.start()
    assert rig.worker is not None
    assert rig.worker.wait(30) == 0
    assert rig.records("demand", 1.0) == []


def test_version_0_is_waited_for_and_another_tokenizer_is_refused(make_rig: Make) -> None:
    rig = make_rig()
    rig.write("run", rig.manifest, 0, key=b"manifest")
    rig.start()
    rig.until(lambda: "waiting for version 0 of policy main" in rig.log.read_text())
    rig.publish(0)
    rig.demand()
    rig.end()

    other = make_rig()
    other.manifest = RunManifest(
        run=other.config.run.id, created_ms=1, tokenizer_digest="0" * 64, policies=["main"],
        partitions=other.manifest.partitions,
    )  # fmt: skip
    other.begin()
    assert other.worker is not None
    assert other.worker.wait(30) == 78
    assert "tokenises otherwise" in other.log.read_text()


FAILING = {
    "raises": "no judge today",
    "hangs": "did not return within 1 s",
    "nan": "returned nan",
    "surrogate": "bad text",
    "dies": "exit status 3",
}


def test_a_reward_that_fails_excludes_its_trajectory_and_the_worker_goes_on(make_rig: Make) -> None:
    rig = make_rig(reward="test_rewards:fine")
    rig.begin()
    demand = rig.demand()
    group = 0
    for _ in range(2):
        for name in FAILING:
            rig.to_worker(rig.task(demand, group, reward=f"test_rewards:{name}"))
            group += 1
        rig.demand(lambda d: not d.held and d.next_sequence == group)  # noqa: B023
    for number in range(group):
        name = list(FAILING)[number % len(FAILING)]
        one = rig.trajectory(number)
        assert (one.status, one.reward, one.rewards) == ("excluded", 0.0, [])
        assert FAILING[name] in one.error
        assert f"reward test_rewards:{name}" in one.error
    rig.to_worker(rig.task(demand, group))
    fine = rig.trajectory(group)
    assert fine.status == "train"
    assert {part.name: part.value for part in fine.rewards} == {"length": float(fine.tokens), "bonus": 0.5}
    assert fine.reward == fine.tokens + 0.5
    assert rig.end() == 0


def test_a_prompt_too_long_and_a_nan_log_prob_are_named(make_rig: Make) -> None:
    rig = make_rig(engine="transformers", max_prompt_tokens=10)
    rig.begin()
    demand = rig.demand()
    rig.to_worker(rig.task(demand, 1, prompt="1" * 11))
    long = rig.trajectory(1)
    assert long.status == "excluded"
    assert "prompt_too_long" in long.error
    assert "11 tokens, at most 10" in long.error
    rig.publish(1, nan=True)
    rig.demand(lambda d: d.policies[0].version == 1)
    rig.to_worker(rig.task(demand, 2))
    broken = rig.trajectory(2)
    assert broken.status == "excluded"
    assert "log-prob of sampled token 0 is nan at version 1" in broken.error
    rig.publish(2)
    rig.demand(lambda d: d.policies[0].version == 2)
    rig.to_worker(rig.task(demand, 3))
    assert rig.trajectory(3).status == "train"


def test_large_arrays_go_to_the_store_and_without_one_to_a_dead_letter(make_rig: Make) -> None:
    rig = make_rig(offload_bytes=64)
    rig.begin()
    demand = rig.demand()
    rig.to_worker(rig.task(demand, 1))
    one = rig.trajectory(1)
    assert one.status == "train"
    assert one.blob is not None
    assert one.sequences == []
    (sequence,) = get_sequences(rig.store, one.blob)
    assert int(sequence.mask.sum()) == one.tokens
    blobs = rig.store.root / "runs" / rig.config.run.id / "blobs"
    assert (blobs / "1" / "0" / "0").is_file()
    # a file where the folder must be: no put can succeed
    (blobs / "2").write_text("in the way")
    rig.to_worker(rig.task(demand, 2))
    lost = rig.trajectory(2)
    assert lost.status == "excluded"
    assert lost.sequences == []
    (letter,) = rig.until(lambda: rig.records("dead-letters"))
    headers = dict(letter.headers)
    assert headers["hr-stage"] == b"task_to_trajectory"
    assert headers["__streams.errors.exception"]
    assert json.loads(letter.value)["group"] == 2
    rig.demand(lambda d: not d.held)


def test_evaluation_and_score_tasks_are_answered(make_rig: Make) -> None:
    rig = make_rig()
    rig.begin()
    demand = rig.demand()
    rig.to_worker(rig.task(demand, 1, replica=2, kind="eval"))
    rig.to_worker(rig.task(demand, 2, kind="score"))
    result: EvalResult = rig.until(lambda: rig.decoded("evals"))[0]
    assert (result.policy, result.version, result.replica) == (0, 0, 2)
    assert (result.oldest_version, result.newest_version) == (0, 0)
    assert result.tokens >= 1
    score = rig.until(lambda: rig.decoded("trajectories"))[0]
    assert "no group-scope reward" in score.error
    rig.demand(lambda d: not d.held)


def test_a_worker_that_only_evaluates_samples_each_task_with_exactly_its_version(make_rig: Make) -> None:
    rig = make_rig(engine="transformers")
    rig.write("run", rig.manifest, 0, key=b"manifest")
    for version in (0, 1, 2, 3):
        rig.publish(version)
    rig.start(role="eval")
    demand = rig.demand()
    assert (demand.role, demand.policies[0].version) == ("eval", 3)
    asked = {1: 2, 2: 0, 3: 7, 4: 2}  # version 7 does not exist
    for group, version in asked.items():
        for replica in range(2):
            bound = PolicyBound(policy=0, min_version=version, pinned=True)
            rig.to_worker(rig.task(demand, group, replica, kind="eval", policies=[bound]))
    results: list[EvalResult] = rig.until(lambda: (d := rig.decoded("evals")) and len(d) == 8 and d)
    told = {(r.prompt_id, r.replica): r for r in results}
    for group, version in asked.items():
        for replica in range(2):
            one = told[f"{group:016x}", replica]
            assert one.version == version
            if version == 7:
                assert "version 7 of main" in one.error
            else:
                assert (one.oldest_version, one.newest_version, one.error) == (version, version, "")
    rig.publish(4)
    bound = PolicyBound(policy=0, min_version=4, pinned=True)
    rig.to_worker(rig.task(demand, 5, kind="eval", policies=[bound]))
    rig.demand(lambda d: d.policies[0].version == 4 and not d.held)
    assert rig.decoded("evals")[-1].newest_version == 4


def test_garbage_in_the_inbox_is_a_dead_letter(make_rig: Make) -> None:
    rig = make_rig()
    rig.begin()
    demand = rig.demand()
    rig.producer.produce(rig.connection.topic("tasks"), b"\xff\x00garbage", partition=demand.inbox)
    rig.to_worker(rig.task(demand, 1))
    assert rig.trajectory(1).status == "train"
    (letter,) = rig.until(lambda: rig.records("dead-letters"))
    assert letter.value == b"\xff\x00garbage"
    assert dict(letter.headers)["__streams.errors.topic"] == rig.connection.topic("tasks").encode()
    listed = rig.connection.admin().list_consumer_groups(request_timeout=10).result(10)
    mine = [g.group_id for g in listed.valid if g.group_id.startswith(rig.config.run.id)]
    assert mine == [], "a worker is in no consumer group"
