"""Marks tell a successor from everybody else."""

from __future__ import annotations

import pytest

from headrace.connectors.marks import Mark
from headrace.schemas.errors import Superseded


def test_a_mark_survives_metadata() -> None:
    assert Mark.parse(str(Mark("ops-0", 17))) == Mark("ops-0", 17)


@pytest.mark.parametrize("text", [None, "", "7", "hr1 a", "hr1 a b", "hr2 a 7", "hr1 a 7 8"])
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
