"""`RankRecord`: where one rank is. All that ask for it read this record: other ranks, the launcher, reports.

A rank writes it in two ways:

- Each mark of a phase and each call of all ranks goes to memory (`SharedRecords`), in 0.4 us. The launcher
  and the other ranks of this machine can read the memory even if the rank is stopped.
- The rank's watcher posts the whole record to the store of the job, as JSON (`watcher.py`).

Nothing is compared here. `stalls.py` judges the records of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import attrs

from fnaccel.world import calls, progress_marks
from fnaccel.world.progress_marks import PHASES, Mark
from fnaccel.world.stacks import open_memory

SIZE = 256
"""Bytes of a record in memory."""

_MARK = struct.Struct("<QqiiB??64s")
_CALL = struct.Struct("<QQ?64s")
_THREAD = struct.Struct("<Q")
_NOTE = struct.Struct("<56s")
_CALL_AT, _THREAD_AT, _NOTE_AT = 96, 192, 200
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}


@attrs.frozen(kw_only=True)
class RankRecord:
    """Where a rank is, and what an observer adds to that.

    Attributes:
        rank, pid, host: the rank and its process.
        memory: the file descriptor of its `SharedRecords` in that process, or -1.
        ports: the TCP ports of its gloo groups.

        sequence: how many marks and calls it has written. 0: it has not begun a phase.
        phase, step, micro_batch, stage, first, of, shares: as in `Mark`.
        calls: the number of calls of all ranks that it has begun.
        names: the newest of these calls. The last is call number `calls`.
        inside: whether it is inside that call.
        line: the line of the script that made the call, if that can be told.
        does: what it has begun last within its phase, as the predicate of a sentence: "gathers blocks.1".
        abandoned, why: the number of the newest call that an error ended on this rank alone, or 0, and the
            reason.

        left: why the rank left the world, as the predicate of a sentence, or None if it has not left.
        failed: whether it left because call number `calls` raised.
        follows: whether it left because it had lost another rank.

        posts: how often it has written this record to the store.
        age: for how many seconds it has been at this place.
        state: the letter of `/proc/PID/stat`, or "" if unknown.
        stopped: for how many seconds its process has been stopped.
        silent: for how many seconds it has posted nothing, if that is too long.
    """

    rank: int = 0
    pid: int = 0
    host: str = ""
    memory: int = -1
    ports: tuple[int, ...] = attrs.field(default=(), converter=tuple[int, ...])
    # the place
    sequence: int = 0
    phase: str = PHASES[0]
    step: int = 0
    micro_batch: int = 0
    stage: int = -1
    first: bool = True
    of: str = ""
    shares: bool = False
    calls: int = 0
    names: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    inside: bool = False
    line: str = ""
    does: str = ""
    abandoned: int = 0
    why: str = ""
    # the end
    left: str | None = None
    failed: bool = False
    follows: bool = False
    # what an observer sees
    posts: int = 0
    age: float = 0.0
    state: str = ""
    stopped: float = 0.0
    silent: float = 0.0

    def text(self) -> str:
        """As JSON, for a store."""
        return json.dumps(attrs.asdict(self))

    @staticmethod
    def of_text(text: str | bytes) -> RankRecord:
        """The inverse of `text`."""
        return RankRecord(**json.loads(text))

    # parts of sentences

    @property
    def activity(self) -> str:
        """Its phase, or the call that it is in if no phase of a step has begun."""
        return self.names[-1] if self.inside and self.phase == "outside" and self.names else self.phase

    @property
    def place(self) -> str:
        """Its step and phase, as `"step 5, backward, micro-batch 1"`."""
        return progress_marks.place(self.step, self.activity, self.micro_batch, self.stage)

    def name(self, number: int) -> str | None:
        """The name of one call, or None if it is too old or was not made."""
        at = number - self.calls - 1
        return self.names[at] if -len(self.names) <= at < 0 else None

    def call(self, number: int | None = None) -> str:
        """The newest call or call `number`, with the line of the script that made it if it is the newest."""
        number = self.calls if number is None else number
        line = f" ({self.line})" if self.line and number == self.calls else ""
        return f"{self.name(number)}{line}"

    @property
    def departure(self) -> str:
        """How and after which call the rank left."""
        if self.calls == 0:
            return f"{self.left}, before its first call"
        return f"{self.left}, {'in' if self.failed else 'after'} call {self.calls}, {self.call()}"


@attrs.define(eq=False)
class SharedRecords:
    """The records of several ranks in memory. A launcher makes them, and its forks inherit them.

    Example:
        >>> from fnaccel.world.rank_record import SharedRecords
        >>> records = SharedRecords.make(2)
        >>> records.read(1).phase
        'outside'
        >>> records.close()
    """

    _memory: mmap.mmap
    _file: IO[bytes] | None = None

    @staticmethod
    def make(count: int) -> SharedRecords:
        """Empty records in memory that forks share."""
        file = open_memory("records")
        file.truncate(SIZE * count)
        return SharedRecords(mmap.mmap(file.fileno(), SIZE * count), file)

    @staticmethod
    def of_process(pid: int, descriptor: int) -> SharedRecords | None:
        """The records that another process of this machine has made. None if they can't be opened."""
        with (
            contextlib.suppress(OSError, ValueError),
            Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file,
        ):
            return SharedRecords(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return None

    @property
    def descriptor(self) -> int:
        """The file of the memory, as a number of this process. -1 if this process has not made it."""
        return -1 if self._file is None else self._file.fileno()

    def close(self) -> None:
        """Close the file. A process that still writes keeps the memory."""
        if self._file is not None:
            self._file.close()

    def read(self, number: int, record: RankRecord | None = None) -> RankRecord:
        """`record` (by default an empty one) at the place that one rank has written."""
        at = number * SIZE
        marks, step, micro_batch, stage, phase, first, shares, of = _MARK.unpack_from(self._memory, at)
        changes, count, inside, call = _CALL.unpack_from(self._memory, at + _CALL_AT)
        return attrs.evolve(
            record or RankRecord(),
            sequence=marks + changes,
            phase=PHASES[phase],
            step=step,
            micro_batch=micro_batch,
            stage=stage if marks else -1,
            first=first or not marks,
            of=_text(of),
            shares=shares,
            calls=count,
            names=(_text(call),) if count else (),
            inside=inside,
            does=_text(*_NOTE.unpack_from(self._memory, at + _NOTE_AT)),
        )

    def thread(self, number: int) -> int:
        """The identifier of the main thread of one rank."""
        return _THREAD.unpack_from(self._memory, number * SIZE + _THREAD_AT)[0]

    def write(self, number: int) -> Callable[[], None]:
        """Write the place of this process into one record from now on. Returns what ends that.

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
            _NOTE.pack_into(memory, at + _NOTE_AT, b"")
            _MARK.pack_into(
                memory, at, marks, mark.step, mark.micro_batch, mark.stage, _NUMBERS[mark.phase],
                mark.first, mark.shares, encoded,
            )  # fmt: skip

        def note_call(count: int, call: str, inside: bool) -> None:
            nonlocal changes
            changes += 1
            _CALL.pack_into(memory, at + _CALL_AT, changes, count, inside, call.encode()[:64])

        def note(what: str) -> None:
            nonlocal changes
            changes += 1
            _NOTE.pack_into(memory, at + _NOTE_AT, what.encode()[:56])

        _THREAD.pack_into(memory, at + _THREAD_AT, threading.main_thread().ident or 0)
        listening = progress_marks.listening(note_mark)
        listening.__enter__()
        calls.LISTENERS.append(note_call)
        progress_marks.NOTED.append(note)

        def end() -> None:
            if note_call in calls.LISTENERS:
                calls.LISTENERS.remove(note_call)
                progress_marks.NOTED.remove(note)
                listening.__exit__(None, None, None)

        _writers.append(end)
        return end


_writers: list[Callable[[], None]] = []


def _end_all() -> None:
    while _writers:
        _writers.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)


def process_state(pid: int) -> str:
    """The state of a process of this machine, as the letter of `/proc/PID/stat`, or "" if unknown."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")
