"""The documentation describes the code that is here: generated parts, runnable snippets, links, names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.schemas.records import RECORD_TYPES
from headrace.schemas.topics import TOPICS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [path for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks") for path in sorted(folder.glob("*.md"))]
DOCUMENTS += sorted((ROOT / "recipes").rglob("*.md"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snippets(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, code) of the python blocks that are marked to be run."""
    text = path.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(# runnable\n.*?)^```", text, re.M | re.S):
        yield text[: block.start()].count("\n") + 1, block[1]


SNIPPETS = [pytest.param(code, id=f"{name_of(p)}:{line}") for p in DOCUMENTS for line, code in snippets(p)]


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_marked_runnable_runs(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_there_are_runnable_snippets_and_every_other_python_block_parses() -> None:
    assert len(SNIPPETS) >= 3
    for path in DOCUMENTS:
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S):
            compile(block, name_of(path), "exec")


def test_generated_parts_equal_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def all_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)


def test_every_topic_record_and_plugin_is_named() -> None:
    text = all_text()
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    wanted = [spec.name for spec in TOPICS] + list(RECORD_TYPES)
    wanted += [name for points in groups.values() for name in points] + list(groups)
    assert [name for name in wanted if not re.search(rf"`{re.escape(name)}[`.]", text)] == []


def test_every_environment_variable_is_described() -> None:
    used = {name for path in source_files() for name in re.findall(r"HEADRACE_[A-Z_]+[A-Z]", path.read_text("utf-8"))}
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert sorted(name for name in used if f"`{name}`" not in text) == []


def test_every_topic_stands_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [spec.name for spec in TOPICS if not re.search(rf"`{spec.name}[`.]", text)] == []


def anchors(text: str) -> set[str]:
    """The anchors that a renderer makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        assert file.exists(), f"{name_of(path)} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{name_of(path)} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_documents_name_exist(path: Path) -> None:
    """`schemas/topics.py` in a document is a file of the repository; so is every test it points to."""
    text = path.read_text(encoding="utf-8")
    folders = "schemas|connectors|pipeline|trainers|tests|docs|infra|recipes|benchmarks"
    named = re.findall(rf"`((?:{folders})/[\w./-]+?)(?:::(\w+))?`", text)
    for file, test in named:
        assert (ROOT / file).exists(), f"{name_of(path)} names {file}"
        if test:
            assert re.search(rf"\bdef {test}\b", (ROOT / file).read_text(encoding="utf-8")), f"{file} has no {test}"


PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def source_files() -> list[Path]:
    folders = ("schemas", "connectors", "pipeline", "trainers", "tests", "recipes", "benchmarks", "docs")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_code_cites_only_documents_and_protocol_sections_that_exist() -> None:
    sections = set(re.findall(r"^## (\d+)\.", PROTOCOL, re.M))
    wrong = []
    for path in source_files():
        text = path.read_text(encoding="utf-8")
        for cited in re.findall(r"\bprotocol (\d+(?:(?:, | and | to )\d+)*)", text):
            wrong += [f"{name_of(path)}: protocol {n}" for n in re.findall(r"\d+", cited) if n not in sections]
        wrong += [f"{name_of(path)}: {cited}" for cited in re.findall(r"\bdesign (?:section )?\d+\b", text)]
        if path != Path(__file__):
            for cited in re.findall(r"(?<![\w/*{}-])((?:\w[\w-]*/)*[\w-]+\.md)\b", text):
                if "/" not in cited and "tests" in path.parts:
                    continue  # a test may name a file that it makes
                found = [ROOT / cited, ROOT / "docs" / cited, path.parent / cited]
                wrong += [] if any(place.exists() for place in found) else [f"{name_of(path)}: {cited}"]
    assert not wrong
