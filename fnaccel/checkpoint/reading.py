"""Reads blocks of tensors from the pieces in a checkpoint's files: each rank reads its own blocks.

Each file is opened once. This module does not know the meaning of a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from safetensors import SafetensorError, safe_open

from fnaccel.checkpoint.disk import durable
from fnaccel.checkpoint.disk.directory import Directory
from fnaccel.checkpoint.disk.garbage import no_collection
from fnaccel.checkpoint.format import manifest
from fnaccel.checkpoint.format.boxes import Box, overlap, whole
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.manifest import Manifest, Piece, Stored
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
    """The files of tensors of a checkpoint, opened on first use. Use it as a context manager.

    They stay open from the check to the reading, as far as there are not too many of them.
    """

    def __init__(self, directory: Directory) -> None:
        self.path = directory.path
        self._directory = directory
        self._open: dict[str, Any] = {}
        self._checked: set[tuple[str, str]] = set()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._close(next(iter(self._open)))

    def check(self, boxes: Sequence[tuple[Stored, Box]]) -> None:
        """Open the files of these pieces, and compare their headers with the manifest.

        Raises:
            CheckpointError: a file is no safetensors file, or holds something else.
        """
        pieces = [(piece, stored) for stored, box in boxes for piece in _touched(stored, box)]
        for name, entries in _by_file(pieces).items():
            with self._opened(name) as file:
                for piece, stored in entries:
                    self._check_header(file, stored, piece)

    def read(self, requests: Sequence[Request]) -> None:
        """Fill the tensors of all requests, in place.

        Raises:
            CheckpointError: a file holds something else, or can't be read.
        """
        pieces = [(piece, request) for request in requests for piece in _touched(request.stored, request.box)]
        with torch.no_grad():
            for name, entries in _by_file(pieces).items():
                with self._opened(name) as file:
                    for piece, request in entries:
                        self._check_header(file, request.stored, piece)
                        _copy(file, piece.name or request.stored.path, piece.box, request)

    def read_whole(self, stored: Stored) -> torch.Tensor:
        """All of one tensor, on the CPU."""
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read([Request(stored, whole(stored.shape), out)])
        return out

    def _check_header(self, file: safe_open, stored: Stored, piece: Piece) -> None:
        """Compare an entry of a file's header with the manifest, once."""
        name = piece.name or stored.path
        entry = piece.file, name
        if entry in self._checked:
            return
        header = file.get_slice(name)  # raises SafetensorError if the file lacks it
        in_file = header.get_dtype(), tuple(header.get_shape())
        if in_file != (CODES[stored.dtype], piece.box.shape):
            raise _damaged(
                f"{piece.file} holds {name} as {in_file[0]} {list(in_file[1])}, "
                f"and the manifest says {CODES[stored.dtype]} {list(piece.box.shape)}",
                self.path,
            )
        self._checked.add(entry)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Generator[Any]:
        try:
            if name not in self._open:
                if len(self._open) >= _MOST:
                    self._close(next(iter(self._open)))
                self._open[name] = self._directory.open(name, lambda path: safe_open(path, "pt").__enter__())
            yield self._open[name]
        except (SafetensorError, OSError) as error:
            raise _damaged(f"{name} can't be read: {error}", self.path) from error

    def _close(self, name: str) -> None:
        self._open.pop(name).__exit__(None, None, None)


_MOST = 64  # open at a time: ranks may have written thousands


def _touched(stored: Stored, box: Box) -> Iterator[Piece]:
    return (piece for piece in stored.pieces if overlap(piece.box, box))


def _by_file(pieces: Iterable[tuple[Piece, T]]) -> dict[str, list[tuple[Piece, T]]]:
    by_file: dict[str, list[tuple[Piece, T]]] = {}
    for piece, entry in pieces:
        by_file.setdefault(piece.file, []).append((piece, entry))
    return by_file


def _copy(file: safe_open, key: str, stored: Box, request: Request) -> None:
    shared = overlap(stored, request.box)
    if shared is None:
        return
    if shared is stored:  # then the two are equal, as on one rank
        request.out.copy_(file.get_tensor(key))
        return
    # both are views of the mapped file: copy_ reads the bytes straight into the target
    part = file.get_tensor(key) if shared == stored else file.get_slice(key)[shared.within(stored)]
    request.out[shared.within(request.box)].copy_(part)


def _damaged(what: str, path: Path) -> CheckpointError:
    return CheckpointError(
        what,
        where=f"fa.restore of {path}",
        fix="copy it again if it was moved, or restore another of fa.checkpoint.checkpoints(directory)",
    )
