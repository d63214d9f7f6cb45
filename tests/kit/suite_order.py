"""In which order several test processes take the suite, so that they share the machine evenly and end together.

A whole run keeps a core busy and a test of a broker mostly waits: taken folder by folder, the machine would be short of
cores first and idle later. So whole runs and tests of brokers are dealt out side by side, the long ones first, and the
many short files come last. A file stays with one process, for the fixtures that its tests share, unless each of its
tests is a whole run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

RUNS = ("tests/chaos/", "tests/e2e/", "tests/unit/connectors/engines/test_contract.py",
        "tests/unit/connectors/engines/test_vllm_weights.py")  # fmt: skip
WAITS = ("tests/contract/",)
LONG = (
    "tests/chaos/test_run_chaos.py",
    "tests/e2e/test_recipe_stops.py",
    "tests/e2e/test_recipe_kills.py",
    "tests/e2e/test_recipe.py",
    "tests/e2e/test_one_seed_one_run.py",
    "tests/e2e/test_team_recipes.py",
    "tests/unit/connectors/engines/test_contract.py",
    "tests/e2e/test_trainer.py",
    "tests/e2e/test_launchers.py",
    "tests/e2e/test_sample_operator.py",
    "tests/e2e/test_from_log.py",
    "tests/contract/test_rollout_scale.py",
    "tests/contract/test_prompt_source.py",
    "tests/contract/test_nodes.py",
    "tests/contract/test_rollout_faults.py",
    "tests/contract/test_partial_rollouts.py",
    "tests/contract/test_agents_worker.py",
    "tests/contract/test_runtime_faults.py",
    "tests/contract/test_broker_faults.py",
    "tests/contract/test_secure.py",
    "tests/contract/test_secure_compose.py",
    "tests/contract/test_registry.py",
)
"""Of each kind those that take longest, the longest first."""
ALONE = frozenset(
    {
        "tests/chaos/test_run_chaos.py",
        "tests/e2e/test_recipe.py",
        "tests/e2e/test_recipe_stops.py",
        "tests/e2e/test_one_seed_one_run.py",
        "tests/e2e/test_team_recipes.py",
        "tests/e2e/test_launchers.py",
        "tests/contract/test_rollout_scale.py",
        "tests/contract/test_nodes.py",
    }
)
"""Files whose tests need not stay together."""


def unit_of(nodeid: str) -> str:
    """What stays with one process: a test's file, or the test itself."""
    file = nodeid.split("::", 1)[0]
    return nodeid if file in ALONE else file


def ordered(nodeids: Iterable[str]) -> list[str]:
    """Test ids in the order in which their units should be begun."""
    units: dict[str, list[str]] = {}
    for nodeid in nodeids:
        units.setdefault(unit_of(nodeid), []).append(nodeid)
    runs = _longest_first(unit for unit in units if unit.startswith(RUNS))
    waits = _longest_first(unit for unit in units if unit.startswith(WAITS))
    dealt = sorted(((n + 0.5) / len(kind), unit) for kind in (runs, waits) for n, unit in enumerate(kind))
    beside = [unit for _, unit in dealt]
    rest = [unit for unit in units if unit not in set(beside)]
    return [nodeid for unit in (*beside, *rest) for nodeid in units[unit]]


def _longest_first(units: Iterable[str]) -> list[str]:
    """Units of files in LONG before the others; otherwise as they came."""
    rank = {file: number for number, file in enumerate(LONG)}
    return sorted(units, key=lambda unit: rank.get(unit.split("::", 1)[0], len(LONG)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of one of several test processes into that order; a process alone keeps its own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {nodeid: number for number, nodeid in enumerate(ordered(item.nodeid for item in items))}
        items.sort(key=lambda item: place[item.nodeid])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """The scheduler of ``--dist loadfile`` with units as above; None for every other."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class ByUnit(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return ByUnit(config, log)
