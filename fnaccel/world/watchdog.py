"""`Watchdog`: a thread of each rank. It ends the job if the ranks have not gone on for too long.

For jobs that no launcher of one machine watches: torchrun, mpirun, srun, several machines. Each rank writes
its position to the store of the job every few seconds. Ranks 0 and 1, and ranks that have not moved for half
of the limit, read the positions of all. The rank that finds a reason writes it to the store. Then every
rank writes its stacks there, one rank prints them, and all ranks end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import attrs

from fnaccel.world.hang_report import CODE, report
from fnaccel.world.progress_record import Position, ProgressRecords
from fnaccel.world.stacks import own_stacks
from fnaccel.world.stall_clock import StallClock, process_state
from fnaccel.world.stalls import Finding, RankView, judge

BEATS = 0.5, 5.0
"""The fewest and the most seconds between two looks. A twentieth of the limit is between them."""

MISSED = 3
"""A rank that misses so many looks is silent."""

ANSWER = 10.0
"""Seconds that the ranks get to write their stacks, and the rank that prints to print them."""

PATIENCE = 5.0
"""Seconds that the operations of one look at the store may take."""


@attrs.frozen(kw_only=True)
class _Post:
    """What a rank writes to the store."""

    beat: int
    age: float
    pid: int
    host: str
    descriptor: int
    position: dict[str, Any]

    def text(self) -> str:
        return json.dumps(attrs.asdict(self))


class Watchdog:
    """The watching thread of one rank.

    Args:
        store: a store that all ranks share, with a prefix of its own.
        rank, size: this rank, and the number of ranks.
        host: the rank that keeps the store, or None if no rank does.
        limit: seconds that a phase may last.
        kills: whether to kill stopped ranks. torchrun would wait 30 seconds for them. `fnaccel launch` kills
            them itself, and returns the code of a rank that was not killed.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, host: int | None, limit: float, kills: bool
    ) -> None:
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=PATIENCE))
        self._rank = rank
        self._size = size
        self._keeper = host
        self._limit = limit
        self._kills = kills
        self._beat = min(max(limit / 20, BEATS[0]), BEATS[1])
        self._own = StallClock(self._beat)
        self._others = StallClock(self._beat)
        self._heard: dict[int, tuple[int, float]] = {}
        self._suspects = False
        self._views: list[RankView] = []
        self._posts: dict[int, _Post] = {}
        self._records = ProgressRecords.make(1)
        self._end_writing = self._records.write(0)
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._answered = time.monotonic()
        # if the rank that keeps the store is stopped, `store.check` never returns
        work = [self._watch] if host in (None, rank) else [self._watch, self._watch_keeper]
        self._threads = [threading.Thread(target=fn, name="fnaccel-watchdog", daemon=True) for fn in work]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread. This rank is not judged any more."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._end_writing()
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        self._records.close()

    # the methods below run in the threads

    def _watch(self) -> None:
        beat = 0
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store has closed it
            self._look(beat)  # at once: a rank that never posts is missing in the table
            while not self._stop.wait(self._beat):
                beat += 1
                self._look(beat)
                self._answered = time.monotonic()
            self._store.set(self._key(self._rank), "")
        self._answered = math.inf

    def _look(self, beat: int) -> None:
        me = self._view_of_self(self._own)
        position = attrs.asdict(me.position)
        file = self._records.descriptor
        post = _Post(beat=beat, age=me.age, pid=me.pid, host=me.host, descriptor=file, position=position)
        self._store.set(self._key(self._rank), post.text())
        if self._rank < 2 or me.age >= self._limit / 2:
            finding = self._judge(me)
            # twice: a rank may have moved since it wrote its position
            if finding is not None and self._suspects:
                views = [attrs.asdict(view) for view in self._views]
                text = json.dumps({"by": self._rank, "finding": attrs.asdict(finding), "views": views})
                self._store.compare_set("finding", "", text)
            self._suspects = finding is not None
        if self._store.check(["finding"]):
            self._end()

    def _key(self, rank: int) -> str:
        return f"at/{rank}"

    def _view_of_self(self, clock: StallClock) -> RankView:
        clock.tick(time.monotonic())
        pid, state = os.getpid(), process_state(os.getpid())
        position = self._records.read(0)
        return clock.view(self._rank, position, pid=pid, host=socket.gethostname(), state=state)

    def _judge(self, me: RankView) -> Finding | None:
        """Compare the newest positions of all ranks."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        there = [rank for rank in others if self._store.check([self._key(rank)])]
        texts = self._store.multi_get([self._key(rank) for rank in there]) if there else []
        now = time.monotonic()
        self._others.tick(now)
        self._views = [me]
        for rank, text in zip(there, texts, strict=True):
            if text:
                self._views.append(self._view(rank, _Post(**json.loads(text)), me.host, now))
        self._views.sort(key=lambda view: view.rank)
        apart = self._others.compare(self._views)
        return judge(self._views, self._limit, apart=apart)

    def _view(self, rank: int, post: _Post, here: str, now: float) -> RankView:
        beat, since = self._heard.get(rank, (-1, now))
        if beat != post.beat:
            self._heard[rank] = (post.beat, now)
            since = now
        self._posts[rank] = post
        missed = now - since
        silent = missed if missed > MISSED * self._beat else 0.0
        position, state = Position(**post.position), ""
        age = post.age + missed
        if post.host == here:
            state = process_state(post.pid)
            if silent or state == "T":  # it may have gone on after its last post
                position, age = self._newest(post, age, missed)
        seen = self._others.view(rank, position, pid=post.pid, host=post.host, state=state)
        # a rank that begins to read finds ranks that were stopped before
        stopped = missed if state == "T" else 0.0
        return attrs.evolve(seen, age=age, silent=silent, stopped=stopped)

    def _newest(self, post: _Post, age: float, missed: float) -> tuple[Position, float]:
        """The position of a rank of this machine that posts nothing, and for how long it has been there."""
        posted = Position(**post.position)
        records = ProgressRecords.of_process(post.pid, post.descriptor)
        position = posted if records is None else records.read(0)
        return position, age if position.sequence == posted.sequence else missed

    def _watch_keeper(self) -> None:
        """End this rank if it does not go on, and the rank that keeps the store does not answer."""
        keeper, first, clock = self._keeper or 0, 1 if self._keeper == 0 else 0, StallClock(self._beat)
        while not self._stop.wait(self._beat):
            me = self._view_of_self(clock)
            if time.monotonic() - self._answered < PATIENCE:
                continue
            known = next((view for view in self._views if view.rank == keeper), me)
            other = attrs.evolve(known, rank=keeper, age=me.age, silent=me.age, state="", stopped=me.age)
            if known is not me and known.host == me.host:
                position, _ = self._newest(self._posts[keeper], 0.0, 0.0)
                other = attrs.evolve(other, position=position, state=process_state(known.pid))
            finding = judge([me, other], self._limit)
            if finding is not None:
                if self._rank == first:
                    stacks = {self._rank: own_stacks(self._records.thread(0))}
                    views = sorted([me, other], key=lambda view: view.rank)
                    _print(report(finding, views, stacks, limit=self._limit))
                    if self._kills:
                        self._kill_stopped(views)
                self._leave(0.0 if self._rank == first else ANSWER)

    def _end(self) -> NoReturn:
        """Write the stacks, print the report if it is this rank's, and end this process."""
        found = json.loads(self._store.get("finding"))
        finding = Finding(**found["finding"])
        views = [_view_of(view) for view in found["views"]]
        self._answered, pause = math.inf, ANSWER
        with contextlib.suppress(RuntimeError):
            self._store.set(f"stacks/{self._rank}", own_stacks(self._records.thread(0)))
            if found["by"] == self._rank:
                _print(report(finding, views, self._stacks(views), limit=self._limit))
                self._store.set("printed", "1")
            else:
                self._wait_for(["printed"], 2 * ANSWER)
            pause = 1.0 if self._rank == self._keeper else 0.1
        if self._kills:
            self._kill_stopped(views)
        self._leave(pause)

    def _stacks(self, views: list[RankView]) -> dict[int, str]:
        """The stacks of all ranks that answer in time. Silent ranks are not waited for."""
        expected = [view.rank for view in views if view.state != "T" and not view.silent]
        self._wait_for([f"stacks/{rank}" for rank in expected], ANSWER)
        there = [view.rank for view in views if self._store.check([f"stacks/{view.rank}"])]
        return {rank: self._store.get(f"stacks/{rank}").decode() for rank in there}

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._store.check(keys):
            time.sleep(0.05)

    def _kill_stopped(self, views: list[RankView]) -> None:
        """Kill the stopped ranks of this machine, which would get no other signal."""
        here = socket.gethostname()
        for view in views:
            if view.host == here and view.rank != self._rank and process_state(view.pid) == "T":
                with contextlib.suppress(OSError):
                    os.kill(view.pid, signal.SIGKILL)

    def _leave(self, pause: float) -> NoReturn:
        """End this process. Its main thread waits in C++ and would not."""
        time.sleep(pause)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(CODE)


def _view_of(fields: dict[str, Any]) -> RankView:
    return RankView(position=Position(**fields.pop("position")), **fields)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(text, file=sys.stderr, flush=True)
