"""``headrace operators``: show, check, new and test, with what a person has to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.pipeline.cli.main import main

BASE = '[policies.main]\nmodel = "none"\n[streams.main]\ndataset = "none"\n'


def headrace(*words: str) -> int:
    try:
        return main(list(words)) or 0
    except SystemExit as end:
        return int(end.code or 0)


def test_show_tells_an_operators_kind_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("operators", "show", "downsample") == 0
    said = capsys.readouterr().out
    assert "kind: downsample" in said and "arXiv 2504.13818" in said
    rows = [line.split() for line in said.splitlines()[-3:]]
    assert rows[0] == ["key", "type", "default"] and rows[1] == ["keep", "int", "required"]
    assert rows[2][0] == "rest" and rows[2][-1] == '"baseline_only"'


def test_check_says_the_order_or_what_is_wrong_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('operators = [{ type = "length", max_tokens = 9 }, { type = "downsample", keep = 2 }]\n' + BASE)
    assert headrace("operators", "check", "@", str(file)) == 0
    assert "2 operators can work in this order" in capsys.readouterr().out
    file.write_text('operators = [{ type = "downsample", keep = 2 }, { type = "length", max_tokens = 9 }]\n' + BASE)
    assert headrace("operators", "check", "@", str(file)) == 78
    said = capsys.readouterr().err
    assert "shape, statistics, filter, downsample, staleness, replay, order, batch: move it up" in said
    file.write_text('operators = [{ type = "length", max_token = 9 }]\n' + BASE)
    assert headrace("operators", "check", "@", str(file)) == 78
    assert "operators[0] (length)" in capsys.readouterr().err


def test_new_writes_a_package_and_refuses_a_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert headrace("operators", "new", "dedup") == 78
    assert "headrace has a plug-in 'dedup'" in capsys.readouterr().err
    assert headrace("operators", "new", "my_shape", "--kind", "shape") == 0
    files = capsys.readouterr().out.split()
    assert all(Path(file).is_file() for file in files) and "my_shape/tests/test_my_shape.py" in files
    monkeypatch.syspath_prepend(str(tmp_path / "my_shape" / "src"))
    assert headrace("operators", "test", "headrace_my_shape.operator:MyShape", "--groups", "7") == 0


def test_test_exits_with_1_for_a_broken_promise_and_78_for_wrong_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("operators", "test", "reward_range", "low=0.2", "--groups", "7", "--format", "json")
    assert headrace(*words) == 0
    assert all(check["passed"] for check in json.loads(capsys.readouterr().out))
    (tmp_path / "my_broken_operator.py").write_text(
        "from headrace.pipeline.operators.truncated import Truncated\n"
        "class Silent(Truncated):\n    def process(self, record, context):\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert headrace("operators", "test", "my_broken_operator:Silent", "--groups", "7") == 1
    assert "neither emitted nor dropped" in capsys.readouterr().out
    refused = {"low=high": "low: ", "low": "key=value", "lowest=1": "unknown key lowest; did you mean low?"}
    for word, says in refused.items():
        assert headrace("operators", "test", "reward_range", word) == 78
        assert says in capsys.readouterr().err
