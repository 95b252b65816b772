"""Safetensors files that are read block by block: opened once, and let go after some megabytes.

A file is mapped as it is read, and mapped pages count as memory of the process until it is closed.
Opening it again for every tensor would parse its header each time. All reading of safetensors is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from fnaccel.checkpoint.format.boxes import Box, overlap
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.found import damaged

_MOST = 64 << 20  # bytes that may be mapped and were read
_FILES = 64  # open at a time: ranks may have written thousands


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
            if len(self._open) >= _FILES:
                self._open.pop(next(iter(self._open))).__exit__(None, None, None)
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
        with _named(file, stored):
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
        with _named(file, stored):
            cut = self._cut(file, stored)
            # views of the mapped file: copy_ reads the bytes straight into the target. A scalar has no slices
            whole = shared == stored.box
            part = self.handle(file).get_tensor(stored.name) if whole else cut[shared.within(stored.box)]
        out[shared.within(target)].copy_(part)
        self._read += part.nbytes
        del part, cut
        if self._read > _MOST:
            self.close()

    def view(self, file: Path, name: str) -> torch.Tensor:
        """A tensor as it lies in a file, mapped.

        Raises:
            CheckpointError: the file can't be read.
        """
        return self.handle(file).get_tensor(name)

    def _cut(self, file: Path, stored: Block) -> Any:
        """A block of a file, after its header was compared with the expected dtype and shape."""
        cut = self.handle(file).get_slice(stored.name)  # raises SafetensorError if the file lacks it
        code, shape = cut.get_dtype(), tuple(cut.get_shape())
        expected = CODES[stored.dtype]
        if (code, shape) != (expected, stored.box.shape):
            raise damaged(
                f"{file.name} holds {stored.name} as {code} {list(shape)}, otherwise than was said of it: "
                f"{expected} {list(stored.box.shape)}",
                file,
            )
        return cut

    def close(self) -> None:
        """Let go of all files."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._read = 0


@contextlib.contextmanager
def _named(file: Path, stored: Block) -> Generator[None]:
    """Name the block and the file in an error of the library."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise damaged(f"{stored.name} can't be read from {file.name}: {error}", file) from error
