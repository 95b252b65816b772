"""The HTML text of a report: its style, sections, charts and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fnaccel.seeing.line_chart import Line, line_chart, number
from fnaccel.seeing.runs import Run

_SECTIONS: dict[str, tuple[str, ...]] = {
    "Training": ("loss", "lr", "grad_norm", "loss_scale", "skipped"),
    "Speed": ("rows_per_second", "tokens_per_second", "steps_per_second", "data_wait", "mfu"),
    "Memory": ("peak_mib",),
}
_TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "loss_scale": "Loss scale",
    "skipped": "Skipped updates",
    "rows_per_second": "Rows a second",
    "tokens_per_second": "Tokens a second",
    "steps_per_second": "Steps a second",
    "data_wait": "Share of waiting for data",
    "mfu": "Model FLOPs utilisation",
    "peak_mib": "Peak memory, MiB",
    "weight": "Weight of a step",
}
_LIGHT = ("#2563c9", "#c2571a", "#1c8a5a", "#8e44ad", "#b3304f", "#6b6f1d", "#0f7f93", "#5c5c5c")
_DARK = ("#7fb0ff", "#f2a06a", "#6cd0a0", "#cf9bea", "#f08aa3", "#cdd06a", "#6fd0e0", "#c4c4c4")

STYLE = (
    ":root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--soft:#5b6470;--rule:#e3e6ea;--card:#f7f8fa;"
    + "".join(f"--line-{i}:{colour};" for i, colour in enumerate(_LIGHT))
    + "}@media(prefers-color-scheme:dark){:root{--page:#14171b;--ink:#e8eaed;--soft:#9aa3ad;--rule:#2b3036;"
    "--card:#1b1f24;" + "".join(f"--line-{i}:{colour};" for i, colour in enumerate(_DARK)) + "}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1180px;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.15rem;margin:1.6em 0 .5em}h3{font-size:1rem;margin:0 0 .3em}
p{margin:.3em 0;color:var(--soft)}
.tiles,.charts{display:grid;gap:12px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(130px,1fr))}
.charts{grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
.tile,figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--rule);border-radius:8px;
min-width:0}
figure>p:first-child{margin:0;font-size:.8rem}
.tile b{display:block;font-size:1.3rem;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:.5em 0;padding:0;list-style:none;font-size:.9rem}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--rule)}.tick{fill:var(--soft);font-size:13px}@media(max-width:600px){.tick{font-size:22px}}
.restart{stroke:var(--soft);stroke-dasharray:4 4}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.raw{stroke-width:1;opacity:.35}
.point{fill:transparent}.broken{fill:#d1242f}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem}
td,th{text-align:left;vertical-align:top;padding:4px 14px 4px 0;border-bottom:1px solid var(--rule);
overflow-wrap:anywhere;min-width:7em}
tr.differs td,tr.differs th{font-weight:600}
pre{margin:0;padding:12px;overflow-x:auto;background:var(--card);border:1px solid var(--rule);
border-radius:8px;font-size:.85rem}
"""
)


def page(runs: Sequence[Run], title: str = "") -> str:
    """The HTML text of a report."""
    name = title or ", ".join(run.name for run in runs)
    sections: dict[str, list[str]] = {section: list(metrics) for section, metrics in _SECTIONS.items()}
    known = {metric for metrics in sections.values() for metric in metrics}
    phases = sorted({m for run in runs for m in run.columns if m.startswith("peak_mib/")})
    joined = {also for metric in runs[0].columns for also in _also(runs, metric)}
    sections["Other metrics"] = sorted({m for run in runs for m in run.columns} - known - {*phases} - joined)
    parts = [f"<h1>{escape(name)}</h1>", _summary(runs)]
    if len(runs) > 1:
        parts.append(_legend([(run.name, i % len(_LIGHT)) for i, run in enumerate(runs)]))
    else:
        parts.append(_tiles(runs[0]))
    charts: list[str] = []
    for section, metrics in sections.items():
        charts += [chart for metric in metrics if (chart := _chart(runs, section, metric))]
        if section == "Memory" and phases and len(runs) == 1:
            names = {m: m.removeprefix("peak_mib/").replace("_", " ") for m in phases}
            charts.append(_of_one_run(runs[0], section, "Peak memory of each phase, MiB", names))
    if charts:
        # one grid for all sections, since a grid for each could end in an empty cell
        parts += ["<h2>Metrics</h2>", f'<div class="charts">{"".join(charts)}</div>']
    parts += [_tables(runs), *_plans(runs)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _summary(runs: Sequence[Run]) -> str:
    steps = ", ".join(f"{run.steps:,} steps in {_duration(run.seconds)}" for run in runs)
    restarts = sum(len(run.restarts) for run in runs)
    again = f", started again {restarts} time{'s' if restarts > 1 else ''}" if restarts else ""
    return f"<p>{steps}{again}</p>"


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str]] = []
    if "loss" in run.columns:
        losses = run.columns["loss"]
        tiles.append((number(losses[-1][1]), "last loss"))
        finite = [point for point in losses if math.isfinite(point[1])]
        if finite:
            step, best = min(finite, key=lambda point: point[1])
            tiles.append((number(best), f"best loss, step {step:.0f}"))
    tiles += [
        (number(run.columns[metric][-1][1]), _TITLES[metric].lower())
        for metric in ("rows_per_second", "tokens_per_second", "mfu")
        if metric in run.columns
    ]
    if "peak_mib" in run.columns:
        tiles.append((number(max(value for _, value in run.columns["peak_mib"])), "peak memory, MiB"))
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _also(runs: Sequence[Run], metric: str) -> list[str]:
    """The same metric of evaluations, `eval/loss` beside `loss`, which one chart of a single run shows."""
    columns = runs[0].columns if len(runs) == 1 else {}
    return sorted(name for name in columns if "/" in name and name.rpartition("/")[2] == metric)


