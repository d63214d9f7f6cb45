"""Whatever the order of turns, crashes and results: every credit that opens ends exactly once, within its cap."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from stage_feed import make_config, make_demand, make_driver, make_prompt, make_step, make_trajectory

from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.schemas.records import Batched, Closed, End, Manifest, Opened, Stop, Task, Trained

ACTIONS = ["schedule", "assemble", "batch", "demand", "report", "report", "step", "wait", "restart"]


class Loop:
    """A worker and a trainer that do one thing when they are told."""

    def __init__(self, driver: TopologyDriver, prompts: int) -> None:
        self.driver = driver
        self.position, self.read, self.incarnation, self.batch = 0, 0, 1, 0
        self.held: list[Task] = []
        for number in range(prompts):
            driver.append("prompts", make_prompt(number))
        driver.append("prompts", End(reason="epochs", stream="main"))

    def demand(self) -> None:
        log = [e for p in range(2) for e in self.driver.log["tasks", p] if isinstance(e.record, Task)]
        for entry in log[self.position :]:
            task = entry.record
            assert isinstance(task, Task)
            if task.incarnation == self.incarnation:
                self.held.append(task)
                self.read = task.sequence + 1
        self.position = len(log)
        self.driver.append(
            "demand",
            make_demand(
                incarnation=self.incarnation,
                capacity=3,
                read=self.read,
                held=self.held,
                versions={0: self.version()},
            ),
        )

    def report(self, reward: float, usable: bool, lose: bool) -> None:
        if self.held:
            task = self.held.pop(0)
            result = make_trajectory(task.group, task.replica, reward, usable=usable, attempt=task.attempt)
            if not lose:
                self.driver.append("trajectories", result)

    def step(self) -> None:
        manifests = self.driver.records("manifests")
        if len(manifests) > self.batch:
            if isinstance(manifests[self.batch], Manifest):
                self.batch += 1
                self.driver.append("steps", make_step(self.batch))
            elif not any(isinstance(r, Stop) for r in self.driver.records("steps")):
                self.driver.append("steps", Stop(reason="data", policy=0))

    def restart(self) -> None:
        self.held, self.read = [], 0
        self.incarnation += 1

    def version(self) -> int:
        return self.batch

    def over(self) -> bool:
        return all(task.stage_is_over() for task in self.driver.tasks.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_credit_ends_exactly_once(data: DataObject) -> None:
    depth = data.draw(st.sampled_from([0, 0.5, 1, 2]), "depth")
    config = make_config(
        policies={"main": {"model": "none", "depth": depth, "mode": data.draw(st.sampled_from(["wait", "drop"]))}},
        trainer={"last_batch": data.draw(st.sampled_from(["train", "drop"]))},
        operators=[{"type": "dynamic_sampling"}] if data.draw(st.booleans(), "filter") else [],
        rollout={"task_deadline_seconds": 5, "group_deadline_seconds": 20, "max_lost_leases": 2},
    )
    driver = make_driver(config, "schedule", "assemble", "batch")
    loop = Loop(driver, data.draw(st.integers(1, 8), "prompts"))
    for _ in range(data.draw(st.integers(0, 60), "actions")):
        action = data.draw(st.sampled_from(ACTIONS))
        if action in ("schedule", "assemble", "batch"):
            share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            crash = data.draw(st.sampled_from(["none", "none", "before_commit", "after_commit"]))
            driver.turn(action, read=lambda place, waiting, share=share: int(waiting * share), crash=crash)  # type: ignore[misc]
        elif action == "report":
            loop.report(data.draw(st.sampled_from([0.0, 1.0])), data.draw(st.booleans()), data.draw(st.booleans()))
        elif action == "wait":
            driver.now_ms += data.draw(st.sampled_from([10, 3000, 11_000]))
        else:
            getattr(loop, action)()
    reward = 0.0
    for _ in range(2000):
        if loop.over():
            break
        reward = 1.0 - reward
        loop.demand()
        loop.report(reward, usable=True, lose=False)
        loop.step()
        driver.advance(100)
    assert loop.over(), "the run does not end"
    _judge(driver)


def _judge(driver: TopologyDriver) -> None:
    live: set[int] = set()
    batches: dict[int, list[int]] = {}
    ended: Counter[int] = Counter()
    for record in driver.records("ledger"):
        if isinstance(record, Opened):
            live.add(record.group)
            ended[record.group] += 0
            assert len(live) <= record.cap
        elif isinstance(record, Batched):
            assert live.issuperset(record.groups)
            batches[record.batch] = record.groups
        elif isinstance(record, Closed) and record.group in live:
            live.discard(record.group)
            ended[record.group] += 1
        elif isinstance(record, Trained) and record.first:
            for group in batches.pop(record.batch, []):
                live.discard(group)
                ended[group] += 1
    assert set(ended.values()) <= {1}
    assert not driver.dead_letters
