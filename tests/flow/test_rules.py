"""Every rule of the protocol's model is needed: switched off in the real code, some run breaks an invariant.

``RULES`` is the table of docs/protocol.md: the model's 21 rules with the runs that show each of them. Rules of the
stages are played on the TopologyDriver, those of trainers and rollout workers on the simulated cluster.
"""

from __future__ import annotations

import re
from pathlib import Path

import flow_world
import pytest
import sim_plans
from flow_check import violations
from flow_mutants import MUTANTS
from flow_world import World
from sim_mutants import SIM_MUTANTS
from sim_world import ClusterWorld

RULES = {
    "count_batched": ("random_plan", 0),
    "fresh_b": ("replay_plan", 0),
    "edf": ("tight_plan", 8),
    "opened_first": ("random_plan", 0),
    "sync_a": ("random_plan", 4),
    "first_end": ("random_plan", 39),
    "room_only": ("random_plan", 17),
    "late_step": ("racing_plan", 0),
    "fence_first": ("racing_plan", 0),
    "prove": ("racing_plan", 0),
    "lineage": ("returning_plan", 1),
    "recount": ("rollback_plan", 5),
    "floor": ("random_plan", 11),
    "incarnation": ("random_plan", 6),
    "late_admission": ("random_plan", 0),
    "failed_record": ("losing_plan", 1),
    "all_reported": ("hanging_plan", 0),
    "read_first": ("stuck_plan", 0),
    "grace": ("outage_plan", 11),
    "ended_mark": ("late_plan", 0),
    "end_in_ledger": ("random_plan", 0),
}
"""Rule, as the model names it, to the plans that show it and the seed that is tried first."""

SEEDS = 80


def breaches(plan: str, seed: int, folder: Path) -> list[str]:
    """What a run of this plan breaks."""
    if hasattr(flow_world, plan):
        made = getattr(flow_world, plan)(seed)
        made.limit_ms = 600_000
        return violations(World(made).play())
    return ClusterWorld(getattr(sim_plans, plan)(seed, str(folder / str(seed)))).play().violations()


@pytest.mark.parametrize("rule", RULES)
def test_without_the_rule_an_invariant_breaks(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, likely = RULES[rule]
    (MUTANTS[rule] if rule in MUTANTS else SIM_MUTANTS[rule][0])(monkeypatch)
    for seed in (likely, *range(SEEDS)):
        if breaches(plan, seed, tmp_path):
            return
    pytest.fail(f"{SEEDS} runs without the rule {rule} broke nothing")


@pytest.mark.parametrize("rule", ["late_step", "lineage", "failed_record", "first_end", "ended_mark"])
def test_with_the_rule_the_same_run_breaks_nothing(rule: str, tmp_path: Path) -> None:
    assert breaches(*RULES[rule], tmp_path) == []


def test_every_rule_has_a_mutant_and_a_row_in_the_documentation() -> None:
    assert len(RULES) == 21
    assert set(RULES) == set(MUTANTS) | set(SIM_MUTANTS)
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| `(\w+)` \|$", page, re.MULTILINE))
    assert rows == {rule: plan for rule, (plan, _) in RULES.items()}
