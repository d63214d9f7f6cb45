"""The order of the suite for several test processes names files that exist and loses no test."""

from pathlib import Path

import suite_order

ROOT = Path(__file__).resolve().parents[2]
IDS = [
    "src/headrace/a.py::headrace.a",
    "tests/chaos/test_broker_chaos.py::test_a",
    "tests/chaos/test_run_chaos.py::test_a[local]",
    "tests/chaos/test_run_chaos.py::test_a[kafka]",
    "tests/contract/test_groups.py::test_a",
    "tests/contract/test_groups.py::test_b",
    "tests/contract/test_secure.py::test_a",
    "tests/contract/test_stores.py::test_a",
    "tests/unit/test_a.py::test_a",
]


def test_every_file_that_it_names_exists() -> None:
    named = {*suite_order.LONG, *suite_order.ALONE, *suite_order.RUNS, *suite_order.WAITS}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_test_is_taken_once_and_files_stay_whole() -> None:
    order = suite_order.ordered(reversed(IDS))
    assert sorted(order) == sorted(IDS)
    units = [suite_order.unit_of(nodeid) for nodeid in order]
    begun = [unit for number, unit in enumerate(units) if unit not in units[:number]]
    assert units == [unit for unit in begun for _ in range(units.count(unit))], "a unit is in pieces"


def test_runs_and_brokers_go_side_by_side_the_long_ones_first_and_short_files_last() -> None:
    order = suite_order.ordered(IDS)
    assert order[-2:] == ["src/headrace/a.py::headrace.a", "tests/unit/test_a.py::test_a"]
    kinds = [nodeid.split("/")[1] for nodeid in order[:-2]]
    assert kinds == ["chaos", "contract", "chaos", "contract", "contract", "chaos", "contract"]
    assert order[1].startswith("tests/contract/test_secure.py"), "the long one of its kind is first"
