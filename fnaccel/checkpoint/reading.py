"""Reads a checkpoint: its manifest, and blocks of its tensors, of which each rank reads its own.

All reading of safetensors is here: `Mapped` reads files, and `Files` the tensors of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from fnaccel.checkpoint.disk import durable
from fnaccel.checkpoint.disk.directory import Directory
from fnaccel.checkpoint.disk.garbage import no_collection
from fnaccel.checkpoint.format import manifest
from fnaccel.checkpoint.format.boxes import Box, overlap, whole
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.found import damaged
from fnaccel.checkpoint.format.manifest import Manifest, Stored
from fnaccel.errors import CheckpointError

_MOST = 64 << 20  # bytes that may be mapped and were read
_FILES = 64  # open at a time: ranks may have written thousands


@attrs.frozen(eq=False)
class Request:
    """A block of a stored tensor that is wanted, and the tensor of that shape to read it into."""

    stored: Stored
    box: Box
    out: torch.Tensor


def read_manifest(directory: Directory) -> Manifest:
    """Read and check the manifest of a checkpoint, without a look at its files.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    try:
        data = directory.open(manifest.FILE, _text_of)
    except FileNotFoundError:
        raise _damaged(f"{directory.path} holds no {manifest.FILE}", directory.path) from None
    with no_collection():
        return manifest.parse(data, str(directory.path / manifest.FILE))


def _text_of(path: Path) -> bytes:
    """All of a text file. The first zero byte ends it: a file with a hole may be larger than memory."""
    text = bytearray()
    with path.open("rb") as file:
        while (chunk := file.read(1 << 20)) and b"\0" not in chunk:
            text += chunk
        return bytes(text + chunk)


