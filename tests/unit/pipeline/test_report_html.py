"""Charts hold every point inside their frame, in order, and nothing that a stranger wrote as markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.report_html import bar_chart, line_chart

NASTY = '<b onclick="x">&\'</b>'
VALUES = st.floats(0, 1e6, allow_subnormal=False)


def parsed(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure.replace("role=img", 'role="img"'))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", text)]


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.lists(VALUES, max_size=30), min_size=1, max_size=4), start=st.integers(0, 100))
def test_lines_stay_inside_the_frame_and_rise_where_values_rise(lines: list[list[float]], start: int) -> None:
    series = {f"line {n}": [(start + x, y) for x, y in enumerate(line)] for n, line in enumerate(lines)}
    figure = parsed(line_chart("title", series))
    svg = figure.find("svg")
    assert svg is not None
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    drawn = [numbers(p.get("points", "")) for p in svg.findall("polyline")]
    if not any(lines):
        assert drawn == [] and "no data" in "".join(svg.itertext())
        return
    assert len(drawn) == len(lines)
    for points, line in zip(drawn, lines, strict=True):
        xs, ys = points[0::2], points[1::2]
        assert len(xs) == len(line) and xs == sorted(xs)
        assert all(0 <= x <= width for x in xs) and all(0 <= y <= height for y in ys)
        for at in range(1, len(line)):
            if line[at] > line[at - 1]:
                assert ys[at] <= ys[at - 1], "the vertical axis points upwards"


@settings(max_examples=60, deadline=None)
@given(bars=st.dictionaries(st.text(st.characters(min_codepoint=32, max_codepoint=126)), VALUES, max_size=20))
def test_bars_are_as_long_as_their_values_and_named(bars: dict[str, float]) -> None:
    figure = parsed(bar_chart("title", bars))
    svg = figure.find("svg")
    assert svg is not None
    lengths = [float(r.get("width", 0)) for r in svg.findall("rect")]
    texts = [t.text or "" for t in svg.findall("text")]
    if not bars:
        assert lengths == [] and texts == ["none"]
        return
    highest = max(bars.values())
    for length, value in zip(lengths, bars.values(), strict=True):
        assert length == pytest.approx(value / (highest or 1) * max(lengths, default=0), abs=0.11)
    assert texts[0::2] == list(bars)
    assert all(
        float(r.get("y", 0)) + float(r.get("height", 0)) <= float(svg.get("height", 0)) for r in svg.iter("rect")
    )


@pytest.mark.parametrize(
    "figure",
    [
        line_chart(NASTY, {NASTY: [(0, 1.0)], "b": [(0, 2.0)]}),
        line_chart(NASTY, {NASTY: []}),
        bar_chart(NASTY, {NASTY: 1.0}),
        bar_chart(NASTY, {}),
    ],
)
def test_titles_and_names_are_text_and_no_markup(figure: str) -> None:
    root = parsed(figure)
    assert {e.tag for e in root.iter()} <= {"figure", "figcaption", "svg", "text", "line", "polyline", "circle", "rect"}
    assert root.findtext("figcaption") == NASTY


@pytest.mark.parametrize(("count", "dots"), [(1, 1), (20, 20), (21, 0)])
def test_single_points_are_marked_while_there_are_few(count: int, dots: int) -> None:
    svg = parsed(line_chart("t", {"a": [(n, 0.5) for n in range(count)]}, top=1.0)).find("svg")
    assert svg is not None and len(svg.findall("circle")) == dots


def test_a_top_that_is_given_is_the_top() -> None:
    half = parsed(line_chart("t", {"a": [(0, 0.5), (1, 0.5)]}, top=1.0)).find("svg/polyline")
    whole = parsed(line_chart("t", {"a": [(0, 0.5), (1, 0.5)]})).find("svg/polyline")
    assert half is not None and whole is not None
    assert numbers(half.get("points", ""))[1] > numbers(whole.get("points", ""))[1]
