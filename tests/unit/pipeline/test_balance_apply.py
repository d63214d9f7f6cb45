"""Acting on a report: bounds hold, the cool-down is kept, a command gets the figures, a broken one says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.balance import BalanceReport, Branch
from headrace.pipeline.balance_apply import Bounds, Command, Scaler
from headrace.schemas.errors import ConfigurationError


def report(size: int, target: int, branch: Branch = "grow") -> BalanceReport:
    return BalanceReport(
        since_ms=0, until_ms=1, size=size, branch=branch, target=target, wait_share=0, busy_share=1, entered=0,
        consumed=0,
    )  # fmt: skip


class Pool:
    """An actuator that remembers, and a clock that is set."""

    def __init__(self, bounds: Bounds, error: str = "") -> None:
        self.calls: list[tuple[int, int, str]] = []
        self.now, self.error = 0.0, error
        self.scaler = Scaler(self._act, bounds, lambda: self.now)

    def _act(self, size: int, target: int, branch: str) -> str:
        self.calls.append((size, target, branch))
        return self.error


@given(
    size=st.integers(0, 50), target=st.integers(0, 200), least=st.integers(0, 10), more=st.integers(0, 40),
    step=st.integers(0, 5),
)  # fmt: skip
def test_bounds_hold_whatever_is_wanted(size: int, target: int, least: int, more: int, step: int) -> None:
    bounds = Bounds(least=least, most=least + more, step=step)
    wanted = bounds.within(size, target)
    assert wanted >= least and (wanted <= least + more or not bounds.most)
    if step and least <= size <= least + more:
        assert abs(wanted - size) <= step


def test_it_acts_once_within_the_cool_down_and_again_after_it() -> None:
    pool = Pool(Bounds(most=20, cool_down_seconds=300))
    assert pool.scaler.consider(report(6, 8)) == "grow from 6 to 8"
    pool.now = 299
    assert pool.scaler.consider(report(6, 9)) == "cools down for 1 s more"
    pool.now = 300
    assert pool.scaler.consider(report(8, 5, "shrink")) == "shrink from 8 to 5"
    assert pool.calls == [(6, 8, "grow"), (8, 5, "shrink")]


def test_holding_calls_nothing_and_starts_no_cool_down() -> None:
    pool = Pool(Bounds())
    assert pool.scaler.consider(report(6, 6, "hold")) == "hold"
    assert pool.scaler.consider(report(6, 7)) == "grow from 6 to 7"


def test_at_a_bound_it_says_so() -> None:
    pool = Pool(Bounds(most=6))
    assert pool.scaler.consider(report(6, 160)) == "grow to 160 is outside the bounds"
    assert pool.calls == []


def test_a_pool_outside_its_bounds_is_brought_back_even_while_the_report_holds() -> None:
    pool = Pool(Bounds(least=4))
    assert pool.scaler.consider(report(2, 2, "hold")) == "grow from 2 to 4"


def test_bounds_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="least size 5 is above its largest 3"):
        Pool(Bounds(least=5, most=3))


def test_a_failed_command_is_told_and_tried_again_after_the_cool_down() -> None:
    pool = Pool(Bounds(cool_down_seconds=10), error="quota")
    assert pool.scaler.consider(report(1, 2)) == "failed: quota"
    assert pool.scaler.consider(report(1, 2)).startswith("cools down")
    pool.now = 10
    pool.scaler.consider(report(1, 2))
    assert len(pool.calls) == 2


def test_a_command_gets_the_figures_and_no_shell(tmp_path: Path) -> None:
    out = tmp_path / "out file"
    code = "import sys; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:]))"
    command = Command(f"{sys.executable} -c \"{code}\" '{out}' {{size}} {{target}} {{delta}} {{branch}} '$HOME;x'")
    assert command(6, 8, "grow") == ""
    assert out.read_text() == "6 8 +2 grow $HOME;x"
    assert command(8, 3, "shrink") == ""
    assert out.read_text() == "8 3 -5 shrink $HOME;x"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{sys.executable} -c \"import sys; sys.exit('no quota')\"", "ended with 1: no quota"),
        ("/no/such/command {target}", "/no/such/command 2: No such file"),
        (f'{sys.executable} -c "import time; time.sleep(60)"', "did not end within 0.5 s"),
    ],
)
def test_what_goes_wrong_is_said(line: str, said: str) -> None:
    assert said in Command(line, timeout_seconds=0.5 if "sleep" in line else 30)(1, 2, "grow")


@pytest.mark.parametrize("line", ["", "   ", "'unclosed"])
def test_a_line_that_is_no_command_is_refused(line: str) -> None:
    with pytest.raises(ConfigurationError, match="--apply"):
        Command(line)


def test_a_pool_without_reports_is_brought_back_to_its_least_size() -> None:
    pool = Pool(Bounds(least=2, cool_down_seconds=300))
    assert pool.scaler.keep(1) == "", "it may be starting"
    pool.now = 200
    assert pool.scaler.keep(2) == "" and pool.scaler.keep(0) == "", "it was whole meanwhile"
    pool.now = 499
    assert pool.scaler.keep(0) == "" and pool.calls == []
    pool.now = 500
    assert pool.scaler.keep(0) == "grow from 0 to 2"
    pool.now = 799
    assert pool.scaler.keep(0) == "" and pool.scaler.consider(report(0, 2)).startswith("cools down")
    pool.now, pool.error = 800, "no quota"
    assert pool.scaler.keep(0) == "failed: no quota" and pool.calls == [(0, 2, "grow")] * 2
