"""Safetensors files that are read piece by piece: opened once, and let go after some megabytes.

A file is mapped as it is read, and mapped pages count as memory of the process until it is closed;
to open it again for every tensor would parse its header as often.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from fnaccel.checkpoint.dtypes import CODES
from fnaccel.checkpoint.pieces import Box, overlap
from fnaccel.interchange.found import damaged

_MOST = 64 << 20  # bytes that may be mapped and were read


@attrs.frozen
class Block:
    """What a file holds of a tensor, and under which name."""

    name: str
    dtype: torch.dtype
    box: Box


class Mapped:
    """Open files, by path; `close` lets go of all, and what is read next opens again."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._read = 0

    def handle(self, file: Path) -> Any:
        """A file, opened.

        Raises:
            CheckpointError: it is no whole safetensors file.
        """
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, "pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise damaged(f"{file.name} is no whole safetensors file: {error}", file) from error
        return self._open[file]

    def copy(self, file: Path, stored: Block, wanted: Box, out: torch.Tensor) -> None:
        """Copy what a stored block shares with a wanted one.

        Args:
            file: holds the block.
            stored: which block.
            wanted: the block that is to be filled.
            out: a tensor of its shape.

        Raises:
            CheckpointError: the file changed, or can't be read.
        """
        shared = overlap(stored.box, wanted)
        if shared is None:
            return
        try:
            handle = self.handle(file)
            cut = handle.get_slice(stored.name)
            if (cut.get_dtype(), tuple(cut.get_shape())) != (CODES[stored.dtype], stored.box.shape):
                raise damaged(f"{file.name} holds {stored.name} otherwise than was said of it", file)
            # a scalar has no slices
            part = cut[shared.within(stored.box)] if stored.box.shape else handle.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise damaged(f"{stored.name} can't be read from {file.name}: {error}", file) from error
        out[shared.within(wanted)].copy_(part)
        self._read += part.nbytes
        del part, cut, handle
        if self._read > _MOST:
            self.close()

    def close(self) -> None:
        """Let go of all files."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._read = 0
