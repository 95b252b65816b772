"""The few calls that change the disk: write, flush to the device, rename, make and remove directories.

All of a save goes through these, so that a test can let each of them fail. No format is known here.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from fnaccel.checkpoint.disk.worker_thread import Behind
from fnaccel.world.paths import named_errors


@attrs.frozen
class FileRecord:
    """A file's entry in the manifest: its size in bytes, and its CRC-32 in hexadecimal."""

    size: int
    crc32: str


def make_directory(path: Path, *, parents: bool = False) -> None:
    """Make a directory. With `parents` it may exist already."""
    path.mkdir(parents=parents, exist_ok=parents)


def write_file(path: Path, chunks: Iterable[memoryview]) -> FileRecord:
    """Write a new file and wait until the device holds it.

    Raises:
        OSError: the device is full, the directory is read-only, the file exists.
    """
    size = checksum = unflushed = 0

    def add(block: memoryview) -> None:
        nonlocal checksum
        checksum = zlib.crc32(block, checksum)

    with named_errors(path), path.open("xb", buffering=0) as file:
        number = file.fileno()
        with Behind(add) as summing, Behind(lambda _: flush(number)) as flushing:
            for block in _blocks(chunks):
                summing.put(block)
                size += len(block)
                unflushed += len(block)
                unwritten = block
                while unwritten:  # the kernel takes at most 2 GiB at a time
                    unwritten = unwritten[write(number, unwritten) :]
                if unflushed >= _FLUSH and flushing.offer(None):
                    unflushed = 0
        sync(number)
    return FileRecord(size, f"{checksum:08x}")


_BLOCK = 1 << 24
_FLUSH = 1 << 25


def _blocks(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in blocks of some MiB: small chunks put together, large ones cut."""
    small = bytearray()
    for chunk in chunks:
        if len(chunk) < _BLOCK // 16:
            small += chunk
        else:
            if small:
                yield memoryview(small)
                small = bytearray()
            yield from (chunk[start : start + _BLOCK] for start in range(0, len(chunk), _BLOCK))
        if len(small) >= _BLOCK:
            yield memoryview(small)
            small = bytearray()
    if small:
        yield memoryview(small)


def write(file: int, data: memoryview) -> int:
    """Write a part of `data`, and return the number of bytes."""
    return os.write(file, data)


def sync(file: int) -> None:
    """Wait until the device holds all writes to a file or a directory."""
    os.fsync(file)


def flush(file: int) -> None:
    """Start writing to the device, so that `sync` has less to wait for."""
    getattr(os, "fdatasync", os.fsync)(file)


def sync_directory(path: Path) -> None:
    """Wait until the device holds the names in a directory."""
    if sys.platform == "win32":  # which can't open directories, and journals names by itself
        return
    file = os.open(path, os.O_RDONLY)
    try:
        sync(file)
    finally:
        os.close(file)


def sync_files(directory: Path) -> None:
    """Wait until the device holds files that others wrote below a directory."""
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
        elif path.is_file():
            with path.open("rb") as file:
                sync(file.fileno())


def rename(path: Path, to: Path) -> None:
    """Give a directory another name, atomically."""
    path.rename(to)


def put_in_place(staged: Path, target: Path, aside: Path) -> None:
    """Rename a filled directory to its place. What stood there gets the name `aside` first.

    At any moment a complete directory has one of the names. If the second rename fails, the first is undone.
    """
    sync_directory(staged)
    replaces = target.exists()
    if replaces:
        rename(target, aside)
    try:
        rename(staged, target)
    except OSError:
        if replaces:
            rename(aside, target)
        raise
    sync_directory(target.parent)


def hidden(parent: Path, name: str) -> Path:
    """A name in a directory that nobody else takes, of a form that listings leave out."""
    return parent / f".{name}-{uuid.uuid4().hex[:12]}"


def remove(path: Path) -> None:
    """Remove a directory and its contents."""
    shutil.rmtree(path)


def checksum_of(path: Path) -> str:
    """The CRC-32 of a file, in hexadecimal."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"
