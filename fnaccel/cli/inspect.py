"""`fnaccel inspect`: the contents of a checkpoint, without a model and without executing code from it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fnaccel.checkpoint import checkpoints, reading
from fnaccel.checkpoint.disk.directory import Directory, attempts
from fnaccel.checkpoint.disk.finding import open_checkpoint
from fnaccel.checkpoint.format.dtypes import name_of
from fnaccel.checkpoint.format.manifest import Manifest
from fnaccel.checkpoint.format.values import decode
from fnaccel.cli.options.inspect import parser
from fnaccel.cli.terminal import columns, printable
from fnaccel.errors import ArgumentError, CheckpointError
from fnaccel.interchange.sources.detect import detect, opened
from fnaccel.interchange.sources.safetensors_files import files_of
from fnaccel.state import TrainState
from fnaccel.texts import counted, size_of

_PROG = "fnaccel inspect"


@attrs.frozen
class _Row:
    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    pieces: int
    files: int


@attrs.frozen
class _Report:
    """The printed facts of one checkpoint."""

    format: str
    path: str
    steps: tuple[int, ...]
    host: Mapping[str, Any]
    written_by: Mapping[str, Any]
    metadata: Any
    metrics: Mapping[str, Any]
    files: Mapping[str, int]
    rows: tuple[_Row, ...]

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Tensors and bytes by the first part of a path."""
        totals: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            group = row.path.partition("/")[0] if "/" in row.path else "tensors"
            count, size = totals.get(group, (0, 0))
            totals[group] = count + 1, size + row.bytes
        return totals


def run(arguments: Sequence[str]) -> int:
    """Print the contents of a checkpoint.

    Returns:
        0, or 1 if `--verify` found damage.

    Raises:
        CheckpointError: no checkpoint can be read there.

    Example:
        >>> path = fa.save("runs/gpt", state)
        >>> run(["runs/gpt", "--verify"])
        fnaccel checkpoint ...runs/gpt/step-0000000000
        ...
        verified: 1 files are what was written
        0
    """
    options = parser().parse_args(arguments)
    form = detect(options.path)
    if form not in ("fnaccel", "safetensors"):
        raise CheckpointError(
            f"this is a checkpoint of {form}, and only those of fnaccel and safetensors are shown",
            where=_PROG,
            fix=f"fnaccel convert {options.path} TARGET, then inspect that",
        )
    if form == "safetensors":
        report, damage = _foreign(options.path), []
        if options.verify:
            raise ArgumentError(
                "safetensors files have no checksums to compare",
                where=f"{_PROG} --verify",
                fix="leave it out",
            )
    else:
        report, damage = _checkpoint(options.path, options.step, verify=options.verify)
    _print_json(report, damage, verified=options.verify) if options.json else _print(report)
    for line in damage:
        print(f"damaged: {printable(line)}", file=sys.stderr)
    if options.verify and not damage and not options.json:
        print(f"verified: {len(report.files)} files are what was written")
    return 1 if damage else 0


def _checkpoint(path: Path, step: int | None, *, verify: bool) -> tuple[_Report, list[str]]:
    """One checkpoint of `fa.save` and a line per damaged file. Damage is printed and raises no error."""
    for last in attempts():
        with contextlib.ExitStack() as stack:
            directory, manifest = open_checkpoint(path, step, f"reading {path}", stack, complete=False)
            report = _own(path, directory.path, manifest)
            damage = _damage(directory, manifest, verify=verify)
            if last or not damage or not directory.is_replaced():
                return report, damage
    raise AssertionError("the last attempt returns")


def _own(root: Path, path: Path, manifest: Manifest) -> _Report:
    rows = tuple(
        _Row(
            stored.path,
            name_of(stored.dtype),
            stored.shape,
            sum(piece.box.numel for piece in stored.pieces) * stored.dtype.itemsize,
            len(stored.pieces),
            len({piece.file for piece in stored.pieces}),
        )
        for stored in manifest.tensors.values()
    )
    tree = decode(manifest.tree, _no_tensor)
    host: dict[str, Any] = {"step": manifest.step}
    if isinstance(tree, TrainState):
        host |= {"updates": tree.updates, "epoch": tree.data.epoch, "samples": tree.data.samples}
        host |= {"seed": tree.rng.root}
        host = {name: value for name, value in host.items() if value is not None}  # a tensor: in the table
    return _Report(
        format="fnaccel",
        path=str(path),
        steps=tuple(checkpoint.step for checkpoint in checkpoints(root)),
        host=host,
        written_by=manifest.written_by,
        metadata=decode(manifest.metadata, _no_tensor),
        metrics=manifest.metrics,
        files={name: record.size for name, record in manifest.files.items()},
        rows=rows,
    )


def _no_tensor(_: str) -> None:
    """Decode a tensor as None, if only the other values are needed."""


def _foreign(path: Path) -> _Report:
    with opened(path, "safetensors") as source:
        rows = tuple(
            _Row(name, name_of(tensor.dtype), tensor.shape, tensor.nbytes, 1, 1)
            for name, tensor in source.weights.items()
        )
    files = {file.name: file.stat().st_size for file in files_of(path)}
    return _Report("safetensors", str(path), (), {}, {}, None, {}, files, rows)


def _damage(directory: Directory, manifest: Manifest, *, verify: bool) -> list[str]:
    """One line for each file that differs from the manifest. All files are checked."""
    lines: list[str] = []
    for name in manifest.files:
        try:
            line = reading.damage_of(directory, manifest, name, verify=verify)
        except CheckpointError as error:
            line = error.what
        except OSError as error:
            line = f"{name} can't be read: {error.strerror}"
        if line is not None:
            lines.append(line)
    return lines


def _print(report: _Report) -> None:
    print(f"{report.format} checkpoint {printable(report.path)}")
    if len(report.steps) > 1:
        print(f"steps      {', '.join(map(str, report.steps))}")
    for name, value in report.host.items():
        print(f"{name:<10} {printable(str(value))}")
    for name, value in report.written_by.items():
        first_line, *more_lines = printable(f"{name} {value}", keep="\n").splitlines() or [""]
        print(
            "\n".join([f"written by {first_line}", *(f"           {line}" for line in more_lines)])
        )  # a plan has lines
    if report.metadata is not None:
        print(f"metadata   {printable(json.dumps(report.metadata, default=str))}")
    if report.metrics.get("values"):
        print(f"metrics    {printable(json.dumps(report.metrics['values']))}")
    cells = [("path", "dtype", "shape", "size", "layout")]
    for row in sorted(report.rows, key=lambda row: row.path):
        layout = f"{row.pieces} pieces in {row.files} files" if row.pieces != 1 else "whole"
        cells.append((row.path, row.dtype, str(list(row.shape)), size_of(row.bytes), layout))
    print()
    print(columns(cells, "<<<>"))
    print()
    for group, (count, size) in sorted(report.totals.items()):
        print(f"{printable(group)}: {count} tensors, {size_of(size)}")
    size = size_of(sum(row.bytes for row in report.rows))
    print(f"in all: {len(report.rows)} tensors, {size}, {counted(len(report.files), 'file')}")


def _print_json(report: _Report, damage: Sequence[str], *, verified: bool) -> None:
    document = attrs.asdict(report) | {
        "tensors": [attrs.asdict(row) for row in report.rows],
        "totals": {group: {"tensors": n, "bytes": size} for group, (n, size) in report.totals.items()},
        "damaged": list(damage) if verified or damage else None,
    }
    del document["rows"]
    print(json.dumps(document, indent=1, default=str))
