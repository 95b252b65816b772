"""`manifest.json`: the tree, the place of each piece of each tensor, and the size and checksum of each file.

A manifest from disk is not trusted: `parse` checks all of it before anything is opened or allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs
import torch

from fnaccel.checkpoint.disk.durable import FileRecord
from fnaccel.checkpoint.format.boxes import Box, make_up, overlap, whole
from fnaccel.checkpoint.format.dtypes import NAMES, name_of
from fnaccel.errors import CheckpointError
from fnaccel.tree import Tree

FILE = "manifest.json"
FORMAT = "fnaccel-checkpoint"
VERSION = 1

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
"""The allowed names of a file of tensors. None leads out of the directory."""

OWN_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.safetensors")
"""The names that `file_name` returns."""

_HEAD = b'{\n"crc32": "'  # the first bytes of a manifest with a checksum
_SUMMED = re.compile(rb'\{\s*"crc32":\s*"([0-9a-f]{8})"')
_BLANK = b"0" * 8  # in the place of the checksum, when it is computed
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


def file_name(rank: int, ranks: int) -> str:
    """The name of the file that one of `ranks` ranks writes."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


@attrs.frozen
class Piece:
    """A block of a tensor, and the file that holds it: under the tensor's path, or under `name`."""

    file: str
    box: Box
    name: str = ""


@attrs.frozen
class Stored:
    """A tensor in a checkpoint: its path, dtype, global shape and pieces. `others` is averaged with it."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    others: tuple[Stored, ...] = ()

    def __str__(self) -> str:
        return f"{name_of(self.dtype)} {list(self.shape)}"


@attrs.frozen(kw_only=True)
class Manifest:
    """All of a checkpoint but the values of its tensors.

    Attributes:
        step: of which step.
        tree: the structure, as `values.encode` gives it.
        metadata: the user's metadata, encoded in the same way.
        tensors: by path.
        files: by name.
        written_by: versions and the number of ranks.
        metrics: what `fa.save(metrics=)` was given, as `disk.retention` reads it.
        digest: of the text that was read, to compare between ranks.
    """

    step: int
    tree: Any
    metadata: Any
    tensors: Mapping[str, Stored]
    files: Mapping[str, FileRecord]
    written_by: Mapping[str, Any]
    metrics: Mapping[str, Any] = attrs.field(factory=dict)
    digest: str = ""

    def reader(self, where: str) -> Callable[[str], Stored]:
        """A function that returns the tensor at a path. It raises CheckpointError if there is none."""

        def read(path: str) -> Stored:
            if path not in self.tensors:
                raise CheckpointError(
                    f"the tree in the manifest holds the tensor {path}, which is stored nowhere",
                    where=where,
                    fix="the checkpoint is damaged: restore another of fa.checkpoint.checkpoints(directory)",
                )
            return self.tensors[path]

        return read


def dump(manifest: Manifest) -> bytes:
    """A manifest as JSON text, with a checksum of the text."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "written_by": dict(manifest.written_by),
        **({"metrics": dict(manifest.metrics)} if manifest.metrics else {}),
        "metadata": manifest.metadata,
        "tree": manifest.tree,
        "tensors": {
            path: {
                "dtype": name_of(stored.dtype),
                "shape": stored.shape,
                "pieces": [
                    {"file": piece.file, "offset": piece.box.offset, "shape": piece.box.shape}
                    | ({"name": piece.name} if piece.name else {})
                    for piece in stored.pieces
                ],
            }
            for path, stored in manifest.tensors.items()
        },
        "files": {name: attrs.asdict(record) for name, record in manifest.files.items()},
    }
    # one line for each entry, for json's indentation would take ten times as long
    entries = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in document.items()]
    body = b'",\n' + ",\n".join(entries).encode() + b"\n}\n"
    return _HEAD + f"{zlib.crc32(body, zlib.crc32(_HEAD + _BLANK)):08x}".encode() + body


def parse(text: str | bytes, where: str) -> Manifest:
    """The manifest in a text that need not be trusted.

    Args:
        text: the contents of the file.
        where: the file, for messages.

    Raises:
        CheckpointError: it is no manifest, of another version, does not have its checksum, or contradicts
            itself: a file name that leads elsewhere, pieces that don't make up their tensor, more bytes than
            the file has, a key that is there twice.
    """
    reader = _Reader(where)
    data = text.encode() if isinstance(text, str) else text
    try:
        document = json.loads(
            data,
            parse_constant=lambda name: reader.fail(f"holds a bare {name}"),
            object_pairs_hook=reader.entries,
        )
    except (ValueError, RecursionError) as error:
        reader.fail(f"is no JSON: {error}")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        reader.fail("is no manifest of an fnaccel checkpoint")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"this checkpoint has format version {document.get('version')!r}, and only {VERSION} is known",
            where=where,
            fix="read it with the version of fnaccel that wrote it: see written_by in the manifest",
        )
    if "crc32" in document:
        reader.check_sum(data)
    return attrs.evolve(reader.manifest(document), digest=hashlib.sha256(data).hexdigest())


