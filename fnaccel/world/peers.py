"""`Peers`: how a rank learns that another rank left, exited or entered another call.

A collective waits in C++ and can't be interrupted. So a thread watches it: if the newest call has
not ended for some seconds, it writes this rank's record to the store and reads those of the others. If the
fault is certain it cuts this rank's connections, so that the collective raises, and `explain` turns that
error into one that names the rank and the two calls. A rank that leaves writes its record first.

Nothing is written to the store while calls go on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import time
from datetime import timedelta
from typing import Any

import attrs

from fnaccel.errors import FnaccelError, PeerLostError
from fnaccel.world.calls import CallLog
from fnaccel.world.connections import cut, listening_ports
from fnaccel.world.faults import Record, find_fault

INTERVAL = 1.0
"""Seconds between two looks at the newest call."""

PATIENCE = 2.0
"""Seconds that a call may last before its rank asks the other ranks for their records."""

ANSWER = 3.0
"""Seconds that the other ranks get to answer once a collective has failed."""

DEPARTURE = 5.0
"""Seconds for which a rank that leaves waits for ranks that still compute."""

IDLE = 0.2
"""The share of a processor below which a rank counts as waiting."""

LAST_WORDS = 1.0
"""Seconds for which the rank that keeps the store stays, so that the others can read why it leaves."""

# messages of gloo, NCCL and the store if a rank is missing or sends something else
_LOST = re.compile(
    r"timeout|timed out|closed by peer|connection reset|reset by peer|broken pipe|pair closure|gloo"
    r"|communicator was aborted|remote process exited",
    re.IGNORECASE,
)


class Peers:
    """A rank's records of the other ranks. One instance for each world of several ranks.

    Args:
        store: a store that all ranks share, with a prefix that no earlier world has used.
        log: the calls of this rank.
        rank, size: this rank, and the number of ranks.
        host: the rank that keeps the store, or None if no rank does.
        blocking: whether `store.wait` costs nothing while it waits, as that of a TCPStore. Else a roll
            call is answered after `INTERVAL` seconds.
        keep: TCP ports that are never cut: the store's, and a notebook's that forked this rank.
    """

    def __init__(
        self,
        store: Any,
        log: CallLog,
        *,
        rank: int,
        size: int,
        host: int | None,
        blocking: bool,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._log = log
        self._rank = rank
        self._size = size
        self._host = host
        self._keep = keep
        self._keeper = "the launcher" if host is None else f"rank {host}"
        self._pid = os.getpid()
        # a client of a store serves one thread at a time
        self._store, self._watched, self._heard = (_client(store) for _ in range(3))
        self._records: dict[int, Record] = {}
        self._left: Record | None = None
        self._fault: str | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._store.add("roll", 0)
        self._store.add("left", 0)
        log.explain = self.explain
        work = [self._watch, self._listen] if blocking else [self._watch]
        self._threads = [threading.Thread(target=fn, name="fnaccel-peers", daemon=True) for fn in work]
        for thread in self._threads:
            thread.start()
        atexit.register(self._exit)

    # called by the thread that makes the collective calls

    def explain(self, name: str, error: RuntimeError) -> Exception | None:
        """The error to raise in place of a collective's error, or None if that has another cause."""
        if isinstance(error, FnaccelError) or not _LOST.search(str(error)):
            return None
        what = self._fault or self._ask(name, str(error).splitlines()[0])
        return PeerLostError(
            what,
            where=f"{name} on rank {self._rank}",
            fix="see whether another rank failed. If none did, make the same calls on every rank "
            "(fa.shard gives all the same number of batches)",
        )

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
        self._stop.set()  # before the roll call, which wakes the threads
        self._wake.set()
        try:
            number = self._call_roll()
            self._store.add("left", 1)
            if wait and clean:
                everyone = self._wait_for_departures()
            elif wait and self._host == self._rank:
                self._wait_until_heard(number)
        except RuntimeError:
            everyone = clean  # the rank that keeps the store is gone, as it is if all have left
        for thread in self._threads:
            thread.join(2 * INTERVAL)
        self._log.explain = None
        return everyone

    def all_come(self, limit: float) -> bool:
        """Whether all ranks come here after the same calls, within `limit` seconds. All get the same answer.

        For a place to which a rank may come alone: nothing but keys of the store is sent.
        """
        place = f"come/{self._log.count}"
        try:
            everyone, end = self._store.add(place, 1) == self._size, time.monotonic() + limit
            while not (everyone or self._store.check([f"{place}/answer"]) or time.monotonic() > end):
                time.sleep(0.005)
            if self._store.add(f"{place}/answers", 1) == 1:
                self._store.set(f"{place}/answer", "all" if everyone else "some")
            return bool(self._store.get(f"{place}/answer") == b"all")
        except RuntimeError:  # the rank that keeps the store is gone
            return False

    def cut(self) -> None:
        """Shut down the connections of this rank's process groups, so that the other ranks stop to wait.

        Closing them is not enough: processes that were forked for data may hold copies.
        """
        remote = {port for record in self._peers() for port in record.ports}
        cut(listening_ports() - self._keep, remote - self._keep)

    def _exit(self) -> None:
        self.leave("exited", clean=False)

    def _ask(self, name: str, text: str) -> str:
        """The fault of the other ranks, after a collective has failed."""
        me = self._record()
        waited = f"rank {self._rank} waited in call {me.count}, {me.call}, " if me.inside else (
            f"rank {self._rank} waited in {name} "
        )  # fmt: skip
        try:
            silent = self._silent()
        except RuntimeError:
            host = f"{waited}for {self._keeper}, which keeps the store and does not answer: {text}"
            return self._find_fault() or host
        fault = self._fault or self._find_fault()
        if fault is not None:
            return fault
        if silent:
            ranks = ("ranks " if len(silent) > 1 else "rank ") + ", ".join(map(str, silent))
            return f"{waited}for {ranks}: no answer, so it exited, was killed or is cut off ({text})"
        for record in self._peers():
            if record.left is not None:
                return f"{waited}for rank {record.rank}, which {record.departure}: {text}"
            if record.count < me.count:
                number = f"call {record.count}, {record.call}" if record.count else "none"
                return f"{waited}for rank {record.rank}, whose newest call is {number}: {text}"
        return f"{waited}for ranks that did not come: {text}"

    def _silent(self) -> list[int]:
        """The ranks that do not answer a roll call. Ends early if a fault is certain."""
        number = self._call_roll()
        end = time.monotonic() + ANSWER
        while True:
            self._read(self._store)
            answered = {
                record.rank for record in self._peers() if record.answers >= number or record.left is not None
            }
            silent = [rank for rank in range(self._size) if rank not in {self._rank, *answered}]
            if not silent or time.monotonic() > end or self._find_fault():
                return silent
            time.sleep(0.02)

    def _wait_for_departures(self) -> bool:
        start = time.monotonic()
        while int(self._store.get("left")) < self._size:
            waited = time.monotonic() - start
            if waited > DEPARTURE:
                return False
            if waited > 0.1:
                self._read(self._store)
                # a rank that is inside a call which this rank never made waits for this rank
                if any(record.inside and record.count > self._log.count for record in self._peers()):
                    return False
            time.sleep(0.002 if waited < 0.1 else 0.05)
        return True

    def _wait_until_heard(self, number: int) -> None:
        end = time.monotonic() + LAST_WORDS
        while time.monotonic() < end:
            if self._store.add(f"heard/{number}", 0) >= self._size - int(self._store.get("left")):
                return
            time.sleep(0.005)

    # records and the roll, in the store

    def _peers(self) -> list[Record]:
        """The records of the other ranks. A copy, since another thread may add records meanwhile."""
        return list(self._records.values())

    def _find_fault(self) -> str | None:
        return find_fault(self._record(), self._peers())

    def _record(self, answers: int = 0) -> Record:
        if self._left is not None:
            return self._left
        calls = tuple(self._log.newest)  # at once: the other thread goes on
        return Record(
            rank=self._rank,
            count=calls[-1][0] if calls else 0,
            names=[name for _, name in calls],
            inside=self._log.thread is not None,
            place=self._log.place(),
            abandoned=self._log.abandoned,
            ports=tuple(sorted(listening_ports() - self._keep)),
            answers=answers,
        )

    def _call_roll(self, store: Any = None) -> int:
        """Write this rank's record, and ask all other ranks for theirs. Returns the number of the request."""
        store = self._store if store is None else store
        store.set(f"record/{self._rank}", self._record(answers=int(store.get("roll"))).text())
        number = int(store.add("roll", 1))
        store.set(f"asked/{number}", "1")
        return number

    def _read(self, store: Any) -> None:
        for rank in range(self._size):
            if rank != self._rank and store.check([f"record/{rank}"]):
                self._records[rank] = Record.of(store.get(f"record/{rank}"))

    # the methods below run in the watching thread

    def _watch(self) -> None:
        try:
            self._watch_others()
        except RuntimeError:  # the rank that keeps the store is gone
            self._watch_alone()

    def _watch_others(self) -> None:
        store, answered = self._watched, 0
        count, since, last_asked = 0, time.monotonic(), 0
        looked, used, idle = since, time.process_time(), False
        while not self._stop.is_set():
            self._wake.wait(INTERVAL)
            self._wake.clear()
            if self._stop.is_set():
                return
            inside, now = self._log.thread is not None, time.monotonic()
            if now - looked >= INTERVAL / 2:
                idle = time.process_time() - used < IDLE * (now - looked)
                looked, used = now, time.process_time()
            if self._log.count != count:
                count, since = self._log.count, now
            # not sooner: all ranks may be about to raise the same error, and one of them has left already
            waits = now - since >= PATIENCE
            if waits and inside and last_asked != count:
                last_asked = count
                self._call_roll(store)
            number = int(store.get("roll"))
            if number > answered:
                store.set(f"record/{self._rank}", self._record(answers=number).text())
                self._read(store)
                store.add(f"heard/{number}", 1)
                answered = number
            elif waits and inside:
                self._read(store)
            if waits and self._records and self._judge(idle=idle):
                # the others judge by this record
                store.set(f"record/{self._rank}", self._record(answers=int(store.get("roll"))).text())
                self.cut()
                return

    def _watch_alone(self) -> None:
        """End a call that goes on although the rank that keeps the store is gone.

        The ranks that are left may wait for each other, in connections that nobody closes.
        """
        count, since = self._log.count, time.monotonic()
        while not self._stop.wait(INTERVAL):
            now = time.monotonic()
            if self._log.count != count or self._log.thread is None:
                count, since = self._log.count, now
            elif self._judge() or now - since >= DEPARTURE:
                if self._fault is None:
                    me = self._record()
                    self._fault = (
                        f"rank {self._rank} waited in call {me.count}, {me.call}, and {self._keeper}, which "
                        "keeps the store, is gone"
                    )
                self.cut()
                return

    def _listen(self) -> None:
        """Wake the other thread at each roll call: a wait with a short timeout would log each timeout."""
        number = 0
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store is gone
            while not self._stop.is_set():
                number += 1
                self._heard.wait([f"asked/{number}"], timedelta(days=1))
                self._wake.set()

    def _judge(self, *, idle: bool = True) -> bool:
        """Check whether a fault is certain from the records of the other ranks."""
        if self._left is None:
            self._fault = find_fault(self._record(), self._peers(), idle=idle)
        return self._fault is not None


def _client(store: Any) -> Any:
    client = store.clone()
    client.set_timeout(timedelta(seconds=DEPARTURE))
    return client
