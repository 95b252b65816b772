"""Draws the charts of `charts.py` with matplotlib, and stores in each file the numbers that it shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from charts import KEY, OURS, Chart
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tables import figure as written
from tables import ratio_of

INK, FAINT, MISSED, PEER = "#222222", "#9a9a9a", "#d1601f", "#c4ccd1"


def draw(chart: Chart, path: Path) -> None:
    """Write one picture."""
    figure = FIGURES[chart["kind"]](chart)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    plt.close(figure)
    numbers = PngInfo()
    numbers.add_text(KEY, json.dumps(chart))
    # 128 colours: a third of the size, and lines of different contestants keep theirs
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True, pnginfo=numbers)


def _bare(axes: Axes) -> None:
    """Lines and ticks that are needed, and no others."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=3, color=FAINT)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="x", color="#e6e6e6", linewidth=0.6)


def _write(axes: Axes, text: str, at: tuple[float, float], color: str) -> None:
    """Text right of a point."""
    axes.annotate(text, at, xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5, color=color)


def _ratios(chart: Chart) -> Figure:
    """Every row with a goal: a dot for the ratio, a line for its range, a bar for the goal."""
    rows = chart["rows"][::-1]
    figure, axes = plt.subplots(figsize=(10, 0.24 * len(rows) + 0.9), layout="constrained")
    _bare(axes)
    axes.spines["left"].set_visible(False)
    for place, row in enumerate(rows):
        axes.plot([row["goal"]], [place], "|", color=INK, markersize=11, markeredgewidth=1.6)
        if row["ratio"] is None:
            text, color, right = f"not run: {row['not_run']}", FAINT, row["goal"]
        else:
            text, color = ratio_of(row["ratio"]), OURS
            if row["missed"]:
                text, color = f"{text} missed", MISSED
            axes.plot([row["ratio"]], [place], "o", color=color, markersize=5)
            ends = [row["ratio"] if end is None else end for end in (row["low"], row["high"])]
            axes.plot(ends, [place, place], color=color, linewidth=2.4, alpha=0.5)
            right = max(row["goal"], *ends)
        _write(axes, text, (right, place), color)
    shown = [row[key] for row in rows for key in ("ratio", "low", "high", "goal") if row[key] is not None]
    low, high = min(shown), max(shown)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.3, high * 4)  # room for the text right of the last dot
    ticks = [
        tick
        for tick in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
        if low / 1.3 <= tick <= high * 4
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel(
        "fnaccel / peer (log scale, left is less); a line is the range, the black bar the goal",
        fontsize=8,
        color=INK,
    )
    return figure


def _bars(chart: Chart) -> Figure:
    """The time of each contestant, a panel for each piece of work. Panels with the same names share them."""
    panels = chart["panels"]
    names = [[name for name, _ in panel["bars"]] for panel in panels]
    shared = all(found == names[0] for found in names)
    columns = len(panels) if shared else min(2, len(panels))
    rows = [names[start : start + columns] for start in range(0, len(names), columns)]
    tallest = [max(map(len, row)) for row in rows]
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=(10, 0.28 * sum(tallest) + 0.75 * len(rows)),
        height_ratios=[count + 0.6 for count in tallest],
        sharey=shared,
        layout="constrained",
        squeeze=False,
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for number, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        _bare(axes)
        values = [value for _, value in panel["bars"]]
        colors = [OURS, *[PEER] * (len(values) - 1)]  # ours is the first
        axes.barh(range(len(values)), values, color=colors, height=0.66)
        for place, value in enumerate(values):
            _write(axes, written(value, panel["unit"]), (value, place), INK)
        axes.set_xlim(0, 1.3 * max(values))  # room for the text right of the longest bar
        axes.set_title(panel["title"], fontsize=9, color=INK, loc="left")
        axes.set_yticks(range(len(values)), [name for name, _ in panel["bars"]])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(tallest[number // columns] - 0.4, -0.6)
    return figure


def _lines(chart: Chart) -> Figure:
    """How cost grows, a panel for each sweep."""
    panels = chart["panels"]
    lines = -(-len(panels) // 2)
    figure, grid = plt.subplots(lines, 2, figsize=(10, 2.5 * lines), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _bare(axes)
        axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.6)
        for name, points in panel["series"].items():
            ours = name == "fnaccel"
            axes.plot(
                *zip(*points, strict=True),
                "o-" if ours else ".-",
                color=panel["colors"][name],
                linewidth=2 if ours else 1.2,
                markersize=5,
                zorder=3 if ours else 2,
                label=name,
            )
        highest = max(value for points in panel["series"].values() for _, value in points)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.3 * highest)  # room for the legend
        axes.set_title(panel["title"], fontsize=9, color=INK, loc="left")
        axes.set_xlabel(panel["counts"], fontsize=8, color=INK)
        axes.set_ylabel(panel["unit"], fontsize=8, color=INK)
        axes.legend(fontsize=6.5, frameon=False)
    return figure


FIGURES = {"ratios": _ratios, "bars": _bars, "lines": _lines}
"""A function for each kind of chart."""
