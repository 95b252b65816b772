"""The measurements as a text table and as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from fnaccel.benching.task import EAGER, Measured
from fnaccel.benching.verdict import Row, Verdict, brief

_HEAD = ("scope", "first step s", "ms/step", "steps/s", "against eager", "peak MiB", "note")
_WIDEST_NOTE = 80


def table(rows: Sequence[Row]) -> str:
    """Rows in columns. A scope that failed has the reason in the column `note`."""
    eager = eager_of(rows)
    cells = [_HEAD, *(_cells(row, eager) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD) - 1)]
    lines: list[str] = []
    for first, *middle, last in cells:
        numbers = (f"{cell:>{width}}" for cell, width in zip(middle, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *numbers, last]).rstrip())
    return "\n".join(lines)


def _cells(row: Row, eager: Measured | None) -> tuple[str, ...]:
    note = row.note if len(row.note) <= _WIDEST_NOTE else f"{row.note[: _WIDEST_NOTE - 3]}..."
    measured = row.measured
    if measured is None:
        return (row.scope, *("-",) * (len(_HEAD) - 2), note)
    return (
        row.scope,
        brief(measured.first),
        _three_digits(measured.seconds * 1e3),
        _three_digits(1 / measured.seconds),
        "-" if eager is None else f"{eager.seconds / measured.seconds:.2f}x",
        f"{measured.peak:.0f}",
        note,
    )


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def eager_of(rows: Sequence[Row]) -> Measured | None:
    """The measurement of eager, or None if it failed."""
    return next((row.measured for row in rows if row.scope == EAGER), None)


def document(rows: Sequence[Row], verdict: Verdict) -> dict[str, Any]:
    """Rows and verdict as plain values: seconds, MiB, the first losses."""
    eager = eager_of(rows)
    return {
        "rows": [_plain(row, eager) for row in rows],
        "recommended": verdict.scope,
        "why": verdict.why,
        "pays_back_after": verdict.pays_back_after,
    }


def _plain(row: Row, eager: Measured | None) -> dict[str, Any]:
    measured = row.measured
    plain: dict[str, Any] = {"scope": row.scope, "note": row.note, "differs": row.differs}
    if measured is not None:
        plain |= {
            "first_step_seconds": measured.first,
            "step_seconds": measured.seconds,
            "steps_per_second": 1 / measured.seconds,
            "against_eager": None if eager is None else eager.seconds / measured.seconds,
            "peak_mib": measured.peak,
            "losses": list(measured.losses),
            "cache_hits": measured.cache_hits,
            "cache_misses": measured.cache_misses,
        }
    if row.failed is not None:
        plain["error"] = attrs.asdict(row.failed, filter=lambda field, _: field.name in ("kind", "text"))
    return plain
