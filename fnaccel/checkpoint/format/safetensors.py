"""Items as safetensors files: how they are spread over files, and each written while it is made.

The format is https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON header, the data. One block
is in memory at a time. The library's own writer needs all tensors at once, computes no checksum and does
not sync.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fnaccel.checkpoint.disk.durable import FileRecord, write_file
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.items import Item, bytes_of
from fnaccel.errors import CheckpointError

Progress = Callable[[int], None]
"""Called with the number of bytes that were written since."""


def spread(items: Sequence[Item], most: int) -> list[list[Item]]:
    """Items in their order, in files of at most `most` bytes. A larger item has its own file."""
    files: list[list[Item]] = []
    size = 0
    for item in items:
        if not files or (size + item.nbytes > most and size):
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.nbytes
    return [widest_first(file) for file in files]


def widest_first(items: Iterable[Item]) -> list[Item]:
    """Items in an order in which each starts at a multiple of its own element size."""
    return sorted(items, key=operator.attrgetter("dtype.itemsize"), reverse=True)


def write_items(
    path: Path,
    items: Sequence[Item],
    progress: Progress | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write one file, and wait until the device holds it.

    Args:
        path: a new file.
        items: widest first.
        progress: called as bytes are written.
        metadata: further texts for the header.

    Raises:
        OSError: the file can't be written.
        CheckpointError: a tensor can't be read, or has another size than it said.
    """
    return write_file(path, _chunks(items, progress, metadata or {}))


def drain(items: Sequence[Item]) -> None:
    """Make all values and drop them: a rank that does not write takes part in gathering so."""
    for item in items:
        for _ in item.blocks():
            pass


def _chunks(
    items: Sequence[Item], progress: Progress | None, metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    yield memoryview(_header(items, metadata))
    for item in items:
        size = 0
        for block in item.blocks():
            size += block.nbytes
            yield bytes_of(block)
            if progress is not None:
                progress(block.nbytes)
        if size != item.nbytes:
            raise CheckpointError(
                f"{item.name} has {size} bytes, and was to have {item.nbytes}",
                where="writing safetensors",
                fix="nothing may change a checkpoint or a state while it is exported",
            )


def _header(items: Sequence[Item], metadata: Mapping[str, str]) -> bytes:
    # as safetensors.torch.save_model writes them, so that load_model finds tied tensors
    tied = {name: item.name for item in items for name in item.also}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **tied, **metadata}}
    end = 0
    for item in items:
        begin, end = end, end + item.nbytes
        entries[item.name] = {
            "dtype": CODES[item.dtype],
            "shape": list(torch.Size(item.shape)),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
