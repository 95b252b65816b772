"""The Python stacks of a process, as faulthandler writes them, and the part of them that a reader needs.

faulthandler works while a thread waits in C++, as in a collective. A process that is stopped writes nothing.
"""

from __future__ import annotations

import faulthandler
import fcntl
import itertools
import os
import re
import signal
import tempfile
import traceback
from pathlib import Path
from typing import IO

from fnaccel.world.calls import is_of_script

_PACKAGE = str(Path(__file__).parents[1])
_LAUNCH = str(Path(_PACKAGE) / "launch")
_WORLD = str(Path(_PACKAGE) / "world")
_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_SHOWN = 30
"""Inner frames of a thread that are shown, beside those of the script."""

Frame = tuple[str, int, str]

SIGNAL: int | None = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None
"""The signal that makes a rank write its stacks. None: this platform has no real-time signals."""


def open_memory(name: str) -> IO[bytes]:
    """An empty file in memory, or on a disk if the platform has none in memory."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def open_dump() -> IO[bytes]:
    """An empty file that forks inherit."""
    file = open_memory("stacks")
    # a process that has written keeps its place in the file: after a cut it must begin at 0
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def dump_on_signal(file: IO[bytes]) -> None:
    """From now on `SIGNAL` makes this process write the stacks of all threads into a file."""
    if SIGNAL is not None:
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def read_dump(file: IO[bytes]) -> str:
    """The text that was written so far."""
    return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")


def own_stacks(main: int) -> str:
    """The stacks of this process, shortened."""
    with open_dump() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        return shorten(read_dump(file), main)


def shorten(text: str, main: int) -> str:
    """The stacks of a dump with the lines of code, the main thread first.

    Left out are frames outside of the script, those of Python's imports, inner frames of the library, and
    threads in which only the library or Python's `threading` runs.

    Args:
        text: the dump of faulthandler.
        main: the identifier of the main thread.
    """
    shown: list[str] = []
    for thread, frames in sorted(_threads(text), key=lambda entry: entry[0] != main):
        frames = list(itertools.takewhile(lambda frame: not frame[0].startswith(_LAUNCH), frames))
        frames = [frame for frame in frames if not frame[0].startswith("<frozen")]
        frames, outer = frames[:_SHOWN], frames[_SHOWN:]
        if thread != main and not any(_matters(frame[0]) for frame in frames):
            continue
        if thread != main:
            shown.append("  another thread:\n")
        # the loop of the script, which calls, is far out if the model is deep
        calling = [frame for frame in outer[::-1] if is_of_script(frame[0])]
        shown += _format(calling)
        if len(outer) > len(calling):
            shown.append(f"  ... {len(outer) - len(calling)} frames\n")
        shown += _format(frames[::-1])
    return "".join(shown).rstrip()


def _format(frames: list[Frame]) -> list[str]:
    """Frames with their lines of code. In the library the first and the last one of a run are shown."""
    lines: list[str] = []
    for inner, group in itertools.groupby(frames, lambda frame: frame[0].startswith(_PACKAGE)):
        run = list(group)
        stack = traceback.StackSummary.from_list([(*frame, None) for frame in run]).format()
        left_out = [f"  ... {len(run) - 2} frames of fnaccel\n"]
        lines += [stack[0], *left_out, stack[-1]] if inner and len(run) > 3 else stack
    return lines


def _matters(path: str) -> bool:
    return not path.startswith(_WORLD) and Path(path).name not in ("threading.py", "selectors.py")


def _threads(text: str) -> list[tuple[int, list[Frame]]]:
    threads: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _HEAD.match(line), _FRAME.match(line)
        if head is not None:
            threads.append((int(head[1], 16), []))
        elif frame is not None and threads:
            threads[-1][1].append((frame[1], int(frame[2]), frame[3]))
    return threads
