"""Every shipped advantage keeps every promise, and one that breaks a promise is found by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.connectors.conformance import assert_conforms
from headrace.connectors.plugins import installed
from headrace.trainers.advantages.advantage import (
    AddUp,
    AdvantageOptions,
    GroupRewards,
    Needs,
    Scored,
    TokenAdvantages,
)
from headrace.trainers.advantages.conformance import conformance

SHIPPED = [name for name, entry in installed("headrace.advantages").items() if entry.value.startswith("headrace.")]
SETTINGS: dict[str, dict[str, Any]] = {"remax": {"baseline": "reward"}}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_advantage_conforms(name: str) -> None:
    assert_conforms("advantages", name, SETTINGS.get(name))


class Fine:
    """The distance to the mean."""

    Options: ClassVar[type[AdvantageOptions]] = AdvantageOptions

    def __init__(self, options: AdvantageOptions) -> None:
        self.calls = 0

    def __call__(self, group: GroupRewards) -> list[float]:
        return [reward - group.mean for reward in group.rewards]


class Short(Fine):
    def __call__(self, group: GroupRewards) -> list[float]:
        return super().__call__(group)[:1]


class Dividing(Fine):
    def __call__(self, group: GroupRewards) -> list[float]:
        with np.errstate(all="ignore"):
            return list((np.array(group.rewards) - group.mean) / group.std)


class Placed(Fine):
    def __call__(self, group: GroupRewards) -> list[float]:
        return [reward - at for at, reward in enumerate(group.rewards)]


class Counting(Fine):
    def __call__(self, group: GroupRewards) -> list[float]:
        self.calls += 1
        return [reward + self.calls for reward in group.rewards]


class FineBatch(Fine):
    """The distance to the mean of the batch."""

    needs = Needs()

    def total(self, members: Sequence[Scored], add_up: AddUp) -> dict[str, float]:
        return add_up({"sum": sum(m.reward for m in members), "count": float(len(members))})

    def of_batch(self, members: Sequence[Scored], add_up: AddUp) -> list[TokenAdvantages]:
        total = self.total(members, add_up)
        mean = total["sum"] / total["count"]
        return [TokenAdvantages(advantages=[np.where(mask, m.reward - mean, 0.0) for mask in m.masks]) for m in members]


class Selfish(FineBatch):
    """Takes the mean of its own rank."""

    def total(self, members: Sequence[Scored], add_up: AddUp) -> dict[str, float]:
        super().total(members, add_up)
        return super().total(members, dict)


class Spilling(FineBatch):
    def of_batch(self, members: Sequence[Scored], add_up: AddUp) -> list[TokenAdvantages]:
        self.total(members, add_up)
        return [TokenAdvantages(advantages=[np.ones(mask.shape) for mask in m.masks]) for m in members]


@pytest.mark.parametrize(
    ("cls", "broken", "says"),
    [
        (Fine, set(), ""),
        (Short, {"values"}, "1 values for 4 members"),
        (Dividing, {"values"}, "give ["),
        (Placed, {"order"}, "other values in another order"),
        (Counting, {"determinism"}, "called again it gives other values"),
        (FineBatch, set(), ""),
        (Selfish, {"ranks"}, "when its batch is on two ranks"),
        (Spilling, {"values"}, "an advantage outside the mask is not 0"),
    ],
)
def test_a_broken_promise_is_found(cls: type[Fine], broken: set[str], says: str) -> None:
    checks = conformance(f"{__name__}:{cls.__name__}", {})
    found = {check.name: check.detail for check in checks if not check.passed}
    assert broken <= set(found) and bool(found) == bool(broken), found
    assert not broken or any(says in detail for detail in found.values()), found
