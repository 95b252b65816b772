"""Reads a checkpoint: its manifest, and blocks of its tensors, of which each rank reads its own."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
import torch

from fnaccel.checkpoint.disk import durable
from fnaccel.checkpoint.disk.directory import Directory
from fnaccel.checkpoint.disk.garbage import no_collection
from fnaccel.checkpoint.format import manifest
from fnaccel.checkpoint.format.boxes import Box, overlap, whole
from fnaccel.checkpoint.format.manifest import Manifest, Stored
from fnaccel.checkpoint.format.mapped import Block, Mapped
from fnaccel.errors import CheckpointError

T = TypeVar("T")


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
        data = directory.read(manifest.FILE)
    except FileNotFoundError:
        raise _damaged(f"{directory.path} holds no {manifest.FILE}", directory.path) from None
    with no_collection():
        return manifest.parse(data, str(directory.path / manifest.FILE))


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

    def check(self, boxes: Sequence[tuple[Stored, Box]]) -> None:
        """Open the files of these blocks, and compare their headers with the manifest.

        Raises:
            CheckpointError: a file is no safetensors file, or holds something else.
        """
        for file, block, _ in self._pieces((stored, box, None) for stored, box in boxes):
            self._mapped.check(file, block)

    def read(self, requests: Sequence[Request]) -> None:
        """Fill the tensors of all requests, in place.

        Raises:
            CheckpointError: a file holds something else, or can't be read.
        """
        wanted = ((request.stored, request.box, request.out) for request in requests)
        with torch.no_grad():
            for file, block, (_, box, out) in self._pieces(wanted):
                self._mapped.copy(file, block, box, out)

    def read_whole(self, stored: Stored) -> torch.Tensor:
        """All of one tensor, on the CPU."""
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read([Request(stored, whole(stored.shape), out)])
        return out

    def view(self, stored: Stored) -> torch.Tensor:
        """A tensor of one piece, mapped."""
        (piece,) = stored.pieces
        return self._mapped.view(self.path / piece.file, piece.name or stored.path)

    def _pieces(
        self, wanted: Iterable[tuple[Stored, Box, T]]
    ) -> list[tuple[Path, Block, tuple[Stored, Box, T]]]:
        """The file and the block of each piece that is wanted, one file after the other."""
        found = [
            (self.path / piece.file, Block(piece.name or each[0].path, each[0].dtype, piece.box), each)
            for each in wanted
            for piece in each[0].pieces
            if overlap(piece.box, each[1])
        ]
        return sorted(found, key=operator.itemgetter(0))


def _damaged(what: str, path: Path) -> CheckpointError:
    return CheckpointError(
        what,
        where=f"fa.restore of {path}",
        fix="copy it again if it was moved, or restore another of fa.checkpoint.checkpoints(directory)",
    )
