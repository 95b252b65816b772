"""Launchers of several machines in step: they start together, fail together, and start again together.

A star of TCP connections, lines of JSON: the launcher of machine 0 listens where the job's port is,
hears how the ranks of each machine ended, and says what happens next. Without restarts there is
nothing to agree on, and none of this is used.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable
from typing import Any

import attrs

from fnaccel.errors import LaunchError, Preempted
from fnaccel.launch.job import STATIC_PORT, Job
from fnaccel.launch.network import free_port

_PATIENCE = 600.0
"""Seconds in which the launchers of all machines have to be started."""


@attrs.frozen(kw_only=True)
class Part:
    """How the ranks of one machine ended.

    Attributes:
        code: its exit code.
        failed: whether a rank failed, and not because it was told to end.
        follows: whether that was because a rank elsewhere had gone.
        told: whether a signal came, so that nothing is to be started again.
    """

    code: int = 0
    failed: bool = False
    follows: bool = False
    told: bool = False


@attrs.frozen(kw_only=True)
class Verdict:
    """What happens next on all machines: another attempt, with its port, or the end."""

    again: bool
    port: int = 0
    code: int = 0


def decide(parts: Iterable[Part], *, more: bool) -> Verdict:
    """What follows from how the ranks of all machines ended.

    Args:
        parts: one for each machine.
        more: whether there may be another attempt.

    Example:
        >>> decide([Part(), Part(code=1, failed=True)], more=False).code
        1
    """
    ended = list(parts)
    failed = [part for part in ended if part.failed]
    saved = any(part.code == Preempted.CODE for part in ended)
    if saved and all(part.follows for part in failed):
        return Verdict(again=False, code=Preempted.CODE)
    if failed:
        if more and not any(part.told for part in ended):
            return Verdict(again=True, port=free_port())
        return Verdict(again=False, code=min(failed, key=lambda part: part.follows).code)
    return Verdict(again=False, code=next((part.code for part in ended if part.code), 0))


class Machines:
    """One launcher's connections to the others, and what it has heard. Made by `meet`.

    Attributes:
        ending: whether a machine has failed, so that the ranks of all are to end.
        verdict: what comes after this attempt, once all have ended.
        lost: machines whose launcher has gone.
    """

    def __init__(self, job: Job, peers: dict[int, socket.socket]) -> None:
        self._job = job
        self._peers = peers
        self._said = dict.fromkeys(peers, b"")
        self._parts: dict[int, Part] = {}
        self._left = job.restarts
        self.ending = False
        self.verdict: Verdict | None = None
        self.lost: list[int] = []

    @property
    def fds(self) -> list[int]:
        """What to wait for; ranks must not keep them."""
        return [peer.fileno() for peer in self._peers.values()]

    def begin(self) -> int:
        """Enter the attempt that the last verdict asked for; the port where its ranks meet."""
        port = 0 if self.verdict is None else self.verdict.port
        self.ending, self.verdict, self._parts = False, None, {}
        for machine in self.lost:  # since the verdict
            self._mourn(machine)
        return port

    def fail(self) -> None:
        """Tell all machines that a rank of this one has failed."""
        self._take(self._job.machine, {"failed": True})

    def end(self, part: Part) -> None:
        """Say how the ranks of this machine ended."""
        self._take(self._job.machine, {"ended": attrs.asdict(part)})

    def gather(self) -> None:
        """Wait until all are there; the first attempt begins.

        Raises:
            LaunchError: one has gone again.
        """
        if self._is_hub:
            self._pronounce(Verdict(again=True, port=free_port()))
        while self.verdict is None:
            self.hear(wait=True)
        if self.lost:
            raise _never_met(self._job, f"the launcher of machine {self.lost[0]} has ended")

    def hear(self, *, wait: bool = False) -> None:
        """Take what the others have said; `wait`: until one says something."""
        for machine, peer in list(self._peers.items()):
            peer.setblocking(wait)
            try:
                said = peer.recv(65_536)
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            if not said:
                self._lose(machine)
                continue
            *lines, self._said[machine] = (self._said[machine] + said).split(b"\n")
            for line in lines:
                self._take(machine, json.loads(line))

    def close(self) -> None:
        """Part from the others."""
        for peer in self._peers.values():
            peer.close()

    @property
    def _is_hub(self) -> bool:
        return self._job.machine == 0

    def _take(self, machine: int, message: dict[str, Any]) -> None:
        if machine == self._job.machine and not self._is_hub:
            self._send(message)
        elif "failed" in message:
            if self._is_hub and not self.ending:
                self._send(message)
            self.ending = True
        elif "ended" in message:
            self._parts[machine] = Part(**message["ended"])
            if len(self._parts) == self._job.machines:
                more = self._left > 0 and not self.lost
                self._left -= 1
                self._pronounce(decide(self._parts.values(), more=more))
        else:
            self.verdict = Verdict(**message["verdict"])

    def _pronounce(self, verdict: Verdict) -> None:
        self._send({"verdict": attrs.asdict(verdict)})
        self.verdict = verdict

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for machine, peer in list(self._peers.items()):
            peer.setblocking(True)
            try:
                peer.sendall(line)
            except OSError:
                self._lose(machine)

    def _lose(self, machine: int) -> None:
        """A launcher has gone, and with it its ranks: the kernel ends them."""
        self._peers.pop(machine).close()
        self.lost.append(machine)
        if self.verdict is None:
            self._mourn(machine)

    def _mourn(self, machine: int) -> None:
        """This attempt ends without a machine, and so does the job: its ranks have no place."""
        if not self._is_hub:
            self.ending, self.verdict = True, Verdict(again=False, code=1)
            return
        self._take(machine, {"failed": True})
        if machine not in self._parts:
            self._take(machine, {"ended": attrs.asdict(Part(code=1, failed=True, told=True))})


def meet(job: Job) -> Machines:
    """Find the launchers of all machines; signals are not blocked meanwhile.

    Raises:
        LaunchError: they have not come together in ten minutes, or were told different things.
    """
    end = time.monotonic() + _PATIENCE
    if job.machine != 0:
        hub = _connect(job, end)
        hub.sendall(json.dumps(_card(job)).encode() + b"\n")
        made = Machines(job, {0: hub})
        made.gather()
        return made
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("", job.port or STATIC_PORT)) as server:
        while len(peers) < job.machines - 1:
            server.settimeout(max(0.0, end - time.monotonic()) or 0.001)
            try:
                peer, _ = server.accept()
            except TimeoutError:
                raise _never_met(job, f"{job.machines - 1 - len(peers)} launchers did not come") from None
            with contextlib.suppress(OSError, ValueError, KeyError):  # whoever else knocks
                peer.settimeout(10.0)
                card = json.loads(_line(peer))
                theirs, ours = card["job"], _card(job)["job"]
                if theirs != ours:
                    raise _never_met(job, f"machine {card['machine']} runs {theirs}, and this one {ours}")
                peers[int(card["machine"])] = peer
    made = Machines(job, peers)
    made.gather()
    return made


def _card(job: Job) -> dict[str, Any]:
    return {"machine": job.machine, "job": [job.name, job.processes, job.machines, job.restarts]}


def _connect(job: Job, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((job.address, job.port or STATIC_PORT), timeout=10.0)
        except OSError as error:
            if time.monotonic() > end:
                raise _never_met(job, f"the launcher of machine 0 can't be reached: {error}") from error
            time.sleep(0.1)


def _line(peer: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"\n"):  # byte by byte: what follows the line is not ours to take
        byte = peer.recv(1)
        if not byte:
            raise OSError("gone")
        said += byte
    return said


def _never_met(job: Job, what: str) -> LaunchError:
    return LaunchError(
        what,
        where=f"fnaccel launch --nnodes {job.machines} --max-restarts {job.restarts}, machine {job.machine}",
        fix="start the same command on every machine, each with its own --node-rank",
    )
