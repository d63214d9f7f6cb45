"""The one way to try a plug-in of any kind, and what a trial makes of errors."""

from __future__ import annotations

import pytest

from headrace.connectors.conformance import KITS, assert_conforms, attempt, conformance
from headrace.schemas.errors import ConfigurationError


def test_what_a_trial_raises_is_a_broken_promise_with_its_words() -> None:
    def broken() -> str:
        raise AssertionError("it is 3, not 2")

    def crash() -> str:
        raise ZeroDivisionError("nothing")

    def misled() -> str:
        raise ConfigurationError("no such key")

    assert (attempt("x", lambda: "seen").passed, attempt("x", lambda: "seen").detail) == (True, "seen")
    assert (attempt("x", broken).passed, attempt("x", broken).detail) == (False, "it is 3, not 2")
    assert attempt("x", crash).detail == "raised ZeroDivisionError: nothing"
    with pytest.raises(ConfigurationError, match="no such key"):
        attempt("x", misled)


def test_a_kind_without_a_kit_and_a_name_that_there_is_not_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'backends' has no conformance kit"):
        conformance("backends", "torch")
    for kind in KITS:
        with pytest.raises(ConfigurationError, match=rf"headrace.{kind} has no 'nothing_of_this_name'"):
            conformance(kind, "nothing_of_this_name", {"path": __file__} if kind == "datasets" else {})


def test_assert_conforms_says_every_broken_promise() -> None:
    with pytest.raises(AssertionError, match=r"(?s)test_conformance:nan does not conform:.*finite: "):
        assert_conforms("rewards", f"{__name__}:nan")


def nan(prompt: object, completion: object) -> float:
    return float("nan")
