"""Environments written for Prime Intellect's ``verifiers``, behind one small Protocol whatever form they have.

In: a description, a small TOML file that names an installed environment package and its settings. Out: the rows of its
dataset, as a dataset plug-in gives them, and episodes that it plays against an OpenAI-compatible endpoint. Two forms
exist: packages with ``load_environment`` (verifiers up to 0.3, ``verifiers_classic``), and packages that export a
``Taskset`` (verifiers from 0.3 on, ``verifiers_tasksets``). verifiers itself is imported when a package is opened.
"""

import importlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.connectors.datasets.rows import Rows, TableRows
from headrace.schemas.errors import ConfigurationError

__all__ = (
    "COLUMN",
    "KEY_VARIABLE",
    "Description",
    "Package",
    "Played",
    "guarded",
    "open_package",
    "open_rows",
    "read_description",
)

COLUMN = "verifiers"
"""Column of a row that holds all that the environment needs to play it."""
KEY_VARIABLE = "CAPTURE_NEEDS_NO_KEY"
"""The environment variable in which the library looks for a key. It is not set: the key is part of the URL, and none of
the user's may be sent there."""


class Description(BaseModel):
    """The file that a stream names as its dataset and its workflow as its ``environment``; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: str
    """Name of the environment package, ``wordle`` or ``owner/wordle``."""
    split: Literal["train", "eval"] = "train"
    """Which of its two datasets, where it has two."""
    limit: int = Field(0, ge=0)
    """Rows used at most; 0: all. A taskset without end needs one."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of ``load_environment``; of a taskset the keys of its ``EnvConfig``, such as ``agent`` and
    ``taskset``."""

    @property
    def module(self) -> str:
        """Name of the module that the package installs."""
        return self.environment.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What an environment made of an episode: named rewards, figures for people, and why it counts nowhere."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    completion: str = ""
    error: str = ""


class Package(Protocol):
    """An environment package that has been opened."""

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Its dataset: what PromptDataset reads, and in ``COLUMN`` the row as ``play`` takes it."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """What has to run while episodes are played."""
        ...

    async def play(self, row: Mapping[str, Any], base_url: str) -> Played:
        """Play a row's episode with the policy behind an OpenAI-compatible URL, which needs no key, and score it."""
        ...


def read_description(path: Path) -> Description:
    """The description in a file. Raises ConfigurationError naming what is wrong in it."""
    try:
        return Description.model_validate(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ConfigurationError(f"cannot read the description {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}; a description names a verifiers package by "
                                 'environment = "NAME"') from error  # fmt: skip
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigurationError(f"{path}: {what}") from error


def open_package(description: Description) -> Package:
    """Import and make the environment. Raises ConfigurationError when verifiers or it is not there, or fails."""
    verifiers = _imported("verifiers", "it is optional: pip install verifiers")
    name = description.environment
    package = _imported(
        description.module, f"install the package of {name}, for this Python and its verifiers "
        f"{getattr(verifiers, '__version__', 'without a version')}",
    )  # fmt: skip
    with guarded(f"verifiers environment {name}"):
        if hasattr(package, "load_environment"):
            from headrace.connectors.verifiers_classic import ClassicPackage

            return ClassicPackage(verifiers, description)
        from headrace.connectors.verifiers_tasksets import TasksetPackage

        return TasksetPackage(description)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """The seam around packages, which may raise anything: it becomes a ConfigurationError that says in what."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{what}: {type(error).__name__}: {error}") from error


def _imported(module: str, advice: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{module} cannot be imported ({error}); {advice}") from error


def open_rows(path: Path) -> Rows:
    """The dataset plug-in ``verifiers``: the rows of the environment that a description names.

    Raises ConfigurationError as ``read_description`` and ``open_package`` do, and for an environment without rows.
    """
    description = read_description(path)
    rows = [json.loads(json.dumps(row, default=str)) for row in open_package(description).rows()]
    if not rows:
        raise ConfigurationError(f"{path}: environment {description.environment} has no {description.split} rows")
    return TableRows(f"{description.environment} ({description.split})", rows)
