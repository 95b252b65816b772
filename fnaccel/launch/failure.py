"""The failure of a rank: its report, its printed text, and the cause among several failures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import attrs

from fnaccel.errors import FnaccelError, LaunchError, Preempted
from fnaccel.launch.job import Job

_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)
_FOLLOWS = re.compile(
    "closed by peer|reset by peer|broken pipe|socket closed|remote process exited|ncclRemoteError"
    "|pair closure|connection was likely closed|connection refused|communicator was aborted|could not join",
    re.IGNORECASE,
)
"""Texts of an error after another rank has gone: such an error is not the cause."""


@attrs.frozen(kw_only=True)
class Failure:
    """The end of one rank.

    Attributes:
        rank: which.
        code: the exit code, 128 + the number of a signal.
        when: of the monotonic clock, in seconds.
        text: its traceback or message, or empty.
        follows: whether its error only says that another rank has gone.
        hung: whether the watchdog found that ranks do not go on.
        absent: whether it exited with 0 but never called `fa.start`, while other ranks wait there.
        killed: whether a signal ended it that no runtime sends itself (out of memory, a lost machine).
    """

    rank: int
    code: int
    when: float
    text: str = ""
    follows: bool = False
    killed: bool = False
    absent: bool = False
    hung: bool = False

    def line(self) -> bytes:
        """As one line of JSON, for the pipe to the launcher."""
        return json.dumps(attrs.asdict(self)).encode() + b"\n"

    @property
    def preempted(self) -> bool:
        """Whether it is none: the rank has saved, and ended because it was asked to."""
        return self.code == Preempted.CODE

    @staticmethod
    def ended(rank: int, status: int) -> Failure | None:
        """The failure of a rank from its exit status, or None if it succeeded."""
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return None
        # runtimes abort by themselves when a peer has gone
        killed = code < 0 and -code != signal.SIGABRT
        return Failure(rank=rank, code=128 - code if code < 0 else code, when=time.monotonic(), killed=killed)

    @staticmethod
    def of(line: bytes) -> Failure:
        """The inverse of `line`."""
        return Failure(**json.loads(line))

    @staticmethod
    def read(files: Iterable[Path]) -> list[Failure]:
        """The failures in files, but for those that a full disk has cut off."""
        failures: list[Failure] = []
        for file in files:
            with contextlib.suppress(ValueError):
                failures.append(Failure.of(file.read_bytes()))
        return failures


def cause(failures: Iterable[Failure]) -> Failure:
    """The one that the others followed from: those that saw a peer go come last.

    Example:
        >>> first = Failure(rank=1, code=1, when=2.0)
        >>> cause([Failure(rank=0, code=1, when=1.0, follows=True), first]).rank
        1
    """
    return min(failures, key=lambda failure: (failure.follows, failure.when))


def follows(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone, or has failed."""
    return getattr(error, "follows", False) is True or _FOLLOWS.search(str(error)) is not None


def shown(error: BaseException, trace: TracebackType | None) -> str:
    """A traceback that begins in the user's script. For an error of fnaccel it ends there too."""
    ours = (_HERE, "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    if not isinstance(error, FnaccelError):
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    frames = traceback.extract_tb(trace)
    while frames and frames[-1].filename.startswith((_PACKAGE, contextlib.__file__)):  # a decorated function
        frames.pop()
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*head, f"{type(error).__name__}: {error}"])


def describe(failure: Failure, job: Job) -> str:
    """The launcher's text for the first failure."""
    role = "" if job.role is None else f" ({job.role})"
    who = f"rank {failure.rank} of {job.size}{role} on {socket.gethostname()}"
    if failure.absent:
        return f"LaunchError: {failure.text}"
    if failure.hung:
        return failure.text
    if failure.text:
        return f"{failure.text}\n\n{who} failed with exit code {failure.code}"
    if failure.code - 128 not in signal.valid_signals():  # 255 is sys.exit(-1)
        summary, fix = f"{who} ended with exit code {failure.code}", "read its output above"
    else:
        name = _signal_name(failure.code - 128)
        summary, fix = f"{who} was ended by {name}", _ADVICE.get(name, "find out who sent the signal")
    return f"LaunchError: {LaunchError(summary, where=f'fnaccel launch {job.name}', fix=fix)}"


_FAULT = "set PYTHONFAULTHANDLER=1 to see the line that did it"
_ADVICE = {
    "SIGKILL": "if nobody sent it, memory ran out (see dmesg): make batches smaller, or shard the model",
    "SIGSEGV": _FAULT,
    "SIGABRT": _FAULT,
    "SIGBUS": f"{_FAULT}. A full /dev/shm (DataLoader workers) causes it too",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
