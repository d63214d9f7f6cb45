"""Every rule that the stages own is needed: with the rule switched off, some run violates an invariant."""

from __future__ import annotations

import flow_world
import pytest
from flow_check import violations
from flow_mutants import MUTANTS
from flow_world import World

PLANS = {
    "edf": "tight_plan", "fresh_b": "replay_plan", "read_first": "stuck_plan", "grace": "outage_plan",
    "all_reported": "hanging_plan", "recount": "rollback_plan",
}  # fmt: skip

LIKELY = {"edf": 8, "sync_a": 4, "room_only": 17, "recount": 5, "floor": 11, "incarnation": 6, "grace": 11}
"""Where to look first."""


@pytest.mark.parametrize("rule", MUTANTS)
def test_without_the_rule_an_invariant_breaks(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[rule](monkeypatch)
    make = getattr(flow_world, PLANS.get(rule, "random_plan"))
    for seed in (LIKELY.get(rule, 0), *range(80)):
        plan = make(seed)
        plan.limit_ms = 600_000
        if violations(World(plan).play()):
            return
    pytest.fail(f"80 runs without the rule {rule} broke nothing")
