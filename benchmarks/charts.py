"""What the pictures in `docs/images` show, as numbers: made from the results, and read back from a file.

`plots.py` draws these numbers and stores them in the file, as a text chunk of the PNG.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from tables import JAX, Measured, Record, is_missed, screen_rows

Chart = dict[str, Any]
KEY = "Benchmarks"
"""The name of the text chunk."""
OURS = "#0b6fa4"
COLORS = {
    "fnaccel": OURS,
    "fnaccel, scope loss": "#56b4e9",
    "fnaccel, scope block": "#2f4b7c",
    "fnaccel, eager": "#7fcdbb",
    "PyTorch by hand": "#d1601f",
    "PyTorch by hand, fused AdamW": "#b0892b",
    "by hand, torch.compile(model), fused AdamW": "#d1601f",
    "torch.distributed, a call per leaf": "#d1601f",
    "write + fsync": "#d1601f",
    "load_file + copy": "#d1601f",
    "Accelerate": "#2e8b57",
    "Lightning Fabric": "#8a5fb0",
    "DCP": "#5c6b73",
    JAX: "#c2477f",
}
"""The colour of each contestant in all pictures. Loops by hand and fnaccel have theirs in every panel."""


@attrs.frozen
class Sweep:
    """One panel of how a cost grows: the rows, what the number in their name counts, and the unit."""

    source: str
    pattern: str
    title: str
    counts: str


SWEEPS = (
    Sweep("step_overhead", r"^step of (\d+) parameter tensors$", "eager step", "parameter tensors"),
    Sweep("compiled", r"^(\d+) layers: compiled step", "compiled step, 2 x 64 tokens", "layers"),
    Sweep("compiled", r"^(\d+) layers: first loss, cold", "first loss, cold", "layers"),
    Sweep("compiled", r"^(\d+) layers: first loss, warm", "first loss, warm", "layers"),
    Sweep("collectives", r"^gather: (\d+) leaves of \[8, 4\]$", "gather of a tree, 2 ranks", "leaves"),
    Sweep("checkpoint", r"^save, (\d+) MiB$", "save", "MiB"),
    Sweep("checkpoint", r"^restore, (\d+) MiB$", "restore", "MiB"),
    Sweep("collectives", r"^dispatch on (\d+) ranks", "dispatch: received per batch", "ranks"),
)


def ratios(measured: Measured) -> Chart:
    """Every row that has a goal, with its range."""
    rows = [row for results in measured.values() for row in results.rows if row["goal"] is not None]
    shown = ("ratio", "low", "high", "goal")
    return {
        "kind": "ratios",
        "rows": [
            {
                "label": f"{row['what']} | {row['against']}",
                **{key: row[key] for key in shown},
                "missed": is_missed(row),
                "not_run": row.get("not_run"),
            }
            for row in rows
        ],
    }


def compiled_step(measured: Measured) -> Chart:
    """The step time of each contestant in one process, a panel for each batch size."""
    rows = measured["compiled"].matching(r"1 process, (\d+) x 64 tokens$") if "compiled" in measured else []
    panels = []
    for what in dict.fromkeys(row["what"] for row in rows):
        of_panel = [row for row in rows if row["what"] == what]
        panels.append(_bars(what.rpartition(", ")[2], "fnaccel, scope step", of_panel))
    return {"kind": "bars", "panels": panels}


def first_screen(measured: Measured) -> Chart:
    """The README's picture: a panel for each line of its table."""
    panels = []
    for label, rows in screen_rows(measured).items():
        panels.append(_bars(label, "fnaccel", [{**row, "against": peer} for peer, row in rows.items()]))
    return {"kind": "bars", "panels": panels}


def _bars(title: str, ours: str, rows: list[Record]) -> Chart:
    bars = [[ours, rows[0]["ours"]], *([row["against"], row["peer"]] for row in rows)]
    return {"title": title, "unit": rows[0]["unit"], "bars": bars}


def growth(measured: Measured) -> Chart:
    """How cost grows: with leaves, layers, bytes and ranks, whatever the results hold."""
    panels = []
    for sweep in SWEEPS:
        rows = measured[sweep.source].matching(sweep.pattern) if sweep.source in measured else []
        series: dict[str, dict[float, float]] = {}
        for row in rows:
            if row["ratio"] is not None:
                at = float(re.search(sweep.pattern, row["what"])[1])
                series.setdefault("fnaccel", {})[at] = row["ours"]
                series.setdefault(row["against"], {})[at] = row["peer"]
        if rows:
            points = {
                name: [list(point) for point in sorted(found.items())] for name, found in series.items()
            }
            colors = {name: COLORS[name] for name in points}
            end = {"counts": sweep.counts, "unit": rows[0]["unit"]}
            panels.append({"title": sweep.title, **end, "series": points, "colors": colors})
    return {"kind": "lines", "panels": panels}


CHARTS: dict[str, Callable[[Measured], Chart]] = {
    "first_screen": first_screen,
    "ratios": ratios,
    "compiled_step": compiled_step,
    "growth": growth,
}
"""The pictures by the name of their file."""


def stored(path: Path) -> Chart | None:
    """The numbers that a picture was drawn from."""
    texts = dict(_texts(path.read_bytes()))
    return json.loads(texts[KEY]) if KEY in texts else None


def _texts(content: bytes) -> Iterator[tuple[str, str]]:
    """(name, text) of each text chunk of a PNG."""
    place = 8
    while place < len(content):
        size, kind = struct.unpack(">I4s", content[place : place + 8])
        if kind == b"tEXt":
            name, _, text = content[place + 8 : place + 8 + size].partition(b"\0")
            yield name.decode("latin-1"), text.decode("latin-1")
        place += 12 + size
