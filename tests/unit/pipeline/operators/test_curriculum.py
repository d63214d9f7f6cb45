"""Pools by phases and a ceiling that rises."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prompt_feed import PromptFeed, make_offer
from pydantic import ValidationError

from headrace.pipeline.operators.curriculum import Curriculum, CurriculumConfiguration
from headrace.pipeline.operators.prompt_operator import Candidate

PHASES = [{"weights": [1, 0, 0]}, {"start": 2, "weights": [1, 3, 0]}, {"start": 4, "weights": [1, 1, 2]}]


def feed(**settings: Any) -> PromptFeed:
    return PromptFeed(Curriculum, CurriculumConfiguration.model_validate(settings))


def offer(difficulty: object, position: int = 0) -> Candidate:
    return make_offer(f"p{position}", position, columns={"difficulty": str(difficulty)})


def counts(made: PromptFeed, offers: int) -> list[int]:
    """What is admitted of each pool of the bounds 3, 6 when difficulties 0 to 9 come at random."""
    r, out = random.Random(5), [0, 0, 0]
    for position in range(offers):
        difficulty = r.randrange(10)
        if made.offer(offer(difficulty, position)) == "":
            out[0 if difficulty < 3 else 1 if difficulty < 6 else 2] += 1
        if position % 50 == 0:
            made.restart()
    return out


def test_each_phase_admits_its_shares_from_its_beginning() -> None:
    made = feed(bounds=[3, 6], phases=PHASES)
    first = counts(made, 200)
    assert first[0] > 40 and first[1:] == [0, 0]
    made.move(2)
    easy, middle, hard = counts(made, 400)
    assert hard == 0 and middle > 100 and abs(middle - 3 * easy) <= 6
    made.move(4)
    easy, middle, hard = counts(made, 400)
    assert abs(easy - middle) <= 4 and abs(hard - 2 * easy) <= 8 and hard > 100


def test_reasons() -> None:
    made = feed(bounds=[3, 6], phases=[{"weights": [1, 1, 0]}])
    assert made.offer(offer(9)) == "pool_closed"
    assert [made.offer(offer(3, n)) for n in range(3)] == ["", "pool_ahead", "pool_ahead"]
    assert made.offer(offer("hard")) == made.offer(make_offer("p")) == "difficulty_unknown"
    assert feed(bounds=[3], phases=[{"weights": [1, 1]}], unknown="admit").offer(offer("hard")) == ""


def test_the_ceiling_is_linear_between_points() -> None:
    made = feed(ceiling=[[2, 3], [6, 11], [7, 5]])
    limits = []
    for version in range(9):
        made.operator.moved(version, made)
        made.restart()
        limits.append(made.operator.limit(version))
    assert limits == [3, 3, 3, 5, 7, 9, 11, 5, 5]
    made = feed(ceiling=[[0, 2], [4, 6]])
    assert [made.offer(offer(d)) for d in (2, 2.5)] == ["", "too_difficult"]
    made.move(2)
    assert [made.offer(offer(d)) for d in (4, 4.5)] == ["", "too_difficult"]


def test_the_clock_of_groups_counts_what_is_admitted() -> None:
    made = feed(bounds=[5], phases=[{"weights": [1, 0]}, {"start": 3, "weights": [0, 1]}], clock="groups")
    made.move(9)
    assert [made.offer(offer(d, n)) for n, d in enumerate([1, 9, 1, 1, 1, 9])] == [
        "", "pool_closed", "", "", "pool_closed", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "give bounds and phases, or a ceiling"),
        ({"bounds": [1], "phases": [{"weights": [1, 1]}], "ceiling": [[0, 1]]}, "give bounds and phases, or a ceiling"),
        ({"bounds": [2, 1], "phases": [{"weights": [1, 1, 1]}]}, "bounds must rise"),
        ({"bounds": [1], "phases": [{"weights": [1]}]}, "1 bounds make 2 pools"),
        ({"bounds": [1], "phases": [{"weights": [0, 0]}]}, "give each a weight"),
        ({"bounds": [1], "phases": [{"start": 1, "weights": [1, 1]}]}, "phases begin at 0"),
        ({"ceiling": [[3, 1], [1, 2]]}, "starts later"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CurriculumConfiguration.model_validate(settings)
