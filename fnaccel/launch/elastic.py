"""The coordinator process of a machine: meets those of the other machines, and agrees with them.

Membership is PyTorch's: a `DynamicRendezvousHandler` over a `TCPStore` that one of the machines keeps. The
results of all machines and the decision of machine 0 are keys of the same store. The ranks use it too.

It is a process of its own so that the launcher, which forks the ranks, has no threads and no connections.
The launcher's end of it is in `coordinator.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import attrs

from fnaccel import _torch
from fnaccel.errors import LaunchError, Preempted
from fnaccel.launch.channel import Channel
from fnaccel.launch.job import Job
from fnaccel.launch.same_job import JobIdentity
from fnaccel.launch.store import PATIENCE, endpoint, foreign_value, machines_error, open_store
from fnaccel.launch.verdict import Decision, MachineResult, decide

T = TypeVar("T")

FIRST_CALL = 30.0
"""Seconds for which the first attempt waits for more machines than the least number."""

LAST_CALL = 5.0
"""The same for later attempts, whose machines are running already."""

LOST = 15.0
"""Seconds of silence after which a machine counts as lost."""

BEAT = 1.0
"""Seconds between two signs of life."""

POLL = 0.05
"""Seconds between two looks at the store."""

LINGER = 3.0
"""Seconds for which the machine that keeps the store waits until the others have read the decision."""

TICK = 0.5
"""Seconds between two looks at the limit of this process."""

_SAME_COMMAND = "start the same command on every machine"
_OWN_PORT = "give each job a --master-port of its own"


def coordinate(job: Job, channel: Channel) -> None:
    """The life of the coordinator process, from its fork to its end.

    Args:
        job: as the launcher got it.
        channel: to the launcher. Sent: `attempt`, `ending`, and at last `final` or `error`. Received:
            `failed` and `result`.
    """
    threading.Thread(target=_end_in_time, daemon=True).start()
    # PyTorch would keep a store of its own on all interfaces for the ranks, who get ours
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.rendezvous import RendezvousError  # noqa: PLC0415 - 0.1 s

    coordinator = None
    try:
        coordinator = _Coordinator(job, channel)
        coordinator.run()
    except LaunchError as error:
        if coordinator is None or not coordinator.began:
            channel.send(error=[error.what, error.where, error.fix])
        else:  # the launcher has ranks to end
            channel.send(ending="failed")
            channel.send(final={"code": 1, "lost": str(error)})
    except (RuntimeError, RendezvousError) as error:
        channel.send(ending="failed")
        channel.send(final={"code": 1, "lost": f"the store at {endpoint(job)} does not answer: {error}"})


@attrs.define
class _Attempt:
    """One attempt: the same number and the same machines in all coordinators."""

    number: int
    machine: int
    machines: int
    keys: Any
    ending: str | None = None
    silence: dict[int, tuple[int, float]] = attrs.field(factory=dict)
    looked: float = attrs.field(factory=time.monotonic)
    passed: float = 0.0
    next_beat: float = 0.0
    told: bool = False
    reported: bool = False


class _Coordinator:
    """Attempts of a job: machines meet, each follows its launcher, machine 0 decides, and all go on.

    They share the keys of a store. Of the job: `job` (what it is), `came` and `left` (how many machines),
    `generation` (of the rendezvous), `attempts`, `failures`, `refused` and `final`. Of an attempt: for each
    machine `beat/`, `order/` (of its failure) and `result/`; `ending`, `next`, `note` and `decision`.
    """

    def __init__(self, job: Job, channel: Channel) -> None:
        self._job = job
        self._channel = channel
        self._store, self._keeps_store = open_store(job, LOST, self._pause)
        self._root = _torch.PrefixStore("fnaccel", self._store)
        self._generation = 0
        self._handler: Any = None
        self.began = False

    def run(self) -> None:
        """Form attempts until one of them ends the job."""
        _limit(2 * LOST)
        self._root.add("came", 1)
        try:
            self._compare_commands()
            attempt = self._meet()
            while attempt is not None:
                decision = self._follow(attempt)
                attempt = self._go_on(attempt, decision)
        finally:
            self._leave()

    def _read(self, store: Any, key: str, build: Callable[[str], T]) -> T:
        """A value of the store, made from its text."""
        return build(store.get(key).decode())

    def _pause(self) -> None:
        """Wait a moment. This process ends if its launcher has ended."""
        self._channel.receive(0.1)
        if self._channel.closed:
            os._exit(0)

    # meet

    def _meet(self) -> _Attempt | None:
        """Meet the other machines. Returns None if the job has ended meanwhile."""
        from torch.distributed.elastic.rendezvous.api import (  # noqa: PLC0415 - 0.1 s
            RendezvousClosedError,
            RendezvousGracefulExitError,
            RendezvousTimeoutError,
        )

        while True:
            self._generation = int(self._root.add("generation", 0))
            self._handler = self._new_handler()
            try:
                attempt = self._place(self._wait_for_rendezvous())
            except (RendezvousClosedError, RendezvousGracefulExitError):
                if self._root.check(["final"]):
                    self._channel.send(final={"code": self._read(self._root, "final", int), "lost": ""})
                    return None
                if self._root.check(["refused"]):
                    what, fix = self._read(self._root, "refused", str), f"{_SAME_COMMAND}, or {_OWN_PORT}"
                    raise machines_error(self._job, what, fix) from None
                time.sleep(POLL)  # until the next generation is announced
            except RendezvousTimeoutError:
                patience = self._job.rdzv.get("join_timeout", PATIENCE)
                came = f"{int(self._root.add('came', 0))} of {self._job.least_machines} machines"
                what = f"the launchers of {came} came within {patience:g} s"
                raise machines_error(self._job, what, _SAME_COMMAND) from None
            else:
                if attempt is not None:
                    return attempt
                self._root.compare_set("generation", str(self._generation), str(self._generation + 1))
                self._handler.shutdown()

    def _new_handler(self) -> Any:
        """A rendezvous that nobody has used: a machine that is gone has left nothing in it."""
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (  # noqa: PLC0415 - 0.1 s
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        from fnaccel.launch.rendezvous import CheckedBackend  # noqa: PLC0415 - imports the above

        name = f"fnaccel.{self._generation}"
        limits = self._job.rdzv
        patience = limits.get("join_timeout", PATIENCE)
        call = LAST_CALL if self._generation else limits.get("last_call_timeout", FIRST_CALL)
        return DynamicRendezvousHandler.from_backend(
            name,
            self._store,
            CheckedBackend(self._store, name, lambda data: foreign_value(self._job, name, data)),
            self._job.least_machines,
            self._job.machines,
            local_addr=socket.gethostname(),  # a label. The default would ask the name server
            timeout=RendezvousTimeout(join=timedelta(seconds=patience), last_call=timedelta(seconds=call)),
        )

    def _wait_for_rendezvous(self) -> Any:
        """`next_rendezvous`, in a thread: this process has to end if its launcher does."""
        outcome: list[Any] = []

        def meet() -> None:
            try:
                outcome.append(self._handler.next_rendezvous())
            except Exception as error:  # raised again below
                outcome.append(error)

        _limit(self._job.rdzv.get("join_timeout", PATIENCE) + 2 * LOST)
        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL)
            self._channel.receive(0.0)
            if self._channel.closed:
                os._exit(0)  # the others meet without this machine
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _place(self, info: Any) -> _Attempt | None:
        """This machine's place in the attempt, or None if a machine was lost before all had a place."""
        _limit(2 * LOST)
        group = _torch.PrefixStore(f"group/{self._generation}", self._root)
        card = {"keeps_store": self._keeps_store, "machine": self._job.machine}
        group.set(f"card/{info.rank}", json.dumps(card))
        names = [f"card/{rank}" for rank in range(info.world_size)]
        if not self._wait_for_keys(group, names):
            return None
        cards = [self._read(group, name, _as_card) for name in names]
        fixed = [card["machine"] for card in cards if card["machine"] is not None]
        if len(fixed) != len(set(fixed)):
            what = f"launchers were given the same --node-rank: {sorted(fixed)}"
            raise machines_error(self._job, what, "give each machine a --node-rank of its own, or none")
        places = sorted(range(info.world_size), key=lambda rank: (_order(cards[rank]), rank))
        machine = places.index(info.rank)
        if machine == 0:
            group.set("attempt", str(self._root.add("attempts", 1) - 1))
        elif not self._wait_for_keys(group, ["attempt"]):
            return None
        return self._begin(self._read(group, "attempt", int), machine, info.world_size)

    def _wait_for_keys(self, store: Any, names: list[str]) -> bool:
        end = time.monotonic() + LOST
        while not store.check(names):
            if time.monotonic() > end:
                return False
            time.sleep(POLL)
        return True

    def _begin(self, number: int, machine: int, machines: int) -> _Attempt:
        self.began = True
        keys = _torch.PrefixStore(f"attempt/{number}", self._root)
        failures = int(self._root.add("failures", 0))
        self._channel.send(
            attempt={"number": number, "machine": machine, "machines": machines, "failures": failures}
        )
        return _Attempt(number, machine, machines, keys)

    # follow

    def _follow(self, attempt: _Attempt) -> Decision:
        """Pass on reports between the launcher and the store until machine 0 has decided."""
        while not attempt.keys.check(["decision"]):
            _limit(LOST)
            now = time.monotonic()
            # if this process was frozen, the other machines were not silent for so long
            attempt.passed, attempt.looked = min(now - attempt.looked, BEAT), now
            self._listen(attempt)
            self._beat(attempt)
            if attempt.ending is None and attempt.keys.check(["ending"]):
                attempt.ending = self._read(attempt.keys, "ending", str)
                self._channel.send(ending=attempt.ending)
            if attempt.machine == 0:
                self._decide(attempt)
            elif self._is_silent(attempt, 0):
                self._publish(attempt, Decision(again=False, code=1), "machine 0 does not answer")
        self._end_ranks(attempt)
        return self._read(attempt.keys, "decision", lambda text: Decision(**json.loads(text)))

    def _end_ranks(self, attempt: _Attempt) -> None:
        """Let the launcher end its ranks, if this machine was given up and its ranks still run."""
        if not attempt.reported and attempt.ending is None:
            self._channel.send(ending="failed")
        while not attempt.reported and not self._channel.closed:
            _limit(LOST)
            attempt.reported = any("result" in message for message in self._channel.receive(POLL))

    def _listen(self, attempt: _Attempt) -> None:
        """Read reports of the launcher, and note if it is gone."""
        if self._channel.closed:
            time.sleep(POLL)
            return
        for message in self._channel.receive(POLL):
            if "failed" in message:
                attempt.keys.set(f"order/{attempt.machine}", str(attempt.keys.add("failures", 1)))
                attempt.keys.compare_set("ending", "", "failed")
            else:
                result = MachineResult(**message["result"])
                attempt.told, attempt.reported = result.told, True
                if self._is_given_up(attempt):  # it comes back, as a machine does that comes later
                    result = attrs.evolve(result, stopped=True)
                if attempt.keys.check([f"order/{attempt.machine}"]):
                    order = self._read(attempt.keys, f"order/{attempt.machine}", int)
                    result = attrs.evolve(result, order=order)
                if result.told and not result.failed and result.code not in (0, Preempted.CODE):
                    attempt.keys.compare_set("ending", "", "failed")  # ranks elsewhere have no reason to end
                self._write(attempt, attempt.machine, result)
        if self._channel.closed:
            # without the machine that keeps the store nothing can be started again
            self._give_up(attempt, attempt.machine, told=self._keeps_store or attempt.told)

    def _beat(self, attempt: _Attempt) -> None:
        now = time.monotonic()
        if now >= attempt.next_beat:
            attempt.next_beat = now + min(LOST / 3, self._job.rdzv.get("keep_alive_interval", BEAT))
            attempt.keys.add(f"beat/{attempt.machine}", 1)

    def _is_silent(self, attempt: _Attempt, machine: int) -> bool:
        """Whether a machine has shown no sign of life for too long, by this machine's clock."""
        count = int(attempt.keys.add(f"beat/{machine}", 0))
        before, seconds = attempt.silence.get(machine, (-1, 0.0))
        seconds = seconds + attempt.passed if count == before else 0.0
        attempt.silence[machine] = (count, seconds)
        return seconds > LOST

    def _give_up(self, attempt: _Attempt, machine: int, *, told: bool = False, silent: bool = False) -> None:
        result = MachineResult(code=1, failed=True, lost=True, told=told, silent=silent)
        self._write(attempt, machine, result)
        attempt.keys.compare_set("ending", "", "failed")

    def _write(self, attempt: _Attempt, machine: int, result: MachineResult) -> None:
        attempt.keys.set(f"result/{machine}", json.dumps(attrs.asdict(result)))

    def _is_given_up(self, attempt: _Attempt) -> bool:
        """Whether machine 0 has given this machine up, because it was silent."""
        name = f"result/{attempt.machine}"
        return attempt.keys.check([name]) and self._read(attempt.keys, name, _as_result).silent

    # decide, and go on

    def _decide(self, attempt: _Attempt) -> None:
        """On machine 0: see who is lost and who wants to join, and decide once all have ended."""
        silent = {machine for machine in range(1, attempt.machines) if self._is_silent(attempt, machine)}
        for machine in silent:
            if not attempt.keys.check([f"result/{machine}"]):
                self._give_up(attempt, machine, silent=True)
        has_room = attempt.machines < self._job.machines
        waiting = self._handler.num_nodes_waiting() if has_room else 0
        names = [f"result/{machine}" for machine in range(attempt.machines)]
        if waiting and attempt.ending is None and not any(attempt.keys.check([name]) for name in names):
            attempt.keys.compare_set("ending", "", "join")
        if not attempt.keys.check(names):
            return
        results = [self._read(attempt.keys, name, _as_result) for name in names]
        if any(result.silent and machine not in silent for machine, result in enumerate(results)):
            return  # it was frozen and goes on: its own result follows
        lost = [machine for machine, result in enumerate(results) if result.lost]
        left = attempt.machines - len(lost) + waiting
        more = int(self._root.add("failures", 0)) < self._job.restarts and left >= self._job.least_machines
        decision = decide(results, more=more)
        note = f"lost: the launcher of machine {', '.join(map(str, lost))}" if lost else ""
        if decision.counted:
            self._root.add("failures", 1)
        if decision.again and (lost or waiting or any(result.stopped for result in results)):
            # before the decision is published: who reads it looks for the next generation
            self._root.add("generation", 1)
        self._publish(attempt, decision, note)

    def _publish(self, attempt: _Attempt, decision: Decision, note: str) -> None:
        if decision.again:
            attempt.keys.set("next", str(self._root.add("attempts", 1) - 1))
        else:
            self._root.set("final", str(decision.code))
        attempt.keys.set("note", note)
        attempt.keys.set("decision", json.dumps(attrs.asdict(decision)))

    def _go_on(self, attempt: _Attempt, decision: Decision) -> _Attempt | None:
        """The next attempt, of the same machines or after they have met again. None if the job has ended."""
        if not decision.again:
            note = self._read(attempt.keys, "note", str)
            self._channel.send(final={"code": decision.code, "lost": note})
            return None
        if self._channel.closed:
            return None
        if int(self._root.add("generation", 0)) == self._generation:
            return self._begin(self._read(attempt.keys, "next", int), attempt.machine, attempt.machines)
        self._handler.shutdown()  # machines that wait to join it look for the next generation
        return self._meet()

    # the beginning and the end

    def _compare_commands(self) -> None:
        """See that this launcher belongs to the job of the machine that keeps the store."""
        own = JobIdentity.of(self._job)
        if self._keeps_store:
            self._root.set("job", own.text)
        elif not self._wait_for_keys(self._root, ["job"]):
            what = f"what listens at {endpoint(self._job)} is not the launcher of a job on several machines"
            raise machines_error(self._job, what, _OWN_PORT)
        first = self._read(self._root, "job", lambda text: JobIdentity(**json.loads(text)))
        difference = own.difference(first)
        if not difference:
            return
        both = f"{own}, and {first}"
        what = f"two jobs have the address {endpoint(self._job)}, and they differ in {difference}: {both}"
        if int(self._root.add("attempts", 0)) == 0:  # else it is too late to end the job because of it
            self._root.set("refused", what)
            self._handler = self._new_handler()
            self._handler.shutdown()
        raise machines_error(self._job, what, f"{_SAME_COMMAND}, or {_OWN_PORT}")

    def _leave(self) -> None:
        """Leave the store. Its keeper stays until the other machines have left."""
        with contextlib.suppress(Exception):  # the store is gone, or the job has ended anyway
            _limit(LOST + LINGER)
            if self._root.check(["final"]) and self._handler is not None:
                self._handler.shutdown()  # machines that wait to join see that the job has ended
            self._root.add("left", 1)
            end = time.monotonic() + LINGER
            while self._keeps_store and time.monotonic() < end:
                if int(self._root.add("left", 0)) >= int(self._root.add("came", 0)):
                    return
                time.sleep(POLL)


_seconds_left = [2 * LOST]


def _limit(seconds: float) -> None:
    """End this process after so many seconds, unless this is called again before. The launcher sees its end.

    A call of a store does not return if the machine that keeps it lost its power or its network.
    """
    _seconds_left[0] = seconds


def _end_in_time() -> None:
    """In a thread: count ticks, and not the time of a clock. A process that was frozen has ticked once."""
    while _seconds_left[0] > 0:
        time.sleep(TICK)
        _seconds_left[0] -= TICK
    os._exit(0)


def _as_result(text: str) -> MachineResult:
    return MachineResult(**json.loads(text))


def _as_card(text: str) -> dict[str, Any]:
    card = json.loads(text)
    if not isinstance(card, dict) or not card.keys() >= {"keeps_store", "machine"}:
        raise ValueError(text)
    return card


def _order(card: dict[str, Any]) -> tuple[bool, float]:
    """The sort key of a machine: the keeper of the store is first, the others follow by --node-rank."""
    fixed = card["machine"]
    return not card["keeps_store"], float("inf") if fixed is None else fixed
