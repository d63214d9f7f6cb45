"""Marks tell a successor from everybody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.connectors.marks import Mark
from headrace.schemas.errors import Superseded


def test_a_mark_survives_metadata() -> None:
    assert Mark.parse(str(Mark("ops-0", 17))) == Mark("ops-0", 17)


@pytest.mark.parametrize("text", [None, "", "7", "hr1 a", "hr1 a b", "hr2 a 7", "hr1 a 7 8", "hr1 a ²", "hr1 a -7"])
def test_foreign_metadata_is_no_mark(text: str | None) -> None:
    assert Mark.parse(text) is None


def test_incarnations_grow_with_the_clock_and_with_what_was_seen() -> None:
    assert Mark.next("a", [], 1000) == Mark("a", 1000)
    assert Mark.next("a", [Mark("a", 1000), None], 900) == Mark("a", 1001)
    assert Mark.next("a", [Mark("b", 5000)], 900) == Mark("a", 900)


def test_only_a_later_process_of_the_same_instance_supersedes() -> None:
    mark = Mark("a", 10)
    mark.refuse_successor([None, Mark("a", 10), Mark("a", 3), Mark("b", 99)])
    with pytest.raises(Superseded, match="incarnation 11"):
        mark.refuse_successor([Mark("a", 11)])


@given(
    instance=st.text("abc-0", min_size=1, max_size=5),
    seen=st.lists(st.none() | st.builds(Mark, st.sampled_from(["a", "b", "abc"]), st.integers(0, 10**13)), max_size=6),
    now_ms=st.integers(0, 10**13),
)
def test_the_next_mark_supersedes_every_mark_seen_of_its_instance_and_no_other(
    instance: str, seen: list[Mark | None], now_ms: int
) -> None:
    fresh = Mark.next(instance, seen, now_ms)
    fresh.refuse_successor(seen)
    assert fresh.incarnation >= now_ms
    assert Mark.parse(str(fresh)) == fresh
    for mark in seen:
        if mark is None:
            continue
        if mark.instance == instance:
            with pytest.raises(Superseded):
                mark.refuse_successor([fresh])
        else:
            mark.refuse_successor([fresh])


@given(st.text(max_size=30) | st.builds("hr1 {} {}".format, st.text(max_size=5), st.text(max_size=5)))
def test_any_metadata_is_a_mark_or_none(text: str) -> None:
    found = Mark.parse(text)
    assert found is None or found.incarnation >= 0
