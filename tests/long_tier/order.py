"""The order of the long tier, and what may start before a deadline. Pure functions of rows, changed files and seconds.

Three groups: deliberate bugs whose file changed, then the rows of rooms, tests and pages that changed, then the rest.
Each group is shuffled, so that it is not always the same rows for which there is no time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

import attrs

START = 8.0
"""Seconds until a process of pytest has imported torch and started ranks."""

ENVIRONMENT = 90.0
"""Seconds to make the environment of a row that needs another one than the rest."""

UNKNOWN = 15.0
"""Seconds of a row if neither its test nor its file has a time."""

CHUNK = 80.0
"""Seconds of the rows of a chunk: a longer one might not fit before the deadline, and a shorter one is mostly START."""

USUAL = ".venv/.dev"
"""The make target of the environment of most rows."""

GROUPS = ("deliberate bugs whose file changed", "rows of rooms, tests and pages that changed", "rest")


@attrs.frozen
class Row:
    """One row of a test. `bug_in` is the file that a deliberate bug changes, such as `fnaccel/engine/totals.py`."""

    id: str
    bug_in: str | None = None
    target: str = USUAL
    python: str = ".venv/bin/python"

    @property
    def file(self) -> str:
        """The file of the test."""
        return self.id.partition("::")[0]

    @property
    def function(self) -> str:
        """The id without its parameters."""
        return self.id.partition("[")[0]


@attrs.frozen
class Chunk:
    """Rows of one file that one process runs, and the seconds that they should take."""

    group: str
    rows: tuple[Row, ...]
    seconds: float


def group_of(row: Row, changed: Collection[str]) -> str:
    """The group of a row. `changed` has paths from the root of the checkout."""
    if row.bug_in is not None and row.bug_in in changed:
        return GROUPS[0]
    rooms = {f"tests/{path.split('/')[1]}/" for path in changed if path.startswith("fnaccel/")}
    pages = {path.rpartition("/")[2] for path in changed if path.endswith(".md")}
    near = row.file in changed or row.file.startswith(tuple(rooms)) or any(page in row.id for page in pages)
    return GROUPS[1] if near else GROUPS[2]


def seconds_of(rows: Iterable[Row], table: Mapping[str, float]) -> dict[Row, float]:
    """Expected seconds of each row: the mean of its test in the table, else the median of the tests in its file."""
    in_file: dict[str, list[float]] = {}
    for function, value in table.items():
        in_file.setdefault(function.partition("::")[0], []).append(value)
    return {row: table.get(row.function, median(in_file.get(row.file, [UNKNOWN]))) for row in rows}


def in_order(
    rows: Sequence[Row], changed: Collection[str], seed: str, table: Mapping[str, float]
) -> list[Chunk]:
    """All rows once, as chunks in the order in which they start. The same seed gives the same order."""
    seconds = seconds_of(rows, table)
    groups: dict[str, list[Chunk]] = {group: [] for group in GROUPS}
    ordered = sorted(rows, key=lambda row: GROUPS.index(group_of(row, changed)))
    for (group, _, _), members in itertools.groupby(
        ordered, key=lambda row: (group_of(row, changed), row.file, row.target)
    ):
        groups[group] += _cut(group, members, seconds)
    for chunks in groups.values():
        random.Random(seed).shuffle(chunks)
    return [chunk for group in GROUPS for chunk in groups[group]]


def _cut(group: str, rows: Iterable[Row], seconds: Mapping[Row, float]) -> list[Chunk]:
    parts: list[list[Row]] = []
    for row in rows:
        if parts and sum(seconds[other] for other in parts[-1]) + seconds[row] <= CHUNK:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [Chunk(group, tuple(part), _start(part[0]) + sum(seconds[row] for row in part)) for part in parts]


def _start(row: Row) -> float:
    return START if row.target == USUAL else START + ENVIRONMENT


def next_chunk(waiting: Sequence[Chunk], seconds_left: float) -> Chunk | None:
    """The first chunk that should end in time, or None."""
    return next((chunk for chunk in waiting if chunk.seconds <= seconds_left), None)
