"""Safetensors as others write them: one file, several, with the index of Hugging Face or without.

Shards of torch's `HuggingFaceStorageWriter` are joined too: each has the offsets of its blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from fnaccel.checkpoint.format.boxes import Box, make_up, whole
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.found import Found, Source, damaged
from fnaccel.checkpoint.format.manifest import NAME
from fnaccel.checkpoint.reading import Block, Mapped
from fnaccel.errors import CheckpointError

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_INDEX = "*.safetensors.index.json"
_INDEX_NAME = re.compile(r"(\A|\.)index(\.[^.]+)?\.json\Z")
_SHARDING = "DCP_SHARDING_INFO"  # the key of torch.distributed.checkpoint's Hugging Face writer


def open_safetensors(path: Path, stack: ExitStack, index: Path | None = None) -> Source:
    """A file, or a directory of files. They are closed with `stack`.

    Args:
        path: of the file or of the directory.
        stack: closes the files.
        index: which index of the directory. By default the usual one, if there is one.

    Raises:
        CheckpointError: damaged, contradictory, or none there.
    """
    mapped = Mapped()
    stack.callback(mapped.close)
    pieces: dict[str, list[tuple[Path, Block]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    same: dict[str, str] = {}
    files, listed = _listed(path, index)
    for file in files:
        handle = mapped.handle(file)
        notes: Mapping[str, str] = handle.metadata() or {}
        placed = _placed(notes, file)
        for name in handle.keys():  # noqa: SIM118 - not a dict
            cut = handle.get_slice(name)
            dtype, shape = _DTYPES.get(cut.get_dtype()), tuple(cut.get_shape())
            if dtype is None:
                raise damaged(f"{name} has the dtype {cut.get_dtype()}, which torch lacks", file)
            box = Box(placed[name], shape) if len(placed.get(name, ())) == len(shape) > 0 else whole(shape)
            if name in pieces and (name not in placed or pieces[name][0][1].dtype != dtype):
                raise damaged(f"{name} is in {file.name} and in another file", path)
            pieces.setdefault(name, []).append((file, Block(name, dtype, box)))
            ends = tuple(map(sum, zip(box.offset, shape, strict=True)))
            shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
        same |= {
            key: stored_name
            for key, stored_name in notes.items()
            if stored_name in pieces and key not in pieces
        }
    lost = sorted(listed - pieces.keys() - same.keys())
    if lost:
        raise damaged(f"{lost[0]} is in the index, and in none of its files ({len(lost)} in all)", path)
    weights = {name: _found(mapped, name, parts, shapes[name], path) for name, parts in pieces.items()}
    return Source(format="safetensors", path=path, weights=weights, same=same)


def files_of(path: Path) -> list[Path]:
    """The files that make up one checkpoint.

    Raises:
        CheckpointError: the index names a file that is missing or lies elsewhere.
    """
    return _listed(path)[0]


def _listed(path: Path, index: Path | None = None) -> tuple[list[Path], set[str]]:
    """The files, and the tensors that an index says are in them."""
    if path.is_file():
        return [path], set()
    indices = [index] if index is not None else sorted(path.glob(_INDEX))
    main = path / "model.safetensors"
    if not indices and not main.is_file():
        indices = [other for other in indices_in(path) if set(suffixes_of(other)) == {".safetensors"}]
    if indices:
        return indexed(indices[0])
    return [main] if main.is_file() else sorted(path.glob("*.safetensors")), set()


def is_index(name: str) -> bool:
    """Whether a file is named as an index of shards: `weight_map.index.json`, `model.index.fp16.json`."""
    return _INDEX_NAME.search(name) is not None


def indices_in(folder: Path) -> list[Path]:
    """The files of a folder that are named as an index of shards, by name."""
    return sorted(file for file in folder.iterdir() if is_index(file.name) and file.is_file())


def suffixes_of(index: Path) -> list[str]:
    """The suffixes of the files that an index lists, each once. Empty if it can't be read."""
    try:
        return sorted({Path(name).suffix for name in _weight_map(index)[1]})
    except (CheckpointError, TypeError, OSError):
        return []


def _weight_map(index: Path) -> tuple[set[str], set[str]]:
    """The tensors that an index lists, and the names of their files.

    Raises:
        CheckpointError: it is no index.
    """
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        return set(listed), set(listed.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(f"{index.name} has no weight_map", index) from None


def indexed(index: Path, pattern: re.Pattern[str] = NAME) -> tuple[list[Path], set[str]]:
    """The files and the tensors that an index of Hugging Face lists.

    Args:
        index: the path of the index file.
        pattern: the allowed names of its files.

    Raises:
        CheckpointError: it is none, or names a file that is missing or lies elsewhere.
    """
    tensors, names = _weight_map(index)
    for name in sorted(names, key=str):
        if not isinstance(name, str) or not pattern.fullmatch(name):
            raise damaged(f"{index.name} names the file {name!r}, which can't be one of its own", index)
        if not (index.parent / name).is_file():
            raise damaged(f"{name} is missing, and {index.name} lists it", index)
    return [index.parent / name for name in sorted(names)], tensors


def _placed(notes: Mapping[str, str], file: Path) -> dict[str, tuple[int, ...]]:
    """The offsets of the blocks in a shard, by name. Empty for a file of whole tensors."""
    if _SHARDING not in notes:
        return {}
    try:
        return {name: tuple(map(int, e["saved_offsets"])) for name, e in json.loads(notes[_SHARDING]).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(f"{file.name} has no offsets of its blocks", file) from None


def _found(
    mapped: Mapped,
    name: str,
    parts: list[tuple[Path, Block]],
    shape: tuple[int, ...],
    path: Path,
) -> Found:
    # blocks that overlap would leave values elsewhere that nobody wrote
    if not make_up([block.box for _, block in parts], whole(shape)):
        raise damaged(f"the blocks of {name} do not make up {list(shape)}", path)

    def read(box: Box, out: torch.Tensor) -> None:
        for file, block in parts:
            mapped.read(file, [(block, box, out)])

    def check(box: Box) -> None:
        for file, block in parts:
            mapped.read(file, [(block, box, None)])

    (file, block), *others = parts

    def view() -> torch.Tensor:
        return mapped.view(file, block.name)

    return Found(block.dtype, shape, read, check=check, view=None if others else view)
