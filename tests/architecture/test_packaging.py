"""What is built is what lies in the tree: the package list, the wheel and the sdist hold every module and schema."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "connectors", "pipeline", "trainers")


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def repository_files() -> list[str]:
    """Files of the repository, with those not committed yet, without ignored ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def source_files() -> list[str]:
    return [name for name in repository_files() if name.split("/")[0] in FOLDERS]


def test_the_package_list_equals_the_tree() -> None:
    settings = project()["tool"]["setuptools"]  # type: ignore[index]
    folders = {str(Path(name).parent) for name in source_files() if name.endswith(".py")}
    expected = {"headrace", *("headrace." + folder.replace("/", ".") for folder in folders)}
    assert set(settings["packages"]) == expected
    assert len(settings["packages"]) == len(expected), "a package is listed twice"


def test_every_package_folder_has_an_init_file() -> None:
    files = set(source_files())
    missing = {str(Path(n).parent) for n in files if n.endswith(".py") and f"{Path(n).parent}/__init__.py" not in files}
    assert not missing


def test_links_lead_to_the_four_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "headrace" / folder
        assert link.is_symlink() and link.readlink() == Path("../..") / folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dist folder of a build made from a copy of the repository's files (sdist, then the wheel from the sdist)."""
    copy = tmp_path_factory.mktemp("build") / "copy"
    for name in repository_files():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"],
        cwd=copy, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return copy / "dist"


def package_files() -> set[str]:
    """Names that an installed package must hold: modules, and every data file beside them that is not prose."""
    return {f"headrace/{name}" for name in source_files() if not name.endswith((".md", ".gitkeep"))}


def test_the_wheel_holds_every_file_of_the_source_folders_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = package_files() | {"headrace/__init__.py", "headrace/py.typed"}
    assert expected - names == set(), "in the tree, absent from the wheel"
    assert names - expected == set(), "in the wheel, absent from the tree"


def test_the_sdist_can_be_built_from(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "README.md"} <= names


def test_the_installed_wheel_imports_and_names_its_command(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import importlib, sys, pathlib\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "import headrace\n"
        "assert pathlib.Path(headrace.__file__).is_relative_to(root), headrace.__file__\n"
        "for path in sorted((root / 'headrace').rglob('*.py')):\n"
        "    parts = path.relative_to(root).with_suffix('').parts\n"
        "    if parts[-1] != '__main__':\n"
        "        importlib.import_module('.'.join(parts[:-1] if parts[-1] == '__init__' else parts))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (entry_points,) = tmp_path.glob("*.dist-info/entry_points.txt")
    assert "headrace = headrace.pipeline.cli.main:main" in entry_points.read_text()


def test_every_entry_point_leads_to_something() -> None:
    import importlib

    groups = project()["project"]["entry-points"]  # type: ignore[index]
    for group, points in groups.items():
        for name, target in points.items():
            module, _, attribute = target.partition(":")
            found = importlib.import_module(module)
            assert hasattr(found, attribute), f"{group}: {name} = {target} names nothing"
