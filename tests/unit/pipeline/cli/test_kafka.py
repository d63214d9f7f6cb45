"""`headrace kafka`: what it prints and with which code it ends, where no node has to run for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.connectors import kafka_jars
from headrace.connectors.kafka_cluster import Cluster, Plan
from headrace.connectors.kafka_node import free_port
from headrace.pipeline.cli.kafka import _advice
from headrace.pipeline.cli.main import main


def headrace(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(("kafka", *words))
    return int(stopped.value.code or 0)


def noted(folder: Path, **plan: object) -> Cluster:
    """The state folder of a cluster whose nodes do not run."""
    cluster = Cluster(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"nodes": 1, "port": free_port(), "secure": False, "users": [], **plan}
    (folder / "cluster.json").write_text(json.dumps({"plan": whole, "controllers": {"1": 1}}))
    return cluster


def test_status_of_nothing_of_stopped_nodes_and_down_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace("status", "--folder", str(tmp_path / "none")) == 78
    assert "headrace kafka up" in capsys.readouterr().err
    cluster = noted(tmp_path / "k", nodes=3)
    assert headrace("status", "--folder", str(cluster.folder), "--format", "json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["running"] is False and [node["pid"] for node in answer["nodes"]] == [None] * 3
    assert headrace("status", "--folder", str(cluster.folder)) == 1
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert headrace("down", "--folder", str(cluster.folder)) == 0
    assert capsys.readouterr().out == "nothing ran\n"
    assert headrace("down", "--folder", str(cluster.folder), "--delete", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == {"ended": [], "deleted": True}
    assert not cluster.folder.exists()


@pytest.mark.parametrize("nodes", ["0", "2", "5"])
def test_other_numbers_of_nodes_are_refused(nodes: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert headrace("up", "--nodes", nodes, "--folder", str(tmp_path)) == 78
    assert "take 1, or 3" in capsys.readouterr().err


def test_missing_jars_and_java_end_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA", str(tmp_path / "no-java"))
    assert headrace("up", "--folder", str(tmp_path / "k")) == 78
    assert "set JAVA to one" in capsys.readouterr().err
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA", str(java))
    assert headrace("up", "--folder", str(tmp_path / "k"), "--libs", str(tmp_path)) == 78
    assert "holds no jars" in capsys.readouterr().err
    assert not (tmp_path / "k" / "cluster.json").exists()


def test_up_again_needs_no_word_of_what_the_cluster_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, plans = noted(tmp_path / "k", nodes=3), []
    monkeypatch.setattr(kafka_jars, "find_java", lambda: "java")
    monkeypatch.setattr(kafka_jars, "find_libs", lambda *_, **__: tmp_path)
    monkeypatch.setattr(Cluster, "up", lambda self, plan, *_, **__: plans.append(plan) or [])
    for words in ([], ["--nodes", "1", "--port", "7"], ["--secure"]):
        assert headrace("up", "--folder", str(cluster.folder), *words) == 0
    assert plans == [cluster.plan(), Plan(port=7), replace(plans[0], secure=True, users=plans[2].users)]
    assert "trainer" in plans[2].users and capsys.readouterr().out.count("runs already") == 3


def test_what_up_advises_can_be_pasted(tmp_path: Path) -> None:
    cluster = noted(tmp_path / "k", secure=True, users=["trainer"])
    plain = _advice(cluster, Plan(nodes=3), "a:1,b:2")
    assert plain == "  headrace run @ FILE kafka.bootstrap=a:1,b:2 kafka.replication_factor=3\n"
    said = _advice(cluster, Plan(secure=True), "a:1")
    assert "'kafka.sasl_username={role}'" in said and "{role}.password'" in said
    assert f"--state {cluster.folder} --apply" in said
    pasted = said.splitlines()
    assert all(line.endswith("\\") for line in pasted[: pasted.index(next(p for p in pasted if "{role}" in p))])