def open_manifest(directory: Directory, *, partial: bool = False) -> Manifest:
    """Read and check the manifest of a checkpoint, and check that its files are there with all their bytes.

    Args:
        directory: the checkpoint.
        partial: whether files may be missing, which lie on other machines.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    described = read_manifest(directory)
    for name in described.files:
        if partial and directory.size_of(name) is None:
            continue
        damage = damage_of(directory, described, name)
        if damage is not None:
            raise _damaged(damage, directory.path)
    return described


def damage_of(directory: Directory, described: Manifest, name: str, *, verify: bool = False) -> str | None:
    """A sentence that says how a file is damaged, or None if it is not.

    Args:
        directory: the checkpoint.
        described: its manifest.
        name: the name of the file.
        verify: also read all of the file and compare its checksum.
    """
    record, size = described.files[name], directory.size_of(name)
    if size is None:
        return f"the file {name} is missing"
    if size != record.size:
        return f"{name} has {size} bytes, and was written with {record.size}"
    if verify and directory.open(name, durable.checksum_of) != record.crc32:
        return f"the bytes of {name} are not those that were written"
    return None


def verify(directory: Directory, described: Manifest, names: Sequence[str]) -> None:
    """Read all bytes of files and compare their checksums.

    Raises:
        CheckpointError: the bytes are not those that were written.
    """
    for name in names:
        damage = damage_of(directory, described, name, verify=True)
        if damage is not None:
            raise _damaged(damage, directory.path)


@attrs.frozen
class Block:
    """The block of a tensor in a file, and its name there."""

    name: str
    dtype: torch.dtype
    box: Box


Wanted = tuple[Block, Box, torch.Tensor | None]
"""A block of a file, the block of the tensor that is wanted, and a tensor of that shape to copy it into."""
Opener = Callable[[Path], Any]
"""Opens a safetensors file."""


def _open(path: Path) -> Any:
    return safe_open(path, "pt").__enter__()


class Mapped:
    """Safetensors files by path. Each is opened once, and let go after some megabytes.

    A file is mapped as it is read, and mapped pages count as memory of the process until it is closed.
    Opening it again for every tensor would parse its header each time. A read after `close` opens it again.

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

    def read(self, file: Path, wanted: Iterable[Wanted]) -> None:
        """Compare blocks of a file with its header, and copy the intersections with blocks that are wanted.

        Args:
            file: holds the blocks.
            wanted: without a tensor, a block is only compared. One without an intersection is left out.

        Raises:
            CheckpointError: the file holds something else, changed, or can't be read.
        """
        for block, box, out in wanted:
            shared = overlap(block.box, box)
            if shared is None:
                continue
            handle = self.handle(file)
            try:
                cut = handle.get_slice(block.name)  # raises SafetensorError if the file lacks it
                code, shape = cut.get_dtype(), tuple(cut.get_shape())
                if (code, shape) != (CODES[block.dtype], block.box.shape):
                    raise damaged(
                        f"{file.name} holds {block.name} as {code} {list(shape)}, otherwise than was said "
                        f"of it: {CODES[block.dtype]} {list(block.box.shape)}",
                        file,
                    )
                if out is None:
                    continue
                # a view of the mapped file: copy_ reads its bytes straight into the target. A scalar has no
                # slices
                all_of_it = shared == block.box
                part = handle.get_tensor(block.name) if all_of_it else cut[shared.within(block.box)]
            except (SafetensorError, OSError) as error:
                raise damaged(f"{block.name} can't be read from {file.name}: {error}", file) from error
            target = out if shared == box else out[shared.within(box)]
            target.copy_(part)
            self._read += part.nbytes
            del part, cut, handle
            if self._read > _MOST:
                self.close()

    def view(self, file: Path, name: str) -> torch.Tensor:
        """A tensor as it lies in a file, mapped.

        Raises:
            CheckpointError: the file can't be read.
        """
        return self.handle(file).get_tensor(name)

    def close(self) -> None:
        """Let go of all files."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._read = 0


class Files:
    """The tensors of one checkpoint, whose files are opened on first use. Use it as a context manager.

    Args:
        directory: the checkpoint, held open.
    """

    def __init__(self, directory: Directory) -> None:
        self.path = directory.path
        self._mapped = Mapped(lambda file, opener: directory.open(file.name, opener))

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.close()

    def check(self, boxes: Iterable[tuple[Stored, Box]]) -> None:
        """Open the files of these blocks, and compare their headers with the manifest.

        Raises:
            CheckpointError: a file is no safetensors file, or holds something else.
        """
        self._read([(each, box, None) for stored, box in boxes for each in (stored, *stored.others)])

    def read(self, requests: Iterable[Request]) -> None:
        """Fill the tensors of all requests, in place.

        Raises:
            CheckpointError: a file holds something else, or can't be read.
        """
        wanted: list[tuple[Stored, Box, torch.Tensor | None]] = []
        means: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for request in requests:
            values = [torch.empty_like(request.out) for _ in request.stored.others]
            outs, tensors = [request.out, *values], (request.stored, *request.stored.others)
            wanted += [(each, request.box, out) for each, out in zip(tensors, outs, strict=True)]
            if values:
                means.append((request.out, outs))
        with torch.no_grad():
            self._read(wanted)
            for out, values in means:
                out.copy_(_mean(values))

    def read_whole(self, stored: Stored) -> torch.Tensor:
        """All of one tensor, on the CPU."""
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read([Request(stored, whole(stored.shape), out)])
        return out

    def view(self, stored: Stored) -> torch.Tensor:
        """A tensor of one piece, mapped."""
        (piece,) = stored.pieces
        return self._mapped.view(self.path / piece.file, piece.name or stored.path)

    def _read(self, boxes: Iterable[tuple[Stored, Box, torch.Tensor | None]]) -> None:
        """Read the pieces of tensors, one file after the other."""
        by_file: dict[str, list[Wanted]] = {}
        for stored, box, out in boxes:
            for piece in stored.pieces:
                block = Block(piece.name or stored.path, stored.dtype, piece.box)
                by_file.setdefault(piece.file, []).append((block, box, out))
        for name, wanted in by_file.items():
            self._mapped.read(self.path / name, wanted)


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    """The mean of the values of replicas. Of whole numbers, such as counts, the largest."""
    stacked = torch.stack(values)
    if stacked.dtype.is_floating_point or stacked.dtype.is_complex:
        return stacked.mean(dim=0, dtype=torch.promote_types(stacked.dtype, torch.float32))
    return stacked.amax(dim=0)


def _damaged(what: str, path: Path) -> CheckpointError:
    return CheckpointError(
        what,
        where=f"fa.restore of {path}",
        fix="copy it again if it was moved, or restore another of fa.checkpoint.checkpoints(directory)",
    )
