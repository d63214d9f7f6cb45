"""The files of a new operator's package: what ``headrace operators new`` writes.

In: a name and a kind. Out: a package that installs by pip, names its entry point, passes every group on, and has the
tests that it must go on passing.
"""

import keyword
import re
from pathlib import Path

from headrace.schemas.errors import ConfigurationError

__all__ = ("write_package",)

PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "headrace-{dashed}"
version = "0.1.0"
description = "The operator {name} for headrace"
requires-python = ">=3.11"
dependencies = ["headrace"]

[project.optional-dependencies]
dev = ["pytest>=8"]

[project.entry-points."headrace.operators"]
{name} = "headrace_{name}.operator:{cls}"

[tool.setuptools.packages.find]
where = ["src"]
"""

OPERATOR = '''"""What {name} does to a group, with its formula and its source."""

from typing import ClassVar

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("{cls}", "{cls}Configuration")


class {cls}Configuration(OperatorConfiguration):
    """The keys of its `[[operators]]` entry, with defaults."""


class {cls}:
    """Passes every group on."""

    kind: ClassVar[Kind] = "{kind}"
    Configuration: ClassVar[type[OperatorConfiguration]] = {cls}Configuration

    def __init__(self, configuration: {cls}Configuration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Read what the store remembers."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """End the group by `context.emit(draft)` or `context.drop("a_reason", "the numbers that decided it")`."""
        context.emit(record)

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """A timer of `context.schedule` is due."""

    def close(self) -> None:
        """Let go of what `open` took."""
'''

TEST = '''"""The operator keeps what every operator must keep."""

from headrace.pipeline.operator_conformance import assert_conforms


def test_it_decides_the_same_each_time_and_after_every_restart() -> None:
    assert_conforms("headrace_{name}.operator:{cls}")
'''

README = """# {name}

An operator for headrace. In this folder:

```sh
pip install -e .[dev]
pytest
headrace operators test {name}
```

In a run's TOML:

```toml
[[operators]]
type = "{name}"
```
"""


def write_package(name: str, kind: str, folder: Path) -> list[Path]:
    """Write the package into ``folder`` and give the files.

    Raises ConfigurationError for a name that is no Python name in small letters and for a folder that holds something.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} is no name for an operator: small letters, digits and _, such as my_filter")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is there and not empty; name another by --folder")
    words = {
        "name": name,
        "cls": "".join(part.capitalize() for part in name.split("_")),
        "dashed": name.strip("_").replace("_", "-"),
        "kind": kind,
    }
    module = folder / "src" / f"headrace_{name}"
    texts = {
        folder / "pyproject.toml": PYPROJECT,
        folder / "README.md": README,
        module / "__init__.py": '"""The operator {name} for headrace."""\n',
        module / "operator.py": OPERATOR,
        folder / "tests" / f"test_{name}.py": TEST,
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**words), "utf-8")
    return list(texts)
