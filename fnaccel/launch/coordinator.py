"""`Coordinator`: the launcher's end of the coordinator process, which agrees with the other machines."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch.channel import Channel
from fnaccel.launch.elastic import coordinate
from fnaccel.launch.job import Job
from fnaccel.launch.verdict import Decision, MachineResult, Place

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""A terminal or a scheduler sends them to all processes of a job. This one ends when its launcher does."""


class Coordinator:
    """The coordinator process of this machine. Made by `meet`.

    Attributes:
        ending: why to end the ranks of all machines: `"failed"`, or `"join"` so that a machine can join.
        decision: whether another attempt follows, or None until the decision.
        lost: a line about lost machines or a lost store, or an empty string.
    """

    def __init__(self, pid: int, channel: Channel) -> None:
        self._pid = pid
        self._channel = channel
        self._place: Place | None = None
        self._failed = False
        self.ending: str | None = None
        self.decision: Decision | None = None
        self.lost = ""

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._channel.fileno()

    def begin(self) -> Place | None:
        """Wait for the first attempt, or enter the next one. Returns None if the job has ended.

        Raises:
            LaunchError: the machines have not come together, or were asked for different things.
        """
        while self.decision is None:
            self.hear(wait=True)
        again = self.decision.again
        if again:
            self.ending, self.decision, self._failed = None, None, False
        return self._place if again else None

    def fail(self) -> None:
        """Report that a rank has failed, so that the ranks of all machines end."""
        if not self._failed:
            self._failed = True
            self._channel.send(failed=True)

    def end(self, result: MachineResult) -> None:
        """Report how the ranks of this machine ended."""
        self._channel.send(result=attrs.asdict(result))

    def hear(self, *, wait: bool = False) -> None:
        """Read the messages that have come. `wait`: until there is one.

        Raises:
            LaunchError: the machines have not come together, or were asked for different things.
        """
        for message in self._channel.receive(None if wait else 0.0):
            self._take(message)
        if self._channel.closed and self.decision is None:
            self.lost = "the store of the job does not answer"
            self.ending, self.decision = "failed", Decision(again=False, code=1)

    def release(self) -> None:
        """In a rank: close the connection, which is the launcher's."""
        self._channel.close()

    def close(self) -> None:
        """Leave the job, and wait until the process has ended."""
        self._channel.close()
        os.waitpid(self._pid, 0)

    def _take(self, message: dict[str, Any]) -> None:
        if "attempt" in message:
            self._place, self.decision = Place(**message["attempt"]), Decision(again=True)
        elif "ending" in message:
            self.ending = message["ending"]
        elif "final" in message:
            self.lost = message["final"]["lost"]
            self.decision = Decision(again=False, code=message["final"]["code"])
        else:
            what, where, fix = message["error"]
            raise LaunchError(what, where=where, fix=fix)


def meet(job: Job) -> Coordinator:
    """Start the coordinator process of this machine.

    Raises:
        LaunchError: no process can be started.
    """
    ours, childs = socket.socketpair()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        pid = os.fork()
        if pid == 0:
            _become_coordinator(job, Channel(childs), ours, blocked)
    except OSError as error:
        raise LaunchError(
            f"no process can be started: {error.strerror}",
            where="fnaccel launch",
            fix="raise the limit of processes (ulimit -u), or end some",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    childs.close()
    return Coordinator(pid, Channel(ours))


def _become_coordinator(job: Job, channel: Channel, other: socket.socket, mask: set[Any]) -> None:
    try:
        other.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        # C++ logs each garbage message. A pipe stays open as long as a copy of its end does
        for stream in range(3):
            os.dup2(nothing, stream)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        coordinate(job, channel)
    finally:
        os._exit(0)
