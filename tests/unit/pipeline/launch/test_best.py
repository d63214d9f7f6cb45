"""The best version lies in the run's folder as a model, once, and again only when another one is best."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.evaluated import Best, EvaluationFigures
from headrace.pipeline.launch.best import export_best
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.report_policies import PolicyFigures
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.delta_layout import Layout
from headrace.trainers.step_to_delta import DeltaPublisher


def figures(policy: str, best: Best | None, *, frozen: bool = False) -> PolicyFigures:
    evaluation = EvaluationFigures(
        versions=[0], samples=1, failed=0, other=0.0, metrics={}, curves={}, best=best
    )  # fmt: skip
    return PolicyFigures(
        policy=policy, frozen=frozen, versions=1, groups_opened=0, groups_trained=0, unclaimed=0, drops={},
        reward_start=None, reward_final=None, accuracy_start=None, accuracy_final=None, by_role={},
        mean_staleness=None, max_staleness=None, evaluation=evaluation,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that has published three versions of a tensor."""
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text('{"torch_dtype": "float32"}')
    config = RunConfig.model_validate(
        {
            "run": {"id": "r", "folder": str(tmp_path)},
            "policies": {"main": {"model": str(model)}, "cold": {"model": str(model)}},
            "streams": {"main": {"dataset": "d"}},
        }
    )
    made = RunFolder.of(config)
    made.create()
    dump_config(config, made.config)
    bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
    publisher = DeltaPublisher(LocalStore(made.path / "store"), "r", "main", Layout.of({"w": bits}, {"w": "bfloat16"}))
    head = None
    for version in range(3):
        head = publisher.publish({"w": bits + version}, version=version, lineage=0, batch=version, parent=head)
    return made


def exported(folder: RunFolder) -> int:
    """The version that lies there, by its weights."""
    target = folder.best / "main"
    raw = (target / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert json.loads(raw[8 : 8 + size])["w"]["dtype"] == "BF16"
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    return int(np.frombuffer(raw[8 + size :], np.uint16)[0])


def test_the_best_version_is_exported_with_the_reason(folder: RunFolder) -> None:
    said: list[str] = []
    best = Best(1, "pass@2", 0.75)
    export_best(folder, [figures("main", best), figures("cold", Best(0, "avg", 1.0), frozen=True)], said.append)
    assert exported(folder) == 1
    assert json.loads((folder.best / "main" / "evaluation.json").read_text()) == {
        "version": 1, "metric": "pass@2", "value": 0.75,
    }  # fmt: skip
    assert said == [f"version 1 of main, the best by pass@2 (0.750): {folder.best / 'main'}"]
    assert not (folder.best / "cold").exists(), "a frozen policy has one version, its model folder"
    export_best(folder, [figures("main", best)], said.append)
    assert len(said) == 1, "nothing is done twice"
    export_best(folder, [figures("main", Best(2, "pass@2", 0.8))], said.append)
    assert exported(folder) == 2


def test_what_cannot_be_exported_is_said_and_leaves_what_was_there(folder: RunFolder) -> None:
    said: list[str] = []
    export_best(folder, [figures("main", Best(1, "avg", 0.5)), figures("cold", None)], said.append)
    export_best(folder, [figures("main", Best(9, "avg", 0.9))], said.append)
    assert "version 9 of main, the best by avg (0.900), could not be exported: " in said[1]
    assert exported(folder) == 1
    (folder.best / "main" / "evaluation.json").write_text("{")
    export_best(folder, [figures("main", Best(2, "avg", 0.9))], said.append)
    assert exported(folder) == 2
