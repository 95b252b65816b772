"""From a path to a `Source`: which format it is, told from the files, and who reads it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, get_args

import attrs

from fnaccel.checkpoint.format.found import Source
from fnaccel.errors import CheckpointError, UnknownNameError, nearest
from fnaccel.interchange.sources.accelerate import is_accelerate, open_accelerate
from fnaccel.interchange.sources.dcp import open_dcp
from fnaccel.interchange.sources.deepspeed import find_tag, open_deepspeed
from fnaccel.interchange.sources.fnaccel_files import is_own, open_own
from fnaccel.interchange.sources.safetensors_files import is_index, open_safetensors, suffixes_of
from fnaccel.interchange.sources.torch_files import SUFFIXES, open_torch, torch_indices
from fnaccel.texts import first_of

Format = Literal["accelerate", "dcp", "deepspeed", "fnaccel", "safetensors", "torch"]
FORMATS = get_args(Format)


@contextlib.contextmanager
def opened(
    path: Path, form: str | None = None, *, trust: bool = False, step: int | None = None
) -> Generator[Source]:
    """A checkpoint of any format, for as long as the body runs.

    Args:
        path: a file, a directory, or the index of a directory.
        form: one of `FORMATS`. By default detected from the files.
        trust: whether pickles may be loaded.
        step: which step of an fnaccel root.

    Raises:
        CheckpointError: no known format, damaged, or not trusted.
        UnknownNameError: no such format.
    """
    form = detect(path) if form is None else form
    index = path if is_index(path.name) and path.is_file() else None
    path = path if index is None else path.parent
    if form not in FORMATS:
        raise UnknownNameError(
            f"no format is called {form!r}", where=f"reading {path}", fix=nearest(form, FORMATS)
        )
    elif not is_own(path) and not path.exists():
        raise _missing(path)
    before = _identity(path)
    with ExitStack() as stack:
        if form == "fnaccel":
            source = open_own(path, stack, step)
        elif form == "safetensors":
            source = open_safetensors(path, stack, index)
        elif form == "torch":
            source = open_torch(path, index)
        elif form == "accelerate":
            source = open_accelerate(path, stack, trust=trust)
        elif form == "dcp":
            source = open_dcp(path, trust=trust)
        else:
            source = open_deepspeed(path, trust=trust)
        if not source.digest:  # a checkpoint of fnaccel stays open. Any other is opened by its path
            source = attrs.evolve(source, check_unchanged=functools.partial(_check_same, path, before))
            source.check_unchanged()
        if not source.weights:
            raise CheckpointError(
                f"no weights were found in it, read as {form}",
                where=f"reading {path}",
                fix=f"give the directory or file of the weights, or format= one of {', '.join(FORMATS)}",
            )
        _check_extent(source)
        yield source


def _check_extent(source: Source) -> None:
    """Check that the tensors of a source are not far larger than its files.

    In a file of `torch.save` one stored value can stand for any number of values (`x.expand`), and a tensor
    can have any number of names. To write these out would fill the disk.

    Raises:
        CheckpointError: they are.
    """
    slots = [*source.slots.values(), *(source.numbered.slots.values() if source.numbered else ())]
    tensors = [*source.weights.items(), *source.averages.items()]
    tensors += [(f"a moment {slot}", tensor) for entry in slots for slot, tensor in entry.items()]
    stored = _bytes_at(source.path) if source.file_bytes is None else source.file_bytes
    total = sum(tensor.nbytes for _, tensor in tensors)
    if total <= _MOST_SHARED * stored:
        return
    name, _ = max(tensors, key=lambda tensor: tensor[1].nbytes)
    raise CheckpointError(
        f"{total:,} bytes of values are to be read from {stored:,} bytes of files: tensors are expanded, or "
        f"one is there under many names. The largest is {name}",
        where=f"reading {source.path}",
        fix="save tensors with values of their own: {name: x.clone() for name, x in state_dict.items()}",
    )


_MOST_SHARED = 64
"""How many times the bytes of its files a source may hold: layers may share weights, not without end."""


def _bytes_at(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _identity(path: Path) -> tuple[int, ...]:
    """Tells whether a path leads to the same directory, or to the same file with the same contents."""
    try:
        status = path.stat()
    except OSError:
        return ()
    inode = status.st_dev, status.st_ino
    return inode if path.is_dir() else (*inode, status.st_size, status.st_mtime_ns)


def _check_same(path: Path, before: tuple[int, ...]) -> None:
    if _identity(path) != before:
        raise CheckpointError(
            f"{path} was replaced while it was read", where=f"reading {path}", fix="read it again"
        )


def detect(path: Path) -> str:
    """Detect the format of a file or directory. Opens no pickle.

    Raises:
        CheckpointError: nothing is there, or nothing that is known.
    """
    if is_own(path):  # before all else: while a save replaces it, its name may be missing for a moment
        return "fnaccel"
    if not path.exists():
        raise _missing(path)
    if path.is_file():
        form = _of_file(path)
    elif not path.is_dir():
        raise CheckpointError(
            f"{path} is neither a file nor a directory",
            where=f"reading {path}",
            fix="give the file or directory that holds the weights",
        )
    else:
        names = [file.name for file in path.iterdir()]
        form = _of_directory(path, names)
    if form is None:
        present = (
            path.name if path.is_file() else ", ".join(sorted(file.name for file in path.iterdir())[:20])
        )
        inside = [str(each) for each in sorted(path.glob("*/")) if is_own(each)]
        raise CheckpointError(
            f"this is no checkpoint of a known format ({', '.join(FORMATS)}); found: {present or 'nothing'}",
            where=f"reading {path}",
            fix=f"give {first_of(inside) or 'the file or directory that holds the weights'}",
        )
    return form


def _of_file(path: Path) -> str | None:
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    if is_index(path.name):
        suffixes = suffixes_of(path)
        if suffixes == [".safetensors"]:
            return "safetensors"
        return "torch" if suffixes and set(suffixes) <= set(SUFFIXES) else None
    return "torch" if path.suffix in SUFFIXES else None


def _of_directory(path: Path, names: list[str]) -> str | None:
    if find_tag(path) is not None:  # before Accelerate's: it puts its own files beside
        return "deepspeed"
    if is_accelerate(path):
        return "accelerate"
    if ".metadata" in names:
        return "dcp"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    files = [name for name in names if name.endswith(SUFFIXES)]
    weight_files = {"pytorch_model.bin", "pytorch_model.bin.index.json"} & set(names)
    return "torch" if weight_files or len(files) == 1 or torch_indices(path) else None


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(f"there is nothing at {path}", where=f"reading {path}", fix="check the path")
