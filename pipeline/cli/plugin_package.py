"""The files of a new plug-in's package: what ``headrace operators new``, ``headrace losses new`` and so on write.

In: a kind and a name. Out: a package that installs by pip, names its entry point, does the least that its contract asks
for, and has the tests that it must go on passing.
"""

import keyword
import re
from pathlib import Path
from string import Template

from headrace.pipeline.cli.operator_templates import OPERATORS
from headrace.pipeline.cli.plugin_templates import PLUGINS
from headrace.schemas.errors import ConfigurationError

__all__ = ("singular", "write_package")

PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "headrace-$dashed"
version = "0.1.0"
description = "The $one $name for headrace"
requires-python = ">=3.11"
dependencies = ["$needs"]

[project.optional-dependencies]
dev = ["pytest>=8"]

[project.entry-points."headrace.$kind"]
$name = "headrace_$name.$one:$object"

[tool.setuptools.packages.find]
where = ["src"]
"""

README = """# $name

One $one for headrace. In this folder:

```sh
pip install -e .[dev]
pytest
headrace $kind test $name$settings
```

In a run's TOML:

```toml
$toml
```
"""


def singular(kind: str) -> str:
    """One plug-in of a kind.

    >>> singular("losses"), singular("engines")
    ('loss', 'engine')
    """
    return kind.removesuffix("es" if kind == "losses" else "s")


def write_package(kind: str, name: str, folder: Path, *, operator_kind: str = "filter") -> list[Path]:
    """Write the package into ``folder`` and give the files; ``operator_kind`` says what a new operator does.

    Raises ConfigurationError for a name that is no Python name in small letters and for a folder that holds something.
    """
    one = singular(kind)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} is no name for a plug-in: small letters, digits and _, such as my_{one}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is there and not empty; name another by --folder")
    template = OPERATORS[operator_kind] if kind == "operators" else PLUGINS[kind]
    cls = "".join(part.capitalize() for part in name.split("_"))
    words = {
        "name": name, "cls": cls, "kind": kind, "one": one, "dashed": name.strip("_").replace("_", "-"),
        "object": name if template.is_function else cls, "needs": template.needs, "settings": template.settings,
        "operator_kind": operator_kind,
    }  # fmt: skip
    words["toml"] = Template(template.toml).substitute(words)
    module = folder / "src" / f"headrace_{name}"
    texts = {
        folder / "pyproject.toml": PYPROJECT,
        folder / "README.md": README,
        module / "__init__.py": '"""The $one $name for headrace."""\n',
        module / f"{one}.py": template.code,
        folder / "tests" / f"test_{name}.py": template.test,
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(words), "utf-8")
    return list(texts)
