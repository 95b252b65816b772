"""One rank's tensors as a safetensors file, written without a second copy in memory.

The format is https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON header, the data.
Its own writer wants all tensors at once and neither sums nor syncs what it writes; reading is left to it.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fnaccel.checkpoint.disk.durable import FileRecord, write_file
from fnaccel.checkpoint.format.dtypes import CODES

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
"""What a file of tensors may be called: nothing that leads out of its directory."""

OWN_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.safetensors")
"""What `file_name` returns."""


def file_name(rank: int, ranks: int) -> str:
    """The name of the file that one of `ranks` ranks writes."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write tensors under their names, and wait until the device holds them.

    Args:
        path: a file that does not exist yet.
        tensors: by name; on any device, one at a time is copied to the CPU.

    Raises:
        OSError: the file can't be written.
    """
    # widest first, so that each starts at a multiple of its own element size
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    return write_file(path, _chunks(ordered))


def _chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for value in tensors.values():
        if value.numel():
            plain = value.resolve_conj().resolve_neg().cpu().contiguous()
            # numpy() would need numpy, which torch does without
            data: Any = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
            data.owner = plain  # lives as long as a view of it
            yield memoryview(data).cast("B")


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        entries[name] = {
            "dtype": CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
