"""An operator before rollout that breaks a promise is found by name."""

from __future__ import annotations

import pytest

from headrace.pipeline.operator_conformance import conformance


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("Passing", set(), ""),
        ("Forgetful", {"restart"}, "gives other records from the"),
        ("Random", {"determinism", "transactions", "restart"}, "gives other records"),
        ("Rewriting", {"state", "restart"}, "open changes the state that it reads"),
        ("Hoarding", {"bounded_state"}, "bytes after 14 prompts"),
        ("Nameless", {"reasons"}, "is no reason in words with its numbers"),
        ("Raising", {"endings"}, "14 calls raised or ended nothing; first: prompt-0: raised ZeroDivisionError"),
        ("RaisingLater", {"endings"}, "while it learned"),
        ("Undecided", {"endings"}, "neither admitted nor dropped the prompt"),
        ("Twice", {"endings"}, "ended one prompt twice"),
    ],
)
def test_a_broken_promise_is_found(name: str, broken: set[str], says: str) -> None:
    checks = conformance(f"broken_prompt_operators:{name}", groups=14)
    found = {check.name: check.detail for check in checks if not check.passed}
    assert set(found) == broken
    assert not broken or any(says in detail for detail in found.values()), found
