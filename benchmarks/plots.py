"""Draws what lies in `benchmarks/results` into `docs/images`: nothing is measured here.

    python benchmarks/plots.py

Three figures: every ratio that has a goal, the step time of each contestant, and how cost grows.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import attrs
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from report import RESULTS

IMAGES = RESULTS.parents[1] / "docs" / "images"
SOURCES = ("step_overhead", "compiled", "collectives", "checkpoint")
INK, FAINT, OURS, MISSED = "#222222", "#9a9a9a", "#0b6fa4", "#d1601f"
OTHERS = ("#d1601f", "#2e8b57", "#8a5fb0", "#b0892b", "#c2477f", "#5c6b73", "#7a4b2a")
Record = dict[str, Any]
Table = dict[str, list[Record]]
Series = dict[str, list[tuple[float, float]]]


@attrs.frozen
class Panel:
    """One small figure of how a cost grows: which rows, what their number counts, and in which unit."""

    source: str
    pattern: str
    title: str
    counts: str
    unit: str


PANELS = (
    Panel("step_overhead", r"^step of (\d+) parameter tensors$", "eager step", "parameter tensors", "us"),
    Panel("compiled", r"^(\d+) layers: compiled step", "compiled step, 2 x 64 tokens", "layers", "ms"),
    Panel("compiled", r"^(\d+) layers: first loss, cold", "first loss, cold", "layers", "s"),
    Panel("compiled", r"^(\d+) layers: first loss, warm", "first loss, warm", "layers", "s"),
    Panel("collectives", r"^gather: (\d+) leaves of \[8, 4\]", "gather of a tree, 2 ranks", "leaves", "us"),
    Panel("checkpoint", r"^save, (\d+) MiB$", "save", "MiB", "ms"),
    Panel("checkpoint", r"^restore, (\d+) MiB$", "restore", "MiB", "ms"),
    Panel("collectives", r"^dispatch on (\d+) ranks", "dispatch: received per batch", "ranks", "bytes"),
)


def read() -> Table:
    """The rows of each results file that is there."""
    found = {name: RESULTS / f"{name}.json" for name in SOURCES}
    return {name: json.loads(path.read_text())["rows"] for name, path in found.items() if path.exists()}


def series(rows: list[Record], pattern: str) -> Series:
    """(number in the row's name, time) of each contestant, ours under "fnaccel"."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        match = re.search(pattern, row["what"])
        if match and row["ours"] is not None:
            at = float(match[1])
            found.setdefault("fnaccel", {})[at] = row["ours"]
            found.setdefault(row["against"], {})[at] = row["peer"]
    return {name: sorted(points.items()) for name, points in found.items()}


def bare(axes: Axes) -> None:
    """Lines and ticks that are needed, and no others."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=3, color=FAINT)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="x", color="#e6e6e6", linewidth=0.6)


def ratios(table: Table) -> Figure | None:
    """Every row with a goal: where it stands, and where it was to stand."""
    rows = [row for found in table.values() for row in found if row["goal"] is not None]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(10, 0.24 * len(rows) + 0.9), layout="constrained")
    bare(axes)
    axes.spines["left"].set_visible(False)
    for place, row in enumerate(reversed(rows)):
        ratio, goal = row["ratio"], row["goal"]
        axes.plot([goal], [place], "|", color=INK, markersize=11, markeredgewidth=1.6)
        if ratio is None:
            axes.annotate(f"  not run: {row['not_run']}", (goal, place), va="center", fontsize=8, color=FAINT)
            continue
        missed = round(ratio, 2) > goal
        color = MISSED if missed else OURS
        axes.plot([goal, ratio], [place, place], color=color, linewidth=1.4, alpha=0.5)
        axes.plot([ratio], [place], "o", color=color, markersize=5)
        left = ratio <= goal
        axes.annotate(
            f"{ratio:.2f}" + (" missed" if missed else ""),
            (ratio, place),
            xytext=(-6 if left else 6, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=7.5,
            color=color,
        )
    axes.set_yticks(range(len(rows)), [f"{row['what']} | {row['against']}" for row in reversed(rows)])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.set_xscale("log")
    axes.set_xlim(0.03, 2.4)
    marks = (0.05, 0.1, 0.2, 0.5, 1, 2)
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("fnaccel / peer (log scale; left is faster); the bar is the goal", fontsize=8, color=INK)
    return figure


def steps(table: Table) -> Figure | None:
    """The step time of each contestant in one process, a panel for each batch size."""
    found = series(table.get("compiled", []), r"1 process, (\d+) x 64 tokens$")
    if not found:
        return None
    sizes = [size for size, _ in found["fnaccel"]]
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(10, 0.28 * len(found) + 1.0), sharey=True, layout="constrained"
    )
    names = [name.replace("fnaccel", "fnaccel, scope step") if name == "fnaccel" else name for name in found]
    for axes, size in zip(panels, sizes, strict=True):
        bare(axes)
        taken = [dict(points)[size] for points in found.values()]
        colors = [OURS if name == "fnaccel" else "#c4ccd1" for name in found]
        axes.barh(range(len(taken)), taken, color=colors, height=0.66)
        for place, milliseconds in enumerate(taken):
            axes.annotate(
                f"{milliseconds:.1f}",
                (milliseconds, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
        axes.set_xlim(0, 1.15 * max(taken))
        axes.set_title(f"{size:g} x 64 tokens", fontsize=9, color=INK, loc="left")
        axes.set_xlabel("ms a step", fontsize=8, color=INK)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
    panels[0].invert_yaxis()
    return figure


def growth(table: Table) -> Figure | None:
    """How cost grows: with leaves, layers, bytes and ranks, whatever the results hold."""
    shown = [(panel, series(table.get(panel.source, []), panel.pattern)) for panel in PANELS]
    shown = [(panel, found) for panel, found in shown if found]
    if not shown:
        return None
    rows = -(-len(shown) // 2)
    figure, panels = plt.subplots(rows, 2, figsize=(10, 2.5 * rows), layout="constrained", squeeze=False)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (panel, found) in zip(panels.flat, shown, strict=False):
        bare(axes)
        axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.6)
        for number, (name, points) in enumerate(found.items()):
            ours = name == "fnaccel"
            axes.plot(
                *zip(*points, strict=True),
                "o-" if ours else ".-",
                color=OURS if ours else OTHERS[(number - 1) % len(OTHERS)],
                linewidth=2 if ours else 1,
                markersize=5,
                zorder=3 if ours else 2,
                label=name,
            )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_title(panel.title, fontsize=9, color=INK, loc="left")
        axes.set_xlabel(panel.counts, fontsize=8, color=INK)
        axes.set_ylabel(panel.unit, fontsize=8, color=INK)
        axes.legend(fontsize=6.5, frameon=False)
    return figure


FIGURES: dict[str, Callable[[Table], Figure | None]] = {
    "ratios": ratios,
    "compiled_step": steps,
    "growth": growth,
}


def main() -> None:
    """Draw every figure that there are results for."""
    table = read()
    IMAGES.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw(table)
        if figure is None:
            print(f"docs/images/{name}.png: no results")
            continue
        path = IMAGES / f"{name}.png"
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=110)
        # 64 colours: a third of the size, and no version in the file, so that it changes when the rows do
        Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
        print(f"docs/images/{name}.png: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
