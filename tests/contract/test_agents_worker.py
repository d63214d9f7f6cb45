"""Agents and group rewards in a real worker on a real broker: episodes, programs and score tasks (protocol 5)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_rig import Rig

from headrace.schemas.records import Score, Trajectory

pytestmark = pytest.mark.timeout(600)

AGENT = """
import json, os, sys, urllib.request
given = json.load(sys.stdin)
text = given["prompt"]
for _ in range(2):
    body = json.dumps({"model": "m", "prompt": text, "return_token_ids": True}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/completions"
    choice = json.load(urllib.request.urlopen(urllib.request.Request(url, body)))["choices"][0]
    text = text + choice["text"] + "<eos>" * (choice["finish_reason"] == "stop") + "1="
print(json.dumps({"reward": 2}))
"""


@pytest.fixture
def make_rig(bootstrap: str, tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a rig; its worker is ended."""
    rigs: list[Rig] = []

    def make(**rollout: Any) -> Rig:
        rigs.append(Rig(bootstrap, tmp_path / "rig", tiny_model, hash(tmp_path) % 10**6, **rollout))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.end()
        rig.reader.close()


def test_members_are_read_where_they_lie_and_judged_together(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stream={"group_reward": "diversity"})
    rig.begin()
    demand = rig.demand()
    for replica in range(3):
        rig.to_worker(rig.task(demand, 4, replica))
    texts = {replica: rig.trajectory(4, replica).completion_text for replica in range(3)}
    places = {r.decoded().replica: r.source for r in rig.records("trajectories") if isinstance(r.decoded(), Trajectory)}
    rig.to_worker(rig.task(demand, 4, 0, kind="score", members=[places[2], places[0], places[1]]))
    score: Score = rig.until(lambda: next((r for r in rig.decoded("trajectories") if isinstance(r, Score)), None))
    assert score.error == "" and [s.replica for s in score.scores] == [2, 0, 1]
    assert {s.name for s in score.scores} == {"diversity"} and len(set(texts.values())) > 1


def test_an_agent_program_samples_through_its_worker(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    options = {"command": [sys.executable, str(tmp_path / "agent.py")], "reward": "program"}
    rig = make_rig(engine="transformers", stream={"workflow": "program", "workflow_options": options})
    rig.begin()
    demand = rig.demand()
    for replica in range(2):
        rig.to_worker(rig.task(demand, 5, replica))
    for replica in range(2):
        made = rig.trajectory(5, replica)
        assert (made.status, made.reward, made.error) == ("train", 2.0, "")
        assert made.metrics["calls"] == 2.0 and made.metrics["sequences_per_trajectory"] == len(made.sequences)
        _assert_true_of_the_model(made, rig.model)


def _assert_true_of_the_model(made: Trajectory, model: Path) -> None:
    """The model gives every trained token the log-prob that was recorded, in the context where it stands."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for sequence in made.sequences:
        with torch.inference_mode():
            logits = network(torch.from_numpy(sequence.tokens.astype(np.int64))[None]).logits[0]
        logp = torch.log_softmax(logits.float(), -1)[:-1]
        found = logp.gather(1, torch.from_numpy(sequence.tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()
        trained = sequence.mask[1:] == 1
        assert trained.sum() > 0
        assert np.abs(found - sequence.logprobs[1:])[trained].max() < 1e-4


def test_turns_in_an_environment_through_a_worker(make_rig: Callable[..., Rig]) -> None:
    options = {"environment": "shop", "form": "text", "turns": 3}
    rig = make_rig(stream={"workflow": "multi_turn", "workflow_options": options})
    rig.begin()
    rig.to_worker(rig.task(rig.demand(), 6))
    made = rig.trajectory(6)
    assert (made.status, made.error, made.metrics) == ("train", "", {"turns": 3.0, "sequences_per_trajectory": 1.0})
    (sequence,) = made.sequences
    assert 0 < sequence.mask.sum() < sequence.mask[sequence.prompt_length :].size
    assert [r.turn for r in made.rewards] == [0, 1, 2, -1]
