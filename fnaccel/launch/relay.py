"""`Relay`: the output of ranks as output of their caller: a notebook shows that of its own process only."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import threading
from typing import Any

WAIT = 5.0
"""Seconds for the last output of the ranks. A process that a rank left behind may hold the pipe open."""


class Relay:
    """Two pipes, and a thread for each that copies it to `sys.stdout` or `sys.stderr` of the caller.

    Use it as a context manager around the life of the ranks, which call `enter`.
    """

    def __init__(self) -> None:
        self._pipes = [os.pipe(), os.pipe()]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Relay:
        # threads inherit the mask: signals are for the main thread, which blocks them at times
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for (read, _), stream in zip(self._pipes, (sys.stdout, sys.stderr), strict=True):
                self._threads.append(threading.Thread(target=_copy, args=(read, stream), daemon=True))
                self._threads[-1].start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def enter(self) -> None:
        """In a rank: write to the pipes from now on, whole lines in time."""
        for number, (name, (read, write)) in enumerate(
            zip(("stdout", "stderr"), self._pipes, strict=True), 1
        ):
            os.dup2(write, number)
            os.close(read)
            os.close(write)
            file = open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
            setattr(sys, name, file)

    def __exit__(self, *error: object) -> None:
        for _, write in self._pipes:
            os.close(write)
        for thread in self._threads:
            thread.join(WAIT)


def _copy(pipe: int, stream: Any) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with io.FileIO(pipe) as reader:
        while chunk := reader.read(65_536):
            stream.write(decoder.decode(chunk))
            stream.flush()
