"""What a benchmark found: rows of (fnaccel, peer, ratio, goal) with their spread, printed and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from environment import environment
from options import Options
from tables import rows_table

_SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0, "%": 100.0}
"""What the figures of a row are multiplied by. 1 for other units: bytes, MiB, nats, micro-batches."""


@attrs.frozen
class Row:
    """One comparison.

    Attributes:
        what: the measured work.
        against: the peer.
        ours, peer: seconds, bytes or MiB, one figure for each round.
        goal: the ratio to reach, if there is one.
        unit: the unit of the table.
    """

    what: str
    against: str
    ours: Sequence[float]
    peer: Sequence[float]
    goal: float | None = None
    unit: str = "us"

    def record(self) -> dict[str, Any]:
        """The row as JSON has it: medians in the unit of the table, their ratio, and its range."""
        ours, peer = (
            statistics.median(figures) * _SCALES.get(self.unit, 1.0) for figures in (self.ours, self.peer)
        )
        low, high = self._range()
        return {
            "what": self.what,
            "against": self.against,
            "ours": round(ours, 3),
            "peer": round(peer, 3),
            "ratio": round(ours / peer, 4),
            "low": low,
            "high": high,
            "rounds": len(self.ours),
            "goal": self.goal,
            "unit": self.unit,
        }

    def _range(self) -> tuple[float | None, float | None]:
        """The middle half of the ratios of single rounds. Of two or three rounds, the first and the last."""
        ratios = sorted(a / b for a, b in zip(self.ours, self.peer, strict=True))
        if len(ratios) < 2:
            return None, None
        low, high = ratios[0], ratios[-1]
        if len(ratios) > 3:
            low, _, high = statistics.quantiles(ratios, method="inclusive")
        return round(low, 4), round(high, 4)


@attrs.frozen
class NotRun:
    """A row that has a goal and no figures here, and the reason."""

    what: str
    against: str
    goal: float
    reason: str
    unit: str = "ms"

    def record(self) -> dict[str, Any]:
        """The row as JSON has it."""
        empty = dict.fromkeys(("ours", "peer", "ratio", "low", "high"))
        end = {"rounds": 0, "goal": self.goal, "unit": self.unit, "not_run": self.reason}
        return {"what": self.what, "against": self.against, **empty, **end}


def compare(
    what: str,
    samples: Mapping[str, Sequence[float]],
    goals: Mapping[str, float] | None = None,
    unit: str = "us",
) -> list[Row]:
    """One row for each peer in the samples of a race."""
    return [
        Row(what, peer, samples["fnaccel"], figures, (goals or {}).get(peer), unit)
        for peer, figures in samples.items()
        if peer != "fnaccel"
    ]


def publish(
    options: Options, rows: Sequence[Row | NotRun], versions: Mapping[str, str] | None = None
) -> None:
    """Print the table, and write the rows where the options say.

    If only some parts ran, the other rows of the file stay. `versions` adds packages of another environment.
    """
    records = [row.record() for row in rows]
    print(rows_table(records))
    if options.into is None or not records:
        print("\nno results written")
        return
    if not options.whole and options.into.exists() and options.level == "full":
        records = _merged(json.loads(options.into.read_text())["rows"], records)
    content = {"environment": environment(versions), "absent": list(options.absent), "rows": records}
    options.into.parent.mkdir(exist_ok=True)
    options.into.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nwritten: {options.into.name}")


def _merged(before: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, in the order of the file. New rows take the place of all rows that measured the same work."""
    fresh = {(row["what"], row["against"]): row for row in records}
    measured = {row["what"] for row in records}
    kept = {(row["what"], row["against"]): row for row in before}
    kept = {key: row for key, row in kept.items() if key in fresh or key[0] not in measured}
    return list({**kept, **fresh}.values())
