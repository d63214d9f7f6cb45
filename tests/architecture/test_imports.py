"""Which module may import which: layers, bare names, and what importing the data path may load."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "connectors", "pipeline", "trainers")
HEAVY = ("torch", "vllm", "deepspeed", "boto3", "botocore", "transformers")


def python_files() -> Iterator[Path]:
    """Every Python file that belongs to the repository, tests and benchmarks included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            yield ROOT / name


def bare_imports(text: str) -> list[str]:
    """Imports of the four folders by their bare names, as "line: name"."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        found += [f"{node.lineno}: {name}" for name in names if name.split(".")[0] in FOLDERS]  # type: ignore[attr-defined]
    return found


def test_no_file_imports_a_source_folder_by_its_bare_name() -> None:
    found = [f"{path.relative_to(ROOT)}:{place}" for path in python_files() for place in bare_imports(path.read_text())]
    assert not found, f"import headrace.FOLDER instead, a bare import loads a second copy: {found}"


def test_a_planted_bare_import_is_seen() -> None:
    text = "import schemas\nfrom pipeline.flow import f\nfrom headrace.schemas import g\nfrom . import trainers\n"
    assert bare_imports(text) == ["1: schemas", "2: pipeline.flow"]


def test_import_contracts_are_kept() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("pipeline/operators/planted.py", "import headrace.connectors"),
        ("schemas/planted.py", "import headrace.connectors"),
        ("connectors/planted.py", "import headrace.pipeline"),
        ("pipeline/planted.py", "import headrace.trainers"),
        ("trainers/planted.py", "import headrace.pipeline"),
        ("pipeline/operators/planted.py", "import confluent_kafka"),
    ],
)
def test_a_planted_import_breaks_a_contract(tmp_path: Path, module: str, statement: str) -> None:
    """The contracts of pyproject.toml are not empty words: each kind of forbidden import is found."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "headrace"
    for folder in (*FOLDERS, "pipeline/operators"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / module).write_text(statement + "\n")
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode != 0, f"`{statement}` in {module} was not refused:\n{done.stdout}"
    assert "1 broken" in done.stdout, done.stdout


IMPORT_ALL = """
import importlib, json, pkgutil, sys
import headrace
loaded = []
for folder in sys.argv[1:]:
    package = importlib.import_module(f"headrace.{folder}")
    loaded.append(package.__name__)
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            loaded.append(found.name)
print(json.dumps({"loaded": loaded, "roots": sorted({name.split(".")[0] for name in sys.modules})}))
"""


def imported(*folders: str) -> dict[str, list[str]]:
    """Import every module of the folders in a fresh process: what was imported, and all top-level names it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *folders], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_importing_the_data_path_loads_nothing_heavy() -> None:
    answer = imported("schemas", "connectors", "pipeline")
    assert "headrace.schemas" in answer["loaded"]
    loaded = sorted(set(HEAVY) & set(answer["roots"]))
    assert not loaded, f"import {loaded} inside the function that needs it"


def test_every_module_imports_and_no_bare_copy_is_loaded() -> None:
    roots = imported(*FOLDERS)["roots"]
    assert not set(FOLDERS) & set(roots)
