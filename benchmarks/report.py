"""What a benchmark found: rows of (ours, peer, ratio, goal), as a table and as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("fnaccel", "torch", "accelerate", "lightning-fabric", "optree")
_SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0, "bytes": 1.0, "MiB": 1.0}


@attrs.frozen
class Row:
    """One comparison; `ours` and `peer` in seconds (or bytes), `goal` the ratio to reach, if there is one."""

    what: str
    against: str
    ours: float
    peer: float
    goal: float | None = None
    unit: str = "us"

    @property
    def ratio(self) -> float:
        """Ours over the peer's: below 1 is less time."""
        return self.ours / self.peer

    def cells(self) -> list[str]:
        """The row as text."""
        # to two digits, as goals are set: no median here is better known than that
        met = "" if self.goal is None else ("yes" if round(self.ratio, 2) <= self.goal else "NO")
        scale = _SCALES[self.unit]
        return [
            self.what,
            self.against,
            f"{self.ours * scale:,.1f} {self.unit}",
            f"{self.peer * scale:,.1f} {self.unit}",
            f"{self.ratio:.2f}",
            "" if self.goal is None else f"<= {self.goal:.2f}",
            met,
        ]

    def record(self) -> dict[str, Any]:
        """The row as JSON has it, in the unit that the table shows."""
        scale = _SCALES[self.unit]
        return {
            "what": self.what,
            "against": self.against,
            "ours": round(self.ours * scale, 3),
            "peer": round(self.peer * scale, 3),
            "ratio": round(self.ratio, 3),
            "goal": self.goal,
            "unit": self.unit,
        }


@attrs.frozen
class NotRun:
    """A row that has a goal and no figures here, and why."""

    what: str
    against: str
    goal: float
    reason: str
    unit: str = "ms"

    def cells(self) -> list[str]:
        """The row as text."""
        return [self.what, self.against, "", "", "", f"<= {self.goal:.2f}", f"not run: {self.reason}"]

    def record(self) -> dict[str, Any]:
        """The row as JSON has it."""
        empty = {"ours": None, "peer": None, "ratio": None}
        return {
            "what": self.what,
            "against": self.against,
            **empty,
            "goal": self.goal,
            "unit": self.unit,
            "not_run": self.reason,
        }


def compare(
    what: str, found: dict[str, float], goals: dict[str, float] | None = None, unit: str = "us"
) -> list[Row]:
    """One row for each peer in what `race` found."""
    ours = found["fnaccel"]
    return [
        Row(what, peer, ours, seconds, (goals or {}).get(peer), unit)
        for peer, seconds in found.items()
        if peer != "fnaccel"
    ]


def _is_installed(name: str) -> bool:
    """`make bench` installs all peers. One benchmark alone needs its own."""
    return bool(list(importlib.metadata.distributions(name=name)))


def environment() -> dict[str, Any]:
    """Versions and cores: what a reader needs to judge the figures by, and nothing that names a machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES if _is_installed(name)},
    }


def table(rows: Sequence[Row | NotRun]) -> str:
    """The rows as a Markdown table."""
    head = ["what", "against", "fnaccel", "peer", "ratio", "goal", "met"]
    lines = [head, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    drawn = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([drawn[0], rule, *drawn[1:]])


def publish(name: str, rows: Sequence[Row | NotRun], *, merge: bool = False) -> None:
    """Print the table, and write `results/NAME.json`.

    With `merge` the other rows of a file from the same day and versions stay as they are.
    """
    print(table(rows))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"environment": environment(), "rows": [row.record() for row in rows]}
    if merge and path.exists():
        before = json.loads(path.read_text())
        if before["environment"] == content["environment"]:
            fresh = {row.what for row in rows}
            content["rows"] = [row for row in before["rows"] if row["what"] not in fresh] + content["rows"]
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nwritten: benchmarks/results/{path.name}")
