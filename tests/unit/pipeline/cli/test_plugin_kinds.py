"""``headrace rewards``, ``losses`` and so on: the same five commands for every kind of plug-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.connectors.conformance import KITS
from headrace.pipeline.cli.main import COMMANDS, main

BASE = '[policies.main]\nmodel = "none"\n[streams.main]\ndataset = "none"\n'
KINDS = [kind for kind in KITS if kind != "operators"]


def headrace(*words: str) -> int:
    try:
        return main(list(words)) or 0
    except SystemExit as end:
        return int(end.code or 0)


def test_every_kind_has_its_command() -> None:
    assert set(KITS) <= set(COMMANDS)


@pytest.mark.parametrize("kind", KINDS)
def test_list_and_show(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(kind, "list", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all(row["kind"] == kind and row["distribution"] == "headrace" for row in rows)
    assert headrace(kind, "show", rows[0]["name"]) == 0
    module, _, name = rows[0]["object"].partition(":")
    assert capsys.readouterr().out.startswith(f"{module}:{name}\n")
    assert headrace(kind, "show", rows[0]["name"] + "x") == 78
    assert f"did you mean {rows[0]['name']!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "line", "says"),
    [
        ("losses", 'trainer.loss = "grpp"', "trainer.loss: headrace.losses has no 'grpp'; did you mean"),
        ("losses", "trainer.loss_options = { lo = 1 }", "trainer.loss_options.lo: "),
        ("advantages", "policies.main.trainer.advantage_options = { x = 1 }", "advantage_options.x: "),
        ("rewards", 'streams.main.reward = "none"', "streams.main.reward: headrace.rewards has no 'none'"),
        ("engines", 'rollout.engine = "vllmm"', "rollout.engine: headrace.engines has no 'vllmm'"),
        ("workflows", 'streams.main.workflow = "none"', "streams.main.workflow: headrace.workflows has no 'none'"),
        ("datasets", 'streams.main.format = "jsonll"', "jsonl"),
    ],
)
def test_check_names_the_key(
    kind: str, line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(BASE)
    assert headrace(kind, "check", "@", str(file)) == 0
    assert "can work" in capsys.readouterr().out
    assert headrace(kind, "check", "@", str(file), line.replace(" = ", "=", 1)) == 78
    assert says in capsys.readouterr().err


def test_new_writes_a_package_that_test_finds_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert headrace("rewards", "new", "exact_match") == 78
    assert "headrace has a plug-in 'exact_match'" in capsys.readouterr().err
    assert headrace("rewards", "new", "my_reward") == 0
    assert "my_reward/src/headrace_my_reward/reward.py" in capsys.readouterr().out
    monkeypatch.syspath_prepend(str(tmp_path / "my_reward" / "src"))
    assert headrace("rewards", "test", "headrace_my_reward.reward:MyReward", "timeout_seconds=3") == 0
    assert "BROKEN" not in capsys.readouterr().out
    assert headrace("rewards", "test", "headrace_my_reward.reward:MyReward", "speed=3") == 78
    assert "speed" in capsys.readouterr().err


def test_test_exits_with_1_for_a_broken_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_broken_reward.py").write_text("def reward(prompt, completion):\n    return float('nan')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert headrace("rewards", "test", "my_broken_reward:reward", "--format", "json") == 1
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)}
    assert not checks["finite"]["passed"] and "nan" in checks["finite"]["detail"]


def test_a_plugin_that_cannot_be_imported_is_named_with_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_torn_loss.py").write_text("import json\nraise RuntimeError('half a file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert headrace("losses", "show", "my_torn_loss:Loss") == 78
    said = capsys.readouterr().err
    assert "RuntimeError: half a file" in said and "my_torn_loss.py" in said and "line 2" in said
