"""Studies: means over seeds, ratios, pages; and every study of the catalogue tells what it promises."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from headrace.pipeline.simulation.catalogue import STUDIES
from headrace.pipeline.simulation.page import studies_page
from headrace.pipeline.simulation.study import Chart, Result, Row, Study, means


def squares(seed: int) -> dict[str, float]:
    return {"square": float(seed**2), "one": 1.0}


def tell(found: Mapping[str, float]) -> Result:
    rows = [Row("square", found["square"], 2.0), Row("<b>one</b>", found["one"])]
    return Result(rows, [Chart("lines & more", lines={"a": [(0.0, 1.0), (1.0, 2.0)]}), Chart("bars", bars={"b": 3.0})])


STUDY = Study("squares", "Squares", "why & how", squares, tell)


@pytest.mark.parametrize("jobs", [1, 2])
def test_means_are_over_all_seeds_however_many_at_a_time(jobs: int) -> None:
    assert means(squares, [1, 2, 3], jobs) == {"square": pytest.approx(14 / 3), "one": 1.0}


def test_a_ratio_needs_a_paper() -> None:
    first, second = STUDY.run([2], 1).rows
    assert (first.ratio, second.ratio) == (2.0, None)


def test_the_page_has_every_row_and_chart_and_escapes_what_it_shows() -> None:
    html = studies_page([(STUDY, STUDY.run([2], 1))], 1)
    assert html.count("<svg") == 2
    assert "&lt;b&gt;one&lt;/b&gt;" in html and "<b>one" not in html
    assert re.search(r"<td>square</td><td class=\"n\">2</td><td class=\"n\">4</td><td class=\"n\">2</td>", html)


def test_every_study_has_a_reason_and_a_name_of_its_own() -> None:
    assert len(STUDIES) >= 12
    assert all(len(study.why) > 60 and study.name == name for name, study in STUDIES.items())