@attrs.frozen
class _Reader:
    """Reads parts of a document. A malformed part raises CheckpointError."""

    where: str

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(
            f"the manifest {what}"[:500],
            where=self.where,
            fix="it is damaged, or no manifest: restore another of fa.checkpoint.checkpoints(directory)",
        )

    def entries(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object of JSON."""
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            self.fail(f"has the key {twice[:60]!r} twice in one object")
        return table

    def check_sum(self, data: bytes) -> None:
        """The text has the checksum that it begins with."""
        matched = _SUMMED.match(data)
        if matched is None:
            self.fail("has a checksum elsewhere than at its beginning")
        view, (start, end) = memoryview(data), matched.span(1)
        checksum = zlib.crc32(view[end:], zlib.crc32(_BLANK, zlib.crc32(view[:start])))
        if f"{checksum:08x}".encode() != matched[1]:
            self.fail(
                f"was changed or damaged: its checksum is {checksum:08x}, and it says {matched[1].decode()}"
            )

    def manifest(self, document: dict[str, Any]) -> Manifest:
        files = {name: self.file(name, entry) for name, entry in self.table(document, "files").items()}
        tensors = {path: self.stored(path, entry) for path, entry in self.table(document, "tensors").items()}
        bytes_in: dict[str, int] = {}
        for stored in tensors.values():
            for piece in stored.pieces:
                count = math.prod(piece.box.shape) * stored.dtype.itemsize
                bytes_in[piece.file] = bytes_in.get(piece.file, 0) + count
        for name, count in bytes_in.items():
            if name not in files:
                self.fail(f"places tensors in {name}, which it does not list")
            if count > files[name].size:
                self.fail(f"places {count} bytes in {name}, which has {files[name].size}")
        return Manifest(
            step=self.count(document.get("step"), "step"),
            tree=document.get("tree"),
            metadata=document.get("metadata"),
            tensors=tensors,
            files=files,
            written_by=self.table(document, "written_by"),
            metrics=self.table(document, "metrics") if "metrics" in document else {},
        )

    def table(self, value: Tree, key: str) -> dict[str, Any]:
        entry = value.get(key) if isinstance(value, dict) else None
        return entry if isinstance(entry, dict) else self.fail(f"has no table {key!r}")

    def count(self, value: Tree, what: str) -> int:
        return value if type(value) is int and value >= 0 else self.fail(f"has {value!r} as {what}")

    def counts(self, value: Tree, what: str, path: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.fail(f"has {value!r} as {what} {path}")
        for entry in value:
            if type(entry) is not int or entry < 0:
                self.fail(f"has {entry!r} as {what} {path}")
        return tuple(value)

    def file(self, name: str, entry: Tree) -> FileRecord:
        if not NAME.fullmatch(name):
            self.fail(f"names the file {name!r}, which can't be one of its own")
        checksum = entry.get("crc32") if isinstance(entry, dict) else None
        if not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
            self.fail(f"has no checksum of {name}")
        return FileRecord(self.count(entry.get("size"), f"the size of {name}"), checksum)

    def stored(self, path: str, entry: Tree) -> Stored:
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(dtype, str) or dtype not in NAMES:
            self.fail(f"gives {path} the dtype {dtype!r}")
        shape = self.counts(entry.get("shape"), "the shape of", path)
        if len(shape) > 64 or math.prod(max(size, 1) for size in shape) >= 1 << 60:
            self.fail(f"gives {path} a shape that no tensor can have: {str(list(shape))[:80]}")
        listed = entry.get("pieces")
        if not isinstance(listed, list):
            self.fail(f"has no pieces of {path}")
        stored = Stored(path, NAMES[dtype], shape, tuple(self.piece(path, entry) for entry in listed))
        self.check_cover(stored)
        return stored

    def piece(self, path: str, entry: Tree) -> Piece:
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
            self.fail(f"has a piece of {path} without a file")
        offset = self.counts(entry.get("offset"), "an offset in", path)
        name = entry.get("name", "")
        if not isinstance(name, str):
            self.fail(f"names a piece of {path} {name!r}")
        return Piece(entry["file"], Box(offset, self.counts(entry.get("shape"), "a piece of", path)), name)

    def check_cover(self, stored: Stored) -> None:
        """The pieces make up the tensor: each within it, no two overlapping, none missing."""
        if len(stored.pieces) == 1 and 0 not in stored.shape:  # as one rank writes all tensors
            box = stored.pieces[0].box
            if box.shape == stored.shape and len(box.offset) == len(box.shape) and not any(box.offset):
                return
        everything = whole(stored.shape)
        for piece in stored.pieces:
            box = piece.box
            if not len(box.offset) == len(box.shape) == len(stored.shape):
                self.fail(f"has a piece of {stored.path} with another number of dimensions")
            if overlap(box, everything) != box:
                self.fail(f"has a piece of {stored.path} that is empty or outside of {list(stored.shape)}")
        covered = sum(piece.box.numel for piece in stored.pieces)
        if covered != everything.numel:
            self.fail(f"covers {covered} of the {everything.numel} elements of {stored.path}")
        if len(stored.pieces) > 1:
            self.check_apart(stored, everything)

    def check_apart(self, stored: Stored, everything: Box) -> None:
        if not make_up([piece.box for piece in stored.pieces], everything):
            self.fail(f"has two pieces of {stored.path} that overlap")
        # the values of one entry of a file would be read twice
        if len({(piece.file, piece.name) for piece in stored.pieces}) != len(stored.pieces):
            self.fail(f"has two pieces of {stored.path} in one entry of a file, which can hold one")
