"""The life of one rank, in the process that the launcher forked for it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import TracebackType

import attrs
import torch
import torch.distributed as dist

from fnaccel.errors import Preempted
from fnaccel.launch import affinity, numa
from fnaccel.launch.failure import Failure, follows, shown
from fnaccel.launch.job import Job
from fnaccel.launch.run_script import run_file, run_module
from fnaccel.launch.tee import log_path
from fnaccel.world import flags, joining

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def live(job: Job, local_rank: int, *, environ: dict[str, str], launcher: int, pipe: int) -> int:
    """Run the job's program as this rank, and report to the launcher if it fails.

    Args:
        job: the job to run.
        local_rank: the number of this process on this machine.
        environ: the whole environment.
        launcher: the process id of the launcher.
        pipe: the file descriptor that a failure is written to.

    Returns:
        The exit code. The caller ends the process with it.
    """
    _end_with(launcher)
    if job.affinity:
        affinity.pin(affinity.cores_of(local_rank, job.processes))
    if job.numa:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        affinity.pin(numa.node_cores(local_rank, job.processes, visible=visible))
    _take_place(local_rank, environ)
    if not job.python:
        return _become_program(job)
    if job.debug:
        faulthandler.enable()
        # PyTorch has read the variables of `--debug` in the launcher, before the fork
        dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    log = None if job.tee is None else log_path(job.tee, job.rank(local_rank))
    report = _Report(job.rank(local_rank), pipe, log)
    joining.LISTENERS.append(report.note)
    # a hook that the script (or its tracker) puts around this one still comes before it
    sys.excepthook = report.hook
    text = ""
    try:
        code, text = _run(job)
        if code == 0:
            flags.check_taken()
    except BaseException as error:
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        report.code = code
        sys.excepthook(type(error), error, error.__traceback__)
    if code != 0:
        report.send(Failure(rank=report.rank, code=code, when=time.monotonic(), text=text))
    return code


def _run(job: Job) -> tuple[int, str]:
    """The exit code, and a text for the launcher to print."""
    try:
        if job.function is not None:
            job.function()
        elif job.module is not None:
            run_module(job.module, job.args)
        else:
            run_file(str(job.script), job.args)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF, str(stop) if isinstance(stop, Preempted) else ""
        print(stop.code, file=sys.stderr)
        return 1, ""
    return 0, ""


@attrs.define
class _Report:
    """A rank's messages to the launcher: that it has called `fa.start`, and its failure."""

    rank: int
    pipe: int
    log: Path | None = None
    code: int = 1
    reported: bool = False

    def hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The `sys.excepthook` of a rank: report to the launcher, which prints only the first failure."""
        del kind
        text = shown(error, trace)
        if self.log is not None:  # the launcher prints the first failure only
            with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as file:
                print(text, file=file)
        self.send(
            Failure(rank=self.rank, code=self.code, when=time.monotonic(), text=text, follows=follows(error))
        )

    def note(self, start: str) -> None:
        """Tell the launcher that `fa.start` waits for the other ranks, or has met them."""
        if not self.reported:
            self._write(json.dumps({"start": start}).encode() + b"\n")

    def send(self, failure: Failure) -> None:
        """Write a failure to the launcher, unless one was written."""
        if self.reported:
            return
        self.reported = True
        self._write(failure.line())

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, and so is whoever would read it
            while line:
                line = line[os.write(self.pipe, line) :]


def _become_program(job: Job) -> int:
    """Replace this process with a program that is not run by Python. Returns only if that fails."""
    try:
        os.execvp(shutil.which(str(job.script)) or str(job.script), [str(job.script), *job.args])
    except OSError as error:
        print(f"{job.script}: {error.strerror}", file=sys.stderr)
        return 126


def _take_place(local_rank: int, environ: dict[str, str]) -> None:
    """Become a rank: its variables, its threads, its streams, its random numbers."""
    if environ.get("OMP_NUM_THREADS") != os.environ.get("OMP_NUM_THREADS"):
        # torch was loaded before the fork, and has read the launcher's variable
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    if local_rank != 0:  # one terminal has one reader
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # whole lines in time: a rank that is stopped because of another one loses no output
        sys.stdout.reconfigure(line_buffering=True)
    if "numpy.random" in sys.modules:
        # without a fork the seeds would differ too. Python reseeds its own generator after a fork
        sys.modules["numpy.random"].seed()


def _end_with(launcher: int) -> None:
    """Let the kernel end this process when the launcher does, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before the line above
            os._exit(128 + signal.SIGKILL)
