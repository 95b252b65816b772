"""The few calls that change the disk: write, flush to the device, rename, make and remove directories.

All of a save goes through these, so that a test can let each of them fail. No format is known here.
"""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

import attrs


@attrs.frozen
class FileRecord:
    """What a manifest says of a file: its bytes, and their CRC-32 in hexadecimal."""

    size: int
    crc32: str


def make_directory(path: Path, *, parents: bool = False) -> None:
    """Make a directory; with `parents`, one that may be there already."""
    path.mkdir(parents=parents, exist_ok=parents)


def write_file(path: Path, chunks: Iterable[memoryview]) -> FileRecord:
    """Write a new file and wait until the device holds it.

    Raises:
        OSError: the device is full, the directory is read-only, the file exists.
    """
    size = checksum = 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
            rest = chunk
            while rest:  # the kernel takes at most 2 GiB at a time
                rest = rest[write(file.fileno(), rest) :]
        sync(file.fileno())
    return FileRecord(size, f"{checksum:08x}")


def write(file: int, data: memoryview) -> int:
    """Write some of `data`; how many bytes."""
    return os.write(file, data)


def sync(file: int) -> None:
    """Wait until the device holds what was written to a file or a directory."""
    os.fsync(file)


def sync_directory(path: Path) -> None:
    """Wait until the device holds the names in a directory."""
    if sys.platform == "win32":  # which can't open directories, and journals names by itself
        return
    file = os.open(path, os.O_RDONLY)
    try:
        sync(file)
    finally:
        os.close(file)


def rename(path: Path, to: Path) -> None:
    """Give a directory another name, atomically."""
    path.rename(to)


def remove(path: Path) -> None:
    """Remove a directory and what is in it."""
    shutil.rmtree(path)


def checksum_of(path: Path) -> str:
    """The CRC-32 of a file, in hexadecimal."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"
