"""Where each rank is, in memory that a launcher can read: its newest mark, its newest call of all ranks.

A rank writes at the beginning of each phase and at both ends of each such call: 0.4 us. Nothing is compared
here. `stalls.py` judges the places of all ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import attrs

from fnaccel.world import calls, progress_marks
from fnaccel.world.progress_marks import PHASES, Mark

SIZE = 256
"""Bytes of a record."""

_MARK = struct.Struct("<QqiB??64s")
_CALL = struct.Struct("<QQ?64s")
_THREAD = struct.Struct("<Q")
_CALL_AT, _THREAD_AT = 96, 192
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}


@attrs.frozen(kw_only=True)
class Position:
    """Where a rank was when it last wrote.

    Attributes:
        sequence: how often it has written. 0: it has not begun a phase.
        phase, step, micro_batch, first, of, shares: as in `Mark`.
        calls: how many calls of all ranks it has begun.
        call: the name of the newest of them.
        inside: whether it is inside that call.
    """

    sequence: int = 0
    phase: str = PHASES[0]
    step: int = 0
    micro_batch: int = 0
    first: bool = True
    of: str = ""
    shares: bool = False
    calls: int = 0
    call: str = ""
    inside: bool = False


@attrs.define(eq=False)
class ProgressRecords:
    """The records of several ranks. A launcher makes them, and its forks inherit them.

    Example:
        >>> from fnaccel.world.progress_record import ProgressRecords
        >>> records = ProgressRecords.make(2)
        >>> records.read(1).phase
        'outside'
        >>> records.close()
    """

    _memory: mmap.mmap
    _file: IO[bytes] | None = None

    @staticmethod
    def make(count: int) -> ProgressRecords:
        """Empty records in memory that forks share."""
        file = open_memory("progress")
        file.truncate(SIZE * count)
        return ProgressRecords(mmap.mmap(file.fileno(), SIZE * count), file)

    @staticmethod
    def of_process(pid: int, descriptor: int) -> ProgressRecords | None:
        """The records that another process of this machine has made. None if they can't be opened."""
        with (
            contextlib.suppress(OSError, ValueError),
            Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file,
        ):
            return ProgressRecords(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return None

    @property
    def descriptor(self) -> int:
        """The file of the memory, as a number of this process. -1 if this process has not made it."""
        return -1 if self._file is None else self._file.fileno()

    def close(self) -> None:
        """Close the file. A process that still writes keeps the memory."""
        if self._file is not None:
            self._file.close()

    def read(self, number: int) -> Position:
        """The position in one record."""
        at = number * SIZE
        marks, step, micro_batch, phase, first, shares, of = _MARK.unpack_from(self._memory, at)
        changes, count, inside, call = _CALL.unpack_from(self._memory, at + _CALL_AT)
        return Position(
            sequence=marks + changes,
            phase=PHASES[phase],
            step=step,
            micro_batch=micro_batch,
            first=first or not marks,
            of=_text(of),
            shares=shares,
            calls=count,
            call=_text(call),
            inside=inside,
        )

    def thread(self, number: int) -> int:
        """The identifier of the main thread of one rank."""
        return _THREAD.unpack_from(self._memory, number * SIZE + _THREAD_AT)[0]

    def write(self, number: int) -> Callable[[], None]:
        """Write the position of this process into one record from now on. Returns what ends that.

        Forks of this process, such as the workers of a loader, do not write.
        """
        memory, at = self._memory, number * SIZE
        marks = changes = 0
        name, encoded = "", b""

        def note_mark(mark: Mark) -> None:
            nonlocal marks, name, encoded
            if mark.of is not name:
                name, encoded = mark.of, mark.of.encode()[:64]
            marks += 1
            _MARK.pack_into(
                memory, at, marks, mark.step, mark.micro_batch, _NUMBERS[mark.phase],
                mark.first, mark.shares, encoded,
            )  # fmt: skip

        def note_call(count: int, call: str, inside: bool) -> None:
            nonlocal changes
            changes += 1
            _CALL.pack_into(memory, at + _CALL_AT, changes, count, inside, call.encode()[:64])

        _THREAD.pack_into(memory, at + _THREAD_AT, threading.main_thread().ident or 0)
        listening = progress_marks.listening(note_mark)
        listening.__enter__()
        calls.LISTENERS.append(note_call)

        def end() -> None:
            if note_call in calls.LISTENERS:
                calls.LISTENERS.remove(note_call)
                listening.__exit__(None, None, None)

        _writers.append(end)
        return end


_writers: list[Callable[[], None]] = []


def _end_all() -> None:
    while _writers:
        _writers.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)


def open_memory(name: str) -> IO[bytes]:
    """An empty file in memory, or on a disk if the platform has none in memory."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")
