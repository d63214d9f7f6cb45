"""The report as one HTML file that needs nothing else: curves as inline SVG, tables, samples, the command to run again.

In: the figures of a run; out: the page's text. Everything that came from a model or a dataset is escaped.
"""

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.pipeline.report import Figures

__all__ = ("bar_chart", "document", "line_chart", "page")

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _NAMES = 520, 220, 46, 26, 180
_ROLES = 10  # bars that the height of a chart leaves readable
_COLOURS = ("#1565c0", "#d84315", "#2e7d32")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
.row{display:flex;flex-wrap:wrap;gap:1.5rem}figure{margin:0}figcaption{font-weight:600}
table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}code,pre{font:13px ui-monospace,monospace}
pre{background:#f4f4f4;padding:.7rem;overflow-x:auto}.ok{color:#2e7d32}.no{color:#c62828}
text{font:11px system-ui,sans-serif;fill:#555}
"""

Points = Sequence[tuple[float, float]]


def page(figures: "Figures") -> str:
    """The whole page."""
    curves = figures.curves
    charts = [
        line_chart("Reward of finished groups", {"mean raw reward": curves.reward}, top=1.0),
        line_chart("Held-out accuracy (sampled)", _held_out(figures), top=1.0),
        bar_chart("Staleness of trained items (versions)", {str(k): v for k, v in curves.staleness_counts.items()}),
        bar_chart("Groups dropped, by reason", figures.drops),
        line_chart("Trainer, seconds a step", {"step": curves.step_seconds, "wait for batch": curves.wait_seconds}),
        bar_chart("Trainer's time (per cent)", {k: round(100 * v, 1) for k, v in figures.time_split.items()}),
        bar_chart("Weights that a version changes (per cent)", _changed(figures.changed_by_role)),
    ]
    body = [
        f"<h1>Run {escape(figures.run)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in figures.summary()),
        f'<div class="row">{"".join(charts)}</div>',
        "<h2>Held-out prompts, before and after</h2>",
        _samples(figures),
        *(["<h2>Policies</h2>", _policies(figures)] if len(figures.policies) > 1 else []),
        "<h2>Figures</h2>",
        _table(figures),
        "<h2>Run again</h2>",
        f"<pre>{escape(figures.command or shlex.join(['headrace', 'run']))}</pre>",
    ]
    return document(figures.run, body)


def document(title: str, body: Sequence[str]) -> str:
    """A whole page of parts that are HTML already, in the report's style."""
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def line_chart(title: str, series: Mapping[str, Points], top: float | None = None) -> str:
    """Lines over versions; the vertical axis begins at 0 and ends at ``top`` or the largest value."""
    points = [p for line in series.values() for p in line]
    if not points:
        return _figure(title, '<text x="60" y="100">no data</text>')
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    highest = top or max(y for _, y in points) or 1.0
    shapes = [_grid(left, right, highest)]
    for (name, line), colour, row in zip(series.items(), _COLOURS * len(series), range(len(series)), strict=False):
        path = " ".join(f"{_x(x, left, right):.1f},{_y(y, highest):.1f}" for x, y in line)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if len(line) <= 20:
            shapes += [_dot(_x(x, left, right), _y(y, highest), colour, f"{y:.3f}") for x, y in line]
        if len(series) > 1:
            shapes.append(f'<text x="{_LEFT + 8}" y="{18 + 14 * row}" style="fill:{colour}">{escape(name)}</text>')
    return _figure(title, "".join(shapes))


def bar_chart(title: str, bars: Mapping[str, float]) -> str:
    """One bar for each name, from the left, with its value behind it."""
    if not bars:
        return _figure(title, '<text x="60" y="100">none</text>')
    highest = max(bars.values()) or 1.0
    step = min(34.0, (_HEIGHT - 10) / len(bars))
    shapes = []
    for position, (name, value) in enumerate(bars.items()):
        y, width = 6 + position * step, value / highest * (_WIDTH - _NAMES - 70)
        size = f'width="{width:.1f}" height="{step * 0.7:.1f}" fill="{_COLOURS[0]}"'
        line = y + step * 0.35 + 4
        shapes.append(f'<text x="{_NAMES - 8}" y="{line:.1f}" text-anchor="end">{escape(name)}</text>')
        shapes.append(f'<rect x="{_NAMES}" y="{y:.1f}" {size}/>')
        shapes.append(f'<text x="{_NAMES + width + 6:.1f}" y="{line:.1f}">{value:g}</text>')
    return _figure(title, "".join(shapes))


def _held_out(figures: "Figures") -> dict[str, Points]:
    """Mean reward, and the chance that one of all samples is solved where there are several."""
    lines: dict[str, Points] = {"accuracy": figures.curves.accuracy}
    several = [name for name in (figures.evaluation.curves if figures.evaluation else ()) if name.startswith("pass@")]
    if figures.evaluation and len(several) > 1:
        lines[several[-1]] = figures.evaluation.curves[several[-1]]
    return lines


def _changed(roles: Mapping[str, float]) -> dict[str, float]:
    """The roles of tensors that change most, by short names, in per cent."""
    most = sorted(roles.items(), key=lambda item: -item[1])[:_ROLES]
    return {name.removeprefix("model.").removesuffix(".weight"): round(100 * share, 3) for name, share in most}


def _x(value: float, left: float, right: float) -> float:
    return _LEFT + (value - left) / ((right - left) or 1) * (_WIDTH - _LEFT - 10)


def _y(value: float, highest: float) -> float:
    return 8 + (1 - value / highest) * (_HEIGHT - _BOTTOM - 8)


def _grid(left: float, right: float, highest: float) -> str:
    lines = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _y(share * highest, highest)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * highest:.3g}</text>')
    for value in (left, (left + right) / 2, right):
        x = _x(value, left, right)
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{value:g}</text>')
    return "".join(lines)


def _dot(x: float, y: float, colour: str, label: str) -> str:
    mark = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    return f'{mark}<text x="{x:.1f}" y="{y - 7:.1f}" text-anchor="middle">{label}</text>'


def _figure(title: str, shapes: str) -> str:
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f"<figure><figcaption>{escape(title)}</figcaption><svg {size} role=img>{shapes}</svg></figure>"


def _samples(figures: "Figures") -> str:
    if not figures.samples:
        return "<p>none</p>"
    rows = [
        f"<tr><td><code>{escape(s.prompt)}</code></td><td>{_answer(s.before, s.reward_before)}</td>"
        f"<td>{_answer(s.after, s.reward_after)}</td></tr>"
        for s in figures.samples
    ]
    return f"<table><tr><th>prompt</th><th>first version</th><th>last version</th></tr>{''.join(rows)}</table>"


def _answer(text: str, reward: float) -> str:
    return f'<code>{escape(text)}</code> <span class="{"ok" if reward > 0 else "no"}">{reward:g}</span>'


def _table(figures: "Figures") -> str:
    rows = []
    for name, value in figures.flat().items():
        if name in ("curves", "samples", "command", "policies"):
            continue
        rows.append(f'<tr><td>{escape(name)}</td><td class="n">{escape(_cell(value))}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _policies(figures: "Figures") -> str:
    """One column for each policy."""
    columns = figures.flat()["policies"]
    rows = [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(_cell(policy[name]))}</td>' for policy in columns)}</tr>"
        for name in columns[0]
    ]
    return f"<table>{''.join(rows)}</table>"


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cell(inner)}" for name, inner in value.items() if name != "curves") or "none"
    if isinstance(value, list):
        return " -> ".join(_cell(inner) for inner in value)
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
