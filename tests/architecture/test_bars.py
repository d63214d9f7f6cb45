"""The shape of the code stays within its bars, and the script that measures it sees each kind of fault."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("bars.py")


@pytest.fixture(scope="module")
def bars() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture_bars", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_the_code_is_within_its_bars(bars: ModuleType) -> None:
    figures, notes = bars.measure()
    print(bars.table(figures, notes))
    assert not bars.missed_bars(figures), "\n" + bars.table(figures, notes)


def tree(root: Path, **modules: str) -> Path:
    """A source tree under root with the given texts as schemas/NAME.py."""
    for folder in ("schemas", "tests"):
        (root / folder).mkdir()
    for name, text in modules.items():
        (root / "schemas" / f"{name}.py").write_text(text, encoding="utf-8")
    return root


CLEAN = '"""What it is."""\n\n\ndef double(value: int) -> int:\n    """Twice the value."""\n    return 2 * value\n'


def test_clean_code_misses_only_the_test_ratio(bars: ModuleType, tmp_path: Path) -> None:
    figures, _ = bars.measure(tree(tmp_path, clean=CLEAN))
    assert bars.missed_bars(figures) == ["test lines per source line"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("typed %", CLEAN.replace("value: int", "value")),
        ("typed %", CLEAN.replace(" -> int", "")),
        ("public docstrings %", CLEAN.replace('    """Twice the value."""\n', "")),
        ("module docstrings %", CLEAN.replace('"""What it is."""\n', "")),
        ("global statements", CLEAN + "\n\ndef _set() -> None:\n    global state\n    state = 1\n"),
        ("broad excepts per kLOC", CLEAN + "\ntry:\n    double(1)\nexcept (ValueError, Exception):\n    pass\n"),
        ("broad excepts per kLOC", CLEAN + "\ntry:\n    double(1)\nexcept:\n    pass\n"),
        ("function max", CLEAN.replace("    return", "    value += 1\n" * 120 + "    return")),
        ("module max", CLEAN + "VALUE = 1\n" * 700),
    ],
)
def test_each_fault_misses_its_bar(bars: ModuleType, tmp_path: Path, name: str, text: str) -> None:
    figures, _ = bars.measure(tree(tmp_path, faulty=text))
    assert name in bars.missed_bars(figures)


def test_modules_that_import_each_other_are_a_cycle(bars: ModuleType, tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        first='"""First."""\nfrom headrace.schemas import second\n',
        second='"""Second."""\nfrom headrace.schemas.first import x\n',
        third='"""Third."""\ndef f() -> None:\n    """Late."""\n    import headrace.schemas.first\n',
    )
    assert bars.import_cycles(root) == [["headrace.schemas.first", "headrace.schemas.second"]]


def test_a_block_that_stands_twice_is_named_once_with_its_length(bars: ModuleType) -> None:
    block = "".join(f"total_{number} = compute({number})\n" for number in range(8))
    files = [("a.py", f"x = 1\n{block}y = 2\n"), ("b.py", f"# a comment\n\n{block.replace(' = ', '  =  ')}z = 3\n")]
    assert bars.duplicated_blocks(files) == ["8 lines: a.py:2 ~ b.py:3"]


def test_imports_comments_interfaces_and_short_runs_are_no_duplicates(bars: ModuleType) -> None:
    imports = "".join(f"import module_{number}\n" for number in range(9))
    fields = "class A:\n" + "".join(f"    field_{number}: int\n" for number in range(9))
    signature = "@click\ndef f(\n" + "".join(f"    x{number}: int = 1,\n" for number in range(9)) + ") -> None:\n"
    short = "".join(f"    total_{number} = {number}\n" for number in range(3))
    text = f'"""Words."""\n{imports}# words\n{fields}{signature}    """Words."""\n{short}'
    files = [(name, f"{text}    {name[0]} = 1\n") for name in ("a.py", "b.py")]
    assert bars.duplicated_blocks(files) == []
