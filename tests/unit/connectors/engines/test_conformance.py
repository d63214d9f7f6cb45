"""The engine without a model keeps every promise, and an engine that breaks one is found by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.connectors.conformance import assert_conforms
from headrace.connectors.engines.conformance import conformance
from headrace.connectors.engines.engine import Generation, Request
from headrace.connectors.engines.scripted import ScriptedEngine


def test_the_scripted_engine_conforms() -> None:
    assert_conforms("engines", "scripted", {"mean_length": 12.0})


class Forward(ScriptedEngine):
    """Labels everything with the newest version."""

    def step(self) -> list[Generation]:
        return [replace(g, versions=np.full_like(g.versions, self.version)) for g in super().step()]


class Crowded(ScriptedEngine):
    """What it samples depends on who else is inside."""

    def add(self, request: Request) -> None:
        super().add(replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + self.active)))


class Ragged(ScriptedEngine):
    def step(self) -> list[Generation]:
        return [replace(g, logprobs=g.logprobs[:-1]) for g in super().step()]


class Clinging(ScriptedEngine):
    """Forgets to drop what it aborts."""

    def abort(self, key: int) -> Generation | None:
        return super().abort(key) if key > 1000 else Generation(key, "abort")


class Swallowing(ScriptedEngine):
    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **{**more, "max_prompt_tokens": 1 << 30})


class Early(ScriptedEngine):
    @property
    def version(self) -> int:
        return max(0, super().version)

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        super().load_weights(weights, version)


@pytest.mark.parametrize(
    ("cls", "broken", "says"),
    [
        (Forward, {"versions"}, "are labelled with one version"),
        (Crowded, {"seeds"}, "gives other tokens alone"),
        (Ragged, {"generations"}, "arrays of lengths"),
        (Clinging, {"abort"}, "ends once more"),
        (Swallowing, {"too_long"}, "is taken where 64 are allowed"),
        (Early, {"before_weights"}, "its version is 0, not -1"),
    ],
)
def test_a_broken_promise_is_found(cls: type[ScriptedEngine], broken: set[str], says: str) -> None:
    checks = conformance(f"{__name__}:{cls.__name__}", {"mean_length": 12.0})
    found = {check.name: check.detail for check in checks if not check.passed}
    assert broken <= set(found), found
    assert any(says in detail for detail in found.values()), found
