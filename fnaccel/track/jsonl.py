"""Metrics as lines of JSON in a file: no dependency, no server, readable while the run goes on.

One object a line. `{"time": ..., "config": {...}}` begins a run (with `"more": true` it adds to the config),
`{"step": ..., "time": ..., "loss": ...}` is a step, and time is in seconds since 1970. JSON has no NaN: a
number that is not finite is `"NaN"`, `"Infinity"` or `"-Infinity"`. Strict readers take these strings and
`read_jsonl` turns them back, so a text in a metric that is one of these words is read as the number.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fnaccel.errors import ArgumentError
from fnaccel.track.library import LeftOut, check_offline, not_started
from fnaccel.track.plain import number_of
from fnaccel.track.tracker import Ranks
from fnaccel.tree import Tree
from fnaccel.world.paths import local_path, named_errors
from fnaccel.world.plain_data import check_plain

_RESERVED = ("step", "time", "config")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_LONGEST = 1 << 24
"""Bytes of a line."""


class JsonlTracker:
    """Appends a line for each step to a file. Runs that share a file follow each other in it.

    If `fa.scan` goes on at an earlier step than the file ends with, the later rows of that run are taken out.

    Each line is one write, so a crash tears the last line at most. The next run begins a new line.

    Args:
        path: the file. It and its folder are made if they are missing.
        directory: if no path is given, the file is `metrics.jsonl` in this folder, by default `runs`.
        offline: no effect: nothing needs a network.
        ranks: the ranks that write. With `"all"` each rank has a file of its own, such as `gpt.rank1.jsonl`.

    Example:
        >>> from fnaccel.track import JsonlTracker
        >>> tracker = JsonlTracker("gpt.jsonl")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=tracker):
        ...     pass
    """

    in_loop = True  # a write of one line to a file is faster than a queue, and a crash loses no line

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
    ) -> None:
        check_offline("JsonlTracker", offline, {})
        folder = local_path("runs" if directory is None else directory, "JsonlTracker")
        self._base = folder / "metrics.jsonl" if path is None else local_path(path, "JsonlTracker")
        self._file: int | None = None
        self._rank: int | None = None
        self.ranks: Ranks = ranks
        self._left_out = LeftOut(type(self).__name__)

    def __repr__(self) -> str:
        return f"JsonlTracker({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The file of this rank."""
        if self._rank is None:
            return self._base
        return self._base.with_name(f"{self._base.stem}.rank{self._rank}{self._base.suffix}")

    @property
    def native(self) -> Path:
        """The file."""
        return self.path

    def use_rank(self, rank: int) -> None:
        """Add the rank to the name of the file."""
        self._rank = rank

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the file and write the config. Values that JSON can't hold are written as text.

        Raises:
            OSError: the file can't be written.
        """
        self.finish()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open(config)
        self._write({"time": time.time(), "config": dict(config)})

    def _open(self, config: Mapping[str, Any]) -> None:
        """Open the file, without the rows of steps after the one at which the run was resumed."""
        if "resumed_at" in config and self.path.exists():
            _roll_back(self.path, config["resumed_at"])
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        end = os.fstat(self._file).st_size
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            os.write(self._file, b"\n")

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Write further entries of the config, in a line with `"more": true`."""
        if "resumed_at" in config and self._file is not None:
            self.finish()
            self._open(config)
        self._write({"time": time.time(), "config": dict(config), "more": True})

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's line: numbers, text, None and lists of these. Others are named in a warning.

        Raises:
            ArgumentError: before `start`, or a metric has the name of another column.
            OSError: the disk is full.
        """
        taken = [name for name in _RESERVED if name in metrics]
        if taken:
            raise ArgumentError(
                f"a metric is called {taken[0]!r}, as a column of every line is",
                where=repr(self),
                fix="return it under another name",
            )
        values: dict[str, Any] = {}
        for name, value in metrics.items():
            number = None if isinstance(value, str) else number_of(value)
            if number is not None:
                values[name] = number
            elif _is_plain(value):
                values[name] = value
            else:
                self._left_out.warn(name, f"JSON can't hold this {type(value).__name__}")
        self._write({"step": step, "time": time.time(), **values})

    def finish(self) -> None:
        """Close the file. Every line has been written already."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            raise not_started(repr(self))
        line = json.dumps(_strict(record), default=str, allow_nan=False).encode() + b"\n"
        with named_errors(self.path):
            written = os.write(self._file, line)
        if written < len(line):
            # the disk is full: without this part the next line can be whole
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(
                errno.ENOSPC,
                f"only {written} of {len(line)} bytes of a line could be written",
                str(self.path),
            )


def _roll_back(path: Path, step: int) -> None:
    """Take the rows of later steps out of the last run in a file, which may have been resumed before."""
    lines = path.read_bytes().splitlines(keepends=True)
    records = [_parse(line) or {} for line in lines]
    begins = [
        at for at, each in enumerate(records) if "config" in each and "resumed_at" not in each["config"]
    ]
    begin = max((at for at in begins if not records[at].get("more")), default=0)
    later = [at for at, each in enumerate(records) if at > begin and each.get("step", 0) > step]
    if later:
        kept = path.with_name(f".{path.name}.kept")
        kept.write_bytes(b"".join(line for at, line in enumerate(lines) if at not in {*later}))
        kept.replace(path)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file that `JsonlTracker` wrote, in order. A torn line is left out.

    Args:
        path: the file. A run may still be writing it.

    Raises:
        ArgumentError: a line is no record, and no crash explains it.

    Example:
        >>> from fnaccel.track import JsonlTracker, read_jsonl
        >>> tracker = JsonlTracker("gpt.jsonl")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=tracker):
        ...     pass
        >>> [record["step"] for record in read_jsonl("gpt.jsonl") if "step" in record]
        [1, 2, 3]
    """
    return list(records_of(path))


def records_of(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of `read_jsonl` one by one, in memory for one line.

    Raises:
        ArgumentError: as `read_jsonl`.
    """
    torn: int | None = None
    with local_path(path, "fa.track.read_jsonl").open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if line == b"\n":
                continue
            record = _parse(line)
            if torn is not None and (record is None or "config" not in record):
                raise ArgumentError(
                    f"line {torn} is no record", where=str(path), fix="give a file that JsonlTracker wrote"
                )
            torn = number if record is None else None
            if record is not None:
                yield record


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. Of a line that no tracker wrote, since it is too long, the beginning."""
    while line := file.readline(_LONGEST):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record: Any = json.loads(line)
        if not isinstance(record, dict):
            return None
        if "config" in record:
            return check_plain(record) if isinstance(record["config"], dict) else None
    except (ValueError, RecursionError):
        return None
    return {name: float(value) if value in _NOT_FINITE else value for name, value in record.items()}


def _is_plain(value: Tree) -> bool:
    """Whether JSON can hold the value as it is."""
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def _strict(value: Tree) -> Any:
    """The value with words for the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return value
