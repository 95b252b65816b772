"""Safetensors files that are read piece by piece: opened once, and let go after some megabytes.

A file is mapped as it is read, and mapped pages count as memory of the process until it is closed.
Opening it again for every tensor would parse its header each time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from fnaccel.checkpoint.format.boxes import Box, overlap
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.found import damaged

_MOST = 64 << 20  # bytes that may be mapped and were read


@attrs.frozen
class Block:
    """The block of a tensor in a file, and its name there."""

    name: str
    dtype: torch.dtype
    box: Box


Opener = Callable[[Path], Any]
"""Opens a safetensors file."""


def _open(path: Path) -> Any:
    return safe_open(path, "pt").__enter__()


class Mapped:
    """Open files by path. `close` closes all, and a later read opens its file again.

    Args:
        through: calls an opener with a path that leads to a file. By default that is the path itself, and
            the file has to stay the same one for as long as it is read.
    """

    def __init__(self, through: Callable[[Path, Opener], Any] | None = None) -> None:
        self._through = through or self._unchanged
        self._open: dict[Path, Any] = {}
        self._identities: dict[Path, tuple[int, ...]] = {}
        self._read = 0

    def handle(self, file: Path) -> Any:
        """A file, opened.

        Raises:
            CheckpointError: it is no whole safetensors file, or it was replaced since it was opened first.
        """
        if file not in self._open:
            try:
                self._open[file] = self._through(file, _open)
            except (SafetensorError, OSError) as error:
                raise damaged(f"{file.name} is no whole safetensors file: {error}", file) from error
        return self._open[file]

    def _unchanged(self, file: Path, opener: Opener) -> Any:
        handle, status = opener(file), file.stat()
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._identities.setdefault(file, identity) != identity:
            raise damaged(f"{file.name} was replaced while it was read", file)
        return handle

    def check(self, file: Path, stored: Block) -> None:
        """Check that a file holds a block, without reading its values.

        Raises:
            CheckpointError: the file holds something else, or can't be read.
        """
        self._cut(file, stored)

    def copy(self, file: Path, stored: Block, target: Box, out: torch.Tensor) -> None:
        """Copy the intersection of a stored block and a requested block.

        Args:
            file: holds the block.
            stored: which block.
            wanted: the block that is to be filled.
            out: a tensor of its shape.

        Raises:
            CheckpointError: the file changed, or can't be read.
        """
        shared = overlap(stored.box, target)
        if shared is None:
            return
        cut = self._cut(file, stored)
        try:
            # a scalar has no slices
            part = (
                cut[shared.within(stored.box)]
                if stored.box.shape
                else self.handle(file).get_tensor(stored.name)
            )
        except (SafetensorError, OSError) as error:
            raise damaged(f"{stored.name} can't be read from {file.name}: {error}", file) from error
        out[shared.within(target)].copy_(part)
        self._read += part.nbytes
        del part, cut
        if self._read > _MOST:
            self.close()

    def _cut(self, file: Path, stored: Block) -> Any:
        """A block of a file, after its header was compared with the expected dtype and shape."""
        try:
            cut = self.handle(file).get_slice(stored.name)
            if (cut.get_dtype(), tuple(cut.get_shape())) == (CODES[stored.dtype], stored.box.shape):
                return cut
        except (SafetensorError, OSError) as error:
            raise damaged(f"{stored.name} can't be read from {file.name}: {error}", file) from error
        raise damaged(f"{file.name} holds {stored.name} otherwise than was said of it", file)

    def close(self) -> None:
        """Let go of all files."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._read = 0
