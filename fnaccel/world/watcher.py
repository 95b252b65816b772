"""Which rank is stuck, and where? `Watcher`: the one thread of a rank that watches the other ranks.

Each rank knows where it is: in which phase of which step (`progress_marks.py`), in which call of all ranks
(`calls.py`). Together they are its `RankRecord` (`rank_record.py`). Once a second the watcher wakes up:

1. If a rank has called the roll, it reads the records of the other ranks from the store of the job, and posts
   the record of its own rank there (`record_board.py`).
2. If the newest call of its rank has lasted for two seconds, it calls the roll itself. `stalls.find_fault`
   says whether the call can't end, because a rank has left or makes another call. Then **the waiting call
   raises**. A collective waits in C++ and can't be interrupted, so the watcher cuts the TCP connections of
   its rank. `explain` turns the error of the collective into one that names the rank and the two calls.
3. If no launcher of one machine watches the job (torchrun, mpirun, srun, several machines), it looks for
   ranks that do not go on. Then one rank prints a report, and **the job ends** (`stall_watch.py`).

On one machine the launcher does 3: it reads the same records from memory, asks the same judge and prints the
same report (`launch/watchdog.py`). Then the ranks write nothing to the store while calls go on.

A rank that leaves the world posts its record first. If the rank that keeps the store is gone or stopped, the
watcher goes on with the records that it has read.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import socket
import threading
import time
from typing import Any

import attrs
import torch.distributed as dist

from fnaccel.errors import FnaccelError, PeerLostError
from fnaccel.texts import ranks_of
from fnaccel.world.calls import CallLog
from fnaccel.world.connections import cut, listening_ports
from fnaccel.world.rank_record import RankRecord
from fnaccel.world.record_board import DEPARTURE, STORE, RecordBoard
from fnaccel.world.same_order import SameOrder
from fnaccel.world.stall_watch import StallWatch
from fnaccel.world.stalls import find_fault

INTERVAL = 1.0
"""Seconds between two looks at the newest call."""

PATIENCE = 2.0
"""Seconds that a call may last before its rank calls the roll."""

ANSWER = 3.0
"""Seconds that the other ranks get to answer a roll call."""

IDLE = 0.2
"""The share of a processor below which a rank counts as waiting."""

ABANDONED = 15.0
"""Seconds for which a rank whose call was ended by an error waits until no other rank waits in that call."""

# messages of gloo, NCCL and the store if a rank is missing or sends something else
_LOST = re.compile(
    r"timeout|timed out|closed by peer|connection reset|reset by peer|broken pipe|pair closure|gloo"
    r"|communicator was aborted|remote process exited",
    re.IGNORECASE,
)
_LATE = re.compile(r"timeout|timed out", re.IGNORECASE)  # those if fa.start(timeout=) is over


class Watcher:
    """The watcher of one rank. One instance for each world of several ranks.

    Args:
        store: a store that all ranks share, with a prefix that no earlier world has used.
        log: the calls of this rank.
        rank, size: this rank, and the number of ranks.
        host: the rank that keeps the store, or None if no rank does.
        keep: TCP ports that are never cut: the store's, and a notebook's that forked this rank.
        limit: seconds that a phase may last. 0: the launcher watches that, or nobody.
        kills: whether to kill stopped ranks at the end of the job. torchrun would wait 30 seconds for them.
            `fnaccel launch` kills them itself, and returns the code of a rank that was not killed.
    """

    def __init__(
        self,
        store: Any,
        log: CallLog,
        *,
        rank: int,
        size: int,
        host: int | None,
        keep: frozenset[int] = frozenset(),
        limit: float = 0.0,
        kills: bool = False,
    ) -> None:
        self._log = log
        self._rank = rank
        self._host = host
        self._keep = keep
        self._keeper = "the launcher" if host is None else f"rank {host}"
        self._pid = os.getpid()
        self._machine = socket.gethostname()
        self._posts = itertools.count(1)
        self._left: RankRecord | None = None
        self._fault: str | None = None
        self._orders = 0
        self._lost_in = 0  # the number of the newest call that raised PeerLostError
        # of the thread: the newest call, since when it lasts, the newest one for which the roll was called
        self._count, self._since, self._asked, self._answered = 0, time.monotonic(), 0, 0
        self._looked, self._used, self._idle = self._since, time.process_time(), False
        # the store does not answer the main thread, or the watching thread, or is gone
        self._store_failed = self._store_silent = False
        self._store_lost_since: float | None = None
        self._board = RecordBoard(store, rank, size, self._record_with_ports)
        self._watched = self._board.of_thread(store)
        self._stalls = StallWatch(self._watched, host=host, limit=limit, kills=kills, interval=INTERVAL)
        log.explain = self.explain
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fnaccel-watcher", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    # called by the thread that makes the collective calls

    def explain(self, name: str, error: RuntimeError) -> Exception | None:
        """The error to raise in place of a collective's error, or None if that has another cause."""
        if isinstance(error, FnaccelError) or not _LOST.search(str(error)):
            return None
        what = self._fault or self._ask(name, str(error).splitlines()[0])
        self._lost_in = self._log.count
        fix = (
            "see whether another rank failed. If none did, make the same calls on every rank "
            "(fa.shard gives all the same number of batches)"
        )
        if _LATE.search(str(error)):
            fix = (
                f"{fix}, or raise fa.start(timeout=). `fnaccel launch --watchdog 30` and "
                "fa.start(watchdog=30) show the stack of each rank of a hang"
            )
        return PeerLostError(what, where=f"{name} on rank {self._rank}", fix=fix)

    def leave(self, left: str, *, clean: bool, follows: bool = False, wait: bool = True) -> bool:
        """Tell the other ranks that this rank leaves. Returns whether all of them have left too.

        Args:
            left: why, as the predicate of a sentence whose subject is the rank.
            clean: wait for ranks that are about to leave, some seconds at most.
            follows: whether this rank leaves because it has lost another one.
            wait: whether to wait at all.
        """
        atexit.unregister(self._exit)
        if os.getpid() != self._pid or self._left is not None:  # a fork says nothing in its parent's name
            return True
        everyone = False
        failed = not clean and self._log.failed == self._log.count > 0
        self._left = attrs.evolve(self._record(), left=left, failed=failed, follows=follows, inside=False)
        self._stalls.end_writing()
        self._stop.set()
        try:
            if self._store_failed and not self._board.answers_again():
                raise RuntimeError("the store does not answer")
            self._board.client.add("left", 1)
            if wait and not clean and self._host == self._rank:
                self._board.call_and_wait(2 * INTERVAL)  # why it leaves can't be read later
            else:
                self._board.call_roll()
            everyone = wait and clean and self._board.all_leave()
        except RuntimeError:
            everyone = clean  # the rank that keeps the store is gone, as it is if all have left
        self._thread.join(STORE)
        if not self._thread.is_alive():
            self._watched.close()
        self._board.close()
        self._stalls.close()
        self._log.explain = None
        return everyone

    def all_come(self, limit: float) -> bool:
        """Whether all ranks come here after the same calls, within `limit` seconds. After `leave`: no."""
        if self._left is not None:
            return False
        try:
            return self._board.all_come(limit)
        except RuntimeError:  # the rank that keeps the store is gone
            return False

    def same_order(self, part: int, parts: int) -> SameOrder:
        """A new sequence of things that all ranks of a part of the world do in the same order."""
        self._orders += 1
        return SameOrder(
            lambda: self._board.client,
            self._rank,
            self._board.size // parts,
            f"order/{self._orders}/{part}",
            lambda: self._log.count,
            lambda: self._fault is not None,
        )

    def abandon(self, error: Exception) -> None:
        """Tell the other ranks that an error ended the newest call of this one, in which they may wait.

        Returns once none of them waits there: a collective of this rank would be taken for the missing one.
        """
        lost = isinstance(error, RuntimeError) and _LOST.search(str(error))
        if self._left is not None or lost or isinstance(error, PeerLostError):
            return
        number, line = self._log.count, (str(error).splitlines() or [""])[0]
        self._log.abandoned, self._log.why = number, f"which raised {type(error).__name__} in it: {line}"
        end = time.monotonic() + ABANDONED
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store is gone
            while time.monotonic() < end:
                self._board.call_and_wait(INTERVAL, enough=lambda: not self._waiting(number))
                if not self._waiting(number):
                    return

    def _waiting(self, number: int) -> bool:
        """Whether another rank may be in the middle of call `number`, or has not come to it."""
        passed = [record for record in self._board.others if not _is_in(record, number)]
        return len(passed) + 1 < self._board.size

    def cut(self) -> None:
        """Shut down the connections of this rank's process groups, so that the other ranks stop to wait.

        Closing them is not enough: processes that were forked for data may hold copies.
        """
        remote = {port for record in self._board.others for port in record.ports}
        cut(listening_ports() - self._keep, remote - self._keep)

    def _exit(self) -> None:
        self.leave("exited", clean=False, follows=self._lost_in == self._log.count > 0)

    def _ask(self, name: str, text: str) -> str:
        """The fault of the other ranks, after a collective has failed."""
        me = self._record()
        waited = f"rank {self._rank} waited in call {me.calls}, {me.call()}, " if me.inside else (
            f"rank {self._rank} waited in {name} "
        )  # fmt: skip
        try:
            silent = self._board.call_and_wait(ANSWER, enough=self._find_fault)
        except RuntimeError as failure:
            self._store_failed = not isinstance(failure, dist.DistStoreError)
            host = f"{waited}for {self._keeper}, which keeps the store and does not answer: {text}"
            return self._find_fault() or host
        fault = self._fault or self._find_fault()
        if fault is not None:
            return fault
        if silent:
            return (
                f"{waited}for {ranks_of(silent)}: no answer, so it exited, was killed or is cut off ({text})"
            )
        for record in self._board.others:
            if record.left is not None:
                return f"{waited}for rank {record.rank}, which {record.departure}: {text}"
            if record.calls < me.calls:
                number = f"call {record.calls}, {record.call()}" if record.calls else "none"
                return f"{waited}for rank {record.rank}, whose newest call is {number}: {text}"
        return f"{waited}for ranks that did not come: {text}"

    def _find_fault(self, *, idle: bool = True) -> str | None:
        return find_fault(self._record(), self._board.others, idle=idle)

    def _record(self) -> RankRecord:
        """The record of this rank as it is now."""
        if self._left is not None:
            return self._left
        calls = tuple(self._log.newest)  # at once: the other thread goes on
        return attrs.evolve(
            self._stalls.place(),
            rank=self._rank,
            pid=self._pid,
            host=self._machine,
            calls=calls[-1][0] if calls else 0,
            names=[name for _, name in calls],
            inside=self._log.thread is not None,
            line=self._log.place(),
            abandoned=self._log.abandoned,
            why=self._log.why,
            posts=next(self._posts),
        )

    def _record_with_ports(self) -> RankRecord:
        """The record that is posted. Ports are looked up for it only, which takes a millisecond."""
        return attrs.evolve(self._record(), ports=sorted(listening_ports() - self._keep))

    # the methods below run in the watching thread

    def _watch(self) -> None:
        while not self._stop.is_set():  # the first look at once: a rank that never posts is not in the table
            now = time.monotonic()
            self._look_at_itself(now)
            self._look_at_store(now)
            self._end_call(now)
            self._stop.wait(min(INTERVAL, self._stalls.beat))

    def _look_at_itself(self, now: float) -> None:
        """Note for how long its newest call has lasted, and for how long the rank has been at its place."""
        used = time.process_time()
        self._idle = used - self._used < IDLE * (now - self._looked)
        self._looked, self._used = now, used
        if self._log.count != self._count:
            self._count, self._since = self._log.count, now
        self._stalls.look_at_itself(now)

    def _look_at_store(self, now: float) -> None:
        """Look at the others through the store. Note whether the rank that keeps the store answers."""
        if self._store_lost_since is not None:
            return
        try:
            if self._store_silent and not self._watched.answers_again():
                self._stalls.judge_keeper()
                return
            self._store_silent = False
            self._answer_roll_call(waits=self._is_late(now) and self._log.thread is not None)
            self._stalls.look(now)
        except dist.DistStoreError:  # it has answered, too late for one operation
            return
        except RuntimeError:
            # its process is stopped and may go on, or it is gone
            self._store_silent = time.monotonic() - now >= 0.9 * STORE
            self._store_lost_since = None if self._store_silent else now

    def _is_late(self, now: float) -> bool:
        # not sooner: all ranks may be about to raise the same error, and one of them has left already
        return now - self._since >= PATIENCE

    def _answer_roll_call(self, *, waits: bool) -> None:
        """Answer a roll call. A rank that waits calls the roll, once for each call."""
        if waits and self._asked != self._count:
            self._asked = self._count
            self._watched.call_roll()
        number = self._watched.roll()
        if number > self._answered or waits:
            self._watched.read()
        if number > self._answered:
            self._watched.post()  # after it has read the others: a post says so
            self._answered = number

    def _end_call(self, now: float) -> None:
        """End a call that can't end by itself: it raises if the connections of this rank are cut."""
        if self._fault is not None or self._left is not None or not self._is_late(now):
            return
        self._fault = self._find_fault(idle=self._idle)
        lost = self._store_lost_since
        inside = self._log.thread is not None
        if self._fault is None and lost is not None and inside and now - max(self._since, lost) >= DEPARTURE:
            # the ranks that are left may wait for each other, in connections that nobody closes
            me = self._record()
            self._fault = (
                f"rank {self._rank} waited in call {me.calls}, {me.call()}, and {self._keeper}, which "
                "keeps the store, is gone"
            )
        if self._fault is not None:
            self.cut()


def _is_in(record: RankRecord, number: int) -> bool:
    """Whether a rank is in the middle of call `number`, or will come to it."""
    ended = record.calls == number and (not record.inside or record.abandoned == number)
    return record.left is None and record.calls <= number and not ended
