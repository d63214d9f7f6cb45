"""A package that ``new`` writes, and the sample of the documentation, install by pip and work by one line of TOML."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.connectors.conformance import assert_conforms
from headrace.connectors.plugins import load
from headrace.pipeline.cli.operator_templates import OPERATORS
from headrace.pipeline.cli.plugin_package import write_package
from headrace.pipeline.cli.plugin_templates import PLUGINS
from headrace.schemas.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[4]
COMMAND = ("-c", "import sys; from headrace.pipeline.cli.main import main; sys.exit(main())")


def ran(*words: str, where: Path, target: Path) -> str:
    path = os.pathsep.join([str(target), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=where, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "kind"), [("reward_scale", "shape"), ("my_order", "order")])
def test_a_package_installs_passes_its_tests_and_changes_a_run_by_one_line(
    name: str, kind: str, tmp_path: Path
) -> None:
    package, target = tmp_path / "package", tmp_path / "target"
    if name == "reward_scale":
        shutil.copytree(ROOT / "docs" / "sample_operator", package)
    else:
        write_package("operators", name, package, operator_kind=kind)
    pip = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
    )
    ran(*pip, str(package), where=tmp_path, target=target)
    listed = json.loads(ran(*COMMAND, "operators", "list", "--format", "json", where=tmp_path, target=target))
    (row,) = [row for row in listed if row["name"] == name]
    assert (row["kind"], row["distribution"]) == ("operators", f"headrace-{name.replace('_', '-')}")
    run = tmp_path / "run.toml"
    run.write_text(
        f'operators = [{{ type = "{name}" }}]\n[policies.main]\nmodel = "none"\n[streams.main]\ndataset = "none"\n'
    )
    checked = ran(*COMMAND, "operators", "check", "@", str(run), where=tmp_path, target=target)
    assert checked.splitlines()[1].split() == [name, kind, "all", "all"]
    assert (
        "1 passed" in (tests := ran("-m", "pytest", "-q", "tests", where=package, target=target)) or "2 passed" in tests
    )


@pytest.mark.parametrize("kind", [*PLUGINS, *OPERATORS])
def test_what_new_writes_of_any_kind_conforms(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written test runs as a user's pytest would; the entry point is the object that it tries."""
    group, name = ("operators", f"my_{kind}_x") if kind in OPERATORS else (kind, f"my_{kind}_x")
    written = write_package(group, name, tmp_path / "package", operator_kind=kind if kind in OPERATORS else "filter")
    monkeypatch.syspath_prepend(str(tmp_path / "package" / "src"))
    project = tomllib.loads((tmp_path / "package" / "pyproject.toml").read_text())["project"]
    ((entry_group, points),) = project["entry-points"].items()
    assert entry_group == f"headrace.{group}"
    assert callable(load(entry_group, points[name])), "the entry point is there"
    compile(written[-1].read_text(), str(written[-1]), "exec")
    (tmp_path / "rows").write_text("one\ntwo\n")
    settings = {"path": str(tmp_path / "rows")} if kind == "datasets" else {}
    assert_conforms(group, points[name], settings, **({"groups": 7} if group == "operators" else {}))
    assert points[name] in written[-1].read_text()
    tomllib.loads((tmp_path / "package" / "README.md").read_text().rpartition("```toml\n")[2].removesuffix("```\n"))


@pytest.mark.parametrize("name", ["", "My", "a-b", "1st", "class", "../up", "é"])
def test_a_name_that_cannot_be_a_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no name for a plug-in"):
        write_package("operators", name, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ConfigurationError, match="is there and not empty"):
            write_package("operators", "fine", folder)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
