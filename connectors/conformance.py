"""What a plug-in promises, tried on it: one ``Check`` for every promise, and one kit of checks for every kind.

A kit is a module with ``conformance(name, settings) -> list[Check]``; the kits stand beside the contracts that they
try, and only the one that is asked for is imported.

    from headrace.connectors.conformance import assert_conforms


    def test_my_loss_conforms() -> None:
        assert_conforms("losses", "my_package.loss:MyLoss", {"low": 0.2})
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.errors import ConfigurationError

__all__ = ("KITS", "Check", "assert_conforms", "attempt", "conformance")

KITS: Mapping[str, str] = {
    "operators": "headrace.pipeline.operator_conformance",
    "workflows": "headrace.pipeline.workflows.conformance",
    "environments": "headrace.pipeline.environments.conformance",
    "rewards": "headrace.pipeline.rewards.conformance",
    "losses": "headrace.trainers.losses.conformance",
    "advantages": "headrace.trainers.advantages.conformance",
    "engines": "headrace.connectors.engines.conformance",
    "datasets": "headrace.connectors.datasets.conformance",
}
"""Kind of plug-in to the module of its kit."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: whether it was kept, and what was seen."""

    name: str
    passed: bool
    detail: str


def attempt(name: str, trial: Callable[[], str]) -> Check:
    """Try a promise: ``trial`` says what it saw, or raises with what was wrong (AssertionError with words of ours)."""
    try:
        return Check(name, True, trial())
    except ConfigurationError:  # the settings' fault: nothing has been tried
        raise
    except AssertionError as error:
        return Check(name, False, str(error))
    except Exception as error:  # the seam around plug-ins on trial, which may raise anything
        return Check(name, False, f"raised {type(error).__name__}: {error}")


def conformance(kind: str, name: str, settings: Mapping[str, Any] | None = None, **more: Any) -> list[Check]:
    """Try a plug-in by its name or ``module:attribute``. Raises ConfigurationError for an unknown kind, name or key."""
    if kind not in KITS:
        raise ConfigurationError(f"{kind!r} has no conformance kit; these have: {', '.join(KITS)}")
    checks: list[Check] = importlib.import_module(KITS[kind]).conformance(name, settings or {}, **more)
    return checks


def assert_conforms(kind: str, name: str, settings: Mapping[str, Any] | None = None, **more: Any) -> None:
    """``conformance`` for a test: AssertionError with every promise that was not kept."""
    broken = [f"{c.name}: {c.detail}" for c in conformance(kind, name, settings, **more) if not c.passed]
    if broken:
        raise AssertionError(f"{name} does not conform:\n  " + "\n  ".join(broken))