def _chart(runs: Sequence[Run], section: str, metric: str) -> str:
    title, also = _TITLES.get(metric, metric), _also(runs, metric)
    if also and metric in runs[0].columns:
        return _of_one_run(runs[0], section, title, {name: name for name in (metric, *also)})
    lines = [
        Line(run.name, i % len(_LIGHT), run.columns[metric])
        for i, run in enumerate(runs)
        if metric in run.columns
    ]
    restarts = runs[0].restarts if len(runs) == 1 else ()
    return _figure(section, title, lines, restarts)


def _of_one_run(run: Run, section: str, title: str, names: Mapping[str, str]) -> str:
    """A chart with a line for each of these metrics, and a legend of their names."""
    lines = [
        Line(name, i % len(_LIGHT), run.columns[metric]) for i, (metric, name) in enumerate(names.items())
    ]
    legend = _legend([(line.name, line.colour) for line in lines])
    return _figure(section, title, lines, run.restarts, legend)


def _figure(
    section: str, title: str, lines: Sequence[Line], restarts: Sequence[int], legend: str = ""
) -> str:
    head = f"<p>{escape(section)}</p><h3>{escape(title)}</h3>"
    drawn = [line for line in lines if any(abs(value) < float("inf") for _, value in line.points)]
    if not drawn:
        return f"<figure>{head}<p>no value is finite</p></figure>" if lines else ""
    return f"<figure>{head}{legend}{line_chart(title, drawn, restarts)}</figure>"


def _legend(names: Sequence[tuple[str, int]]) -> str:
    items = (
        f'<li><i style="background:var(--line-{colour})"></i>{escape(name)}</li>' for name, colour in names
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _tables(runs: Sequence[Run]) -> str:
    """Configuration and environment, a column for each run. Rows that differ are bold."""
    parts: list[str] = []
    for title, chosen in (("Configuration", _settings), ("Environment", _environment)):
        columns = [chosen(run.config) for run in runs]
        names = list(dict.fromkeys(name for column in columns for name in column))
        if not names:
            continue
        head = "".join(f"<th>{escape(run.name)}</th>" for run in runs) if len(runs) > 1 else ""
        rows = [f"<tr><th></th>{head}</tr>"] if head else []
        for name in names:
            values = [column.get(name, "") for column in columns]
            differs = ' class="differs"' if len(set(values)) > 1 else ""
            cells = "".join(f"<td>{escape(value)}</td>" for value in values)
            rows.append(f"<tr{differs}><th>{escape(name)}</th>{cells}</tr>")
        parts.append(f'<h2>{title}</h2><div class="scroll"><table>{"".join(rows)}</table></div>')
    return "".join(parts)


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    return _flat({name: value for name, value in config.items() if name not in ("plan", "environment")})


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    facts = config.get("environment")
    return _flat(facts) if isinstance(facts, Mapping) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _plans(runs: Sequence[Run]) -> list[str]:
    plans: dict[str, list[str]] = {}
    for run in runs:
        if "plan" in run.config:
            plans.setdefault(str(run.config["plan"]), []).append(run.name)
    several = len(runs) > 1
    titles = {plan: f"Plan of {', '.join(names)}" if several else "Plan" for plan, names in plans.items()}
    return [f"<h2>{escape(titles[plan])}</h2><pre>{escape(plan)}</pre>" for plan in plans]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
