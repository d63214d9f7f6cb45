"""`headrace simulate`: figures by name, sizes from a file, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.pipeline.cli.main import main
from headrace.pipeline.simulation import catalogue
from headrace.pipeline.simulation.study import Chart, Result, Row, Study

PLAN = """
steps = 4
warm_up = 1

[work]
batch_groups = 4
group_size = 2
length = "lognormal(20, 0.5, cap=60)"

[machines]
slots = 4
step_seconds = 0.5
row_seconds = 0.0
train_sample_seconds = 4.0
"""


def headrace(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *words])
    return int(stopped.value.code or 0)


def test_list_names_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("list", "--format", "json") == 0
    names = {study["name"] for study in json.loads(capsys.readouterr().out)}
    assert {"fig7", "fig8", "fig9", "fig10", "fig11", "fig1b", "fig3", "table1", "table4", "bounds", "depth"} <= names


def test_a_figure_is_printed_beside_the_papers_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(found: Mapping[str, float]) -> Result:
        return Result([Row("speed-up", found["x"], 4.0)], [Chart("speeds", bars={"a": found["x"]})])

    quick = Study("fig7", "Figure 7", "why it is so", lambda seed: {"x": 1.0 + seed}, tell)
    monkeypatch.setattr(catalogue, "STUDIES", {"fig7": quick})
    page = tmp_path / "page.html"
    assert headrace("paper", "fig7", "--seeds", "3", "--jobs", "1", "--html", str(page)) == 0
    out = capsys.readouterr().out
    assert re.search(r"speed-up +4 +2 +0\.50", out) and "why it is so" in out
    assert page.read_text("utf-8").count("<svg") == 1
    assert headrace("paper", "--seeds", "1", "--jobs", "1", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["fig7"][0]["ratio"] == 0.25


def test_a_size_is_found_for_a_file_with_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    page = tmp_path / "size.html"
    words = ("size", str(file), "work.group_size=3", "--gpus", "4", "--splits", "3", "--depths", "0,1", "--jobs", "1")
    assert headrace(*words, "--html", str(page), "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["choices"]) == 6 and found["best"] in found["choices"]
    assert max(c["samples_per_second"] for c in found["choices"]) * 0.97 <= found["best"]["samples_per_second"]
    assert page.read_text("utf-8").count("<svg") == 2
    assert headrace(*words) == 0
    assert "best: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("paper", "fig99"), "no figure is called fig99; there are fig1b"),
        (("size", "PLAN", "work.lenght=3"), "work.lenght: Extra inputs are not permitted"),
        (("size", "PLAN", "work.length=gauss(3)"), "work.length"),
        (("size", "PLAN", "--depths", "0,x"), "--depths '0,x' is not numbers"),
        (("size", "missing.toml"), "cannot read missing.toml"),
    ],
)
def test_what_is_wrong_is_named(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    assert headrace(*(str(file) if word == "PLAN" else word for word in words)) == 78
    assert said in capsys.readouterr().err
