"""Executing a plan: files are written, and commands run one after the other, or at the same time."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch.request import Command, Plan

PATIENCE = 3.0
"""Seconds in which the other hosts may see by themselves that one host has failed."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PACKAGES = {
    "gcloud": "install the Google Cloud CLI, or log in on the TPU VM and start with: fnaccel launch --tpu",
    "sbatch": "log in on a machine of the cluster, or look at the script with --dry-run",
    "mpirun": "install Open MPI (Debian: openmpi-bin) or MPICH, or leave --carrier mpirun out",
    "pdsh": "install pdsh, or use --carrier ssh",
    "ssh": "install an ssh client",
}


def execute(plan: Plan, *, grace: float) -> int:
    """Execute a plan. Returns the exit code: that of the command that failed first, or 0.

    If commands run at the same time, a signal to end closes their standard input, at which the launchers
    on the hosts end. A second signal kills the commands.

    Args:
        plan: the plan.
        grace: seconds for ranks to save in after a signal.

    Raises:
        LaunchError: a program is not installed.
        OSError: a file can't be written.
    """
    for path, text in plan.files.items():
        Path(path).write_text(text, encoding="utf-8")
    try:
        if plan.together:
            return _Hosts(plan, grace).run()
        for command in plan.commands:
            code = _run(command)
            if code != 0:
                return code
    except FileNotFoundError as error:
        program = str(error.filename)
        raise LaunchError(
            f"{program} is not installed",
            where=f"fnaccel launch --carrier {plan.carrier}",
            fix=_PACKAGES.get(program, f"install {program}, or see the commands with --dry-run"),
        ) from None
    return 0


def _run(command: Command) -> int:
    """Run one command, with this process's streams. Signals are passed on."""
    process = subprocess.Popen(command.words, env=_environ(command.env))
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        # a terminal has sent Ctrl-C to the command as well
        if number != signal.SIGINT:
            process.send_signal(number)

    with _handled(pass_on):
        code = process.wait()
    return 128 - code if code < 0 else code


def _environ(env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **env}


@contextlib.contextmanager
def _handled(handler: Any) -> Generator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@attrs.define
class _Hosts:
    """Commands that run at the same time: their lines with labels, and their ends."""

    plan: Plan
    grace: float
    running: list[tuple[Command, subprocess.Popen[Any]]] = attrs.field(factory=list)
    failed: list[tuple[Command, int]] = attrs.field(factory=list)
    deadline: float | None = None
    told: int | None = None
    kill: bool = False

    def run(self) -> int:
        """Start the commands, and wait until all have ended."""
        with _handled(self._obey), selectors.DefaultSelector() as streams:
            try:
                for command in self.plan.commands:
                    self._start(command, streams)
                while self.running or streams.get_map():
                    self._look(streams)
            finally:
                for _, process in self.running:
                    process.kill()
        # the launchers of an elastic job agree on its exit code. A host that was lost does not know it
        agreed = [code for command, code in self.failed if command is self.plan.commands[0]]
        if self.failed and (self.plan.all_or_none or agreed):
            return self.failed[0][1] if self.plan.all_or_none else agreed[0]
        return 0 if self.told is None else 128 + self.told

    def _start(self, command: Command, streams: selectors.BaseSelector) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # of its own session: Ctrl-C comes to this process only, which ends the hosts in order
        process = subprocess.Popen(command.words, env=_environ(command.env), start_new_session=True, **pipes)
        self.running.append((command, process))
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                os.set_blocking(source.fileno(), False)
                streams.register(source, selectors.EVENT_READ, _Lines(command.label, sink))

    def _look(self, streams: selectors.BaseSelector) -> None:
        """Print lines that have come, and see which commands have ended."""
        for key, _ in streams.select(timeout=0.2):
            source: Any = key.fileobj
            data = source.read()
            if data:
                key.data.feed(data)
            elif data is not None:
                key.data.close()
                streams.unregister(source)
                source.close()
        for command, process in list(self.running):
            code = process.poll()
            if code is not None:
                self.running.remove((command, process))
                self._end_of(command, 128 - code if code < 0 else code)
        now = time.monotonic()
        if self.deadline is not None and now >= self.deadline:
            for _, process in self.running:
                if process.stdin is not None and not process.stdin.closed:
                    process.stdin.close()
            if now >= self.deadline + self.grace + 10.0:
                self.kill = True
        if self.kill:
            for _, process in self.running:
                process.kill()

    def _end_of(self, command: Command, code: int) -> None:
        if code == 0:
            return
        self.failed.append((command, code))
        if self.told is None:
            reason = (
                "ssh can't reach it" if command.words[0] == "ssh" and code == 255 else f"exit code {code}"
            )
            print(f"fnaccel launch: {command.label}: {reason}", file=sys.stderr, flush=True)
        if self.plan.all_or_none and self.deadline is None:
            self.deadline = time.monotonic() + PATIENCE

    def _obey(self, number: int, _: object) -> None:
        self.kill = self.kill or self.told is not None
        self.told = number
        self.deadline = time.monotonic()


@attrs.define
class _Lines:
    """Writes whole lines, each after the label of its host."""

    label: str
    sink: IO[str]
    partial: bytes = b""

    def feed(self, data: bytes) -> None:
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            self._write(line)

    def close(self) -> None:
        if self.partial:
            self._write(self.partial)

    def _write(self, line: bytes) -> None:
        print(f"{self.label}: {line.decode(errors='replace')}", file=self.sink, flush=True)
