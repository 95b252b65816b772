"""Writes a foreign checkpoint as an fnaccel checkpoint, tensor by tensor, for `fnaccel convert`.

It holds `{"params": {name: tensor}}`, and if the source has moments with names, `"opt"` and `"updates"`.
Only a model can tell parameters from buffers: `fa.interchange.adopt` separates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fnaccel.checkpoint import provenance
from fnaccel.checkpoint.disk import durable
from fnaccel.checkpoint.disk import publish as commit
from fnaccel.checkpoint.disk.durable import FileRecord
from fnaccel.checkpoint.format.boxes import whole
from fnaccel.checkpoint.format.found import Found, Source, unescaped
from fnaccel.checkpoint.format.items import Item, check_items, of_found, pick
from fnaccel.checkpoint.format.manifest import Manifest, Piece, Stored, file_name
from fnaccel.checkpoint.format.safetensors import Progress, spread, write_items
from fnaccel.checkpoint.format.walk import child
from fnaccel.errors import ArgumentError, CheckpointError
from fnaccel.interchange.exporting import Style, dtype_in
from fnaccel.interchange.parameter_names import is_number
from fnaccel.texts import bytes_in


def own_items(source: Source, style: Style) -> list[Item]:
    """The tensors to write, under paths of a state.

    Raises:
        CheckpointError: moments without names.
        ArgumentError: patterns that match nothing, nothing left to write.
    """
    tensors: dict[str, Found] = {}
    path_of = _joined if source.format == "fnaccel" else _escaped
    weights = {**source.weights, **(source.averages if style.ema else {})}
    for name, value in weights.items():
        tensors[path_of("buffers" if name in source.buffers else "params", name)] = value
    if style.ema and not source.averages:
        raise ArgumentError("there are no averages", where=style.where, fix="leave out --ema")
    for name, slots in source.slots.items():
        tensors |= {
            path_of("opt", name, slot): tensor for slot, tensor in slots.items() if not is_number(slot)
        }
    if source.numbered is not None:
        for number, slots in source.numbered.slots.items():
            tensors |= {path_of("opt", str(number), slot): tensor for slot, tensor in slots.items()}
    picked = pick(tensors, style.only, style.skip, style.rename, style.where)
    if source.numbered is not None and any(path.startswith("opt/") for path in picked):
        raise CheckpointError(
            "the optimizer's state has numbers instead of names, which only a model can give",
            where=style.where,
            fix="--skip 'opt/*' leaves it out. fa.interchange.adopt(path, like=state) reads the source",
        )
    items = of_found(picked, dtype_in(style))
    check_items(items, style.where)
    return items


def write_own(
    root: Path, source: Source, style: Style, *, step: int | None = None, progress: Progress | None = None
) -> Path:
    """Write a checkpoint under a root as `fa.save` does, in this process alone. Returns its directory.

    Args:
        root: created if missing.
        source: an opened checkpoint.
        style: the options of the conversion.
        step: the number in its name. By default the step of the source, or 0.
        progress: called with the bytes written.

    Raises:
        CheckpointError: that step is there already.
        ArgumentError: see `own_items`.
    """
    items = own_items(source, style)
    number = next(
        (candidate for candidate in (step, source.step, source.updates) if candidate is not None), 0
    )
    if any(checkpoint.step == number for checkpoint in commit.checkpoints(root)):
        raise CheckpointError(
            f"{root} has a checkpoint of step {number}", where=style.where, fix="give another directory"
        )
    commit.check_free(root, number, style.where)
    files = spread(items, bytes_in(style.max_shard_size, style.where, least=1))
    staged = commit.stage(root, number)
    with commit.held(staged):
        try:
            source.verify(0, 1)  # damaged values would get checksums of their own
            stored: dict[str, Stored] = {}
            records: dict[str, FileRecord] = {}
            for place, shard in enumerate(files):
                name = file_name(place, len(files))
                records[name] = write_items(staged / name, shard, progress)
                stored |= {item.name: _stored(item, name) for item in shard}
            source.check_unchanged()
            return commit.commit(staged, root, _manifest(number, stored, records, source), style.where)
        except BaseException:
            durable.remove(staged)
            raise


def _joined(*paths: str) -> str:
    return "/".join(paths)


def _escaped(section: str, *keys: str) -> str:
    path = section
    for key in keys:
        path = child(path, key)
    return path


def _stored(item: Item, file: str) -> Stored:
    pieces = (Piece(file, whole(item.shape)),) if torch.Size(item.shape).numel() else ()
    return Stored(item.name, item.dtype, item.shape, pieces)


def _manifest(
    step: int, stored: Mapping[str, Stored], records: Mapping[str, FileRecord], source: Source
) -> Manifest:
    sections: dict[str, Any] = {}
    for path in stored:
        section, *keys = path.split("/")
        node: dict[str, Any] = sections.setdefault(section, {"dict": {}})
        for key in keys[:-1]:
            node = node["dict"].setdefault(unescaped(key), {"dict": {}})
        node["dict"][unescaped(keys[-1])] = {"tensor": path}
    updates = source.count_updates() if "opt" in sections else None
    if updates is not None:
        sections["updates"] = updates
    return Manifest(
        step=step,
        tree={"dict": sections},
        metadata={"dict": {"converted from": source.format}},
        tensors=stored,
        files=records,
        written_by=provenance.describe(None, 1),
    )
