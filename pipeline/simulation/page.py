"""Studies and sizings as one HTML file with charts, drawn as the run report draws its own."""

from collections.abc import Sequence
from html import escape

from headrace.pipeline.report_html import bar_chart, document, line_chart
from headrace.pipeline.simulation.sizing import Choice
from headrace.pipeline.simulation.study import Chart, Result, Row, Study

__all__ = ("chart", "sizing_page", "studies_page", "table")


def chart(given: Chart) -> str:
    """One chart as a figure."""
    if given.lines:
        return line_chart(given.title, given.lines)
    return bar_chart(given.title, {name: round(value, 2) for name, value in given.bars.items()})


def table(rows: Sequence[Row]) -> str:
    """Paper, ours, ratio."""
    lines = [
        f'<tr><td>{escape(row.name)}</td><td class="n">{_shown(row.paper)}</td><td class="n">{_shown(row.ours)}</td>'
        f'<td class="n">{_shown(row.ratio)}</td><td>{escape(row.note)}</td></tr>'
        for row in rows
    ]
    head = "<tr><th></th><th>paper</th><th>ours</th><th>ratio</th><th></th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def studies_page(found: Sequence[tuple[Study, Result]], seeds: int) -> str:
    """The page of several studies."""
    body = [f"<h1>Simulated figures</h1><p>Means of {seeds} seeds.</p>"]
    for study, result in found:
        body.append(f"<h2>{escape(study.title)}</h2><p>{escape(study.why)}</p>")
        body.append(table(result.rows))
        body.append(f'<div class="row">{"".join(chart(c) for c in result.charts)}</div>')
    return document("Simulated figures", body)


def sizing_page(found: Sequence[Choice], best: Choice) -> str:
    """The page of a sizing: throughput and staleness over the GPUs for training, a line for each depth."""
    depths = sorted({choice.depth for choice in found})
    charts = []
    for title, name in (("Trained samples a second", "samples_per_second"), ("Mean staleness", "mean_staleness")):
        lines = {
            f"depth {depth:g}": [(float(c.trainer_gpus), float(getattr(c, name))) for c in found if c.depth == depth]
            for depth in depths
        }
        charts.append(chart(Chart(f"{title} over GPUs for training", lines=lines)))
    said = (
        f"<p>Best: {best.rollout_gpus} GPUs for rollouts, {best.trainer_gpus} for training, depth {best.depth:g}: "
        f"{best.samples_per_second:.3g} samples a second at mean staleness {best.mean_staleness:.2f}.</p>"
    )
    return document(
        "Size of a cluster", ["<h1>Size of a cluster</h1>", said, f'<div class="row">{"".join(charts)}</div>']
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
