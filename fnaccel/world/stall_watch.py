"""Ranks that do not go on: `StallWatch`, the part of a rank's watcher that ends a job which stands still.

If no launcher of one machine watches the job (torchrun, mpirun, srun, several machines), each rank posts its
record every few seconds. Ranks 0 and 1, and ranks that have not moved for half of the limit, read the records
of all, and `stalls.judge` says which rank keeps the others waiting. The rank that finds a reason writes it to
the store. Then every rank posts its stacks, one rank prints the report, and the job ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

import attrs

from fnaccel.world.hang_report import CODE, report
from fnaccel.world.rank_record import RankRecord, SharedRecords, process_state
from fnaccel.world.record_board import RecordBoard
from fnaccel.world.stacks import own_stacks
from fnaccel.world.stalls import Finding, StallClock, judge

BEATS = 0.5, 5.0
"""The fewest and the most seconds between two posts. A twentieth of the limit is between them."""

MISSED = 3
"""A rank that misses so many posts is silent."""

REPORT = 10.0
"""Seconds that the ranks get to post their stacks, and the rank that prints to print them."""


class StallWatch:
    """Where this rank is, and for how long ranks have not moved. For the watching thread.

    Args:
        board: that of the watching thread.
        host: the rank that keeps the store, or None if no rank does.
        limit: seconds that a phase may last. 0: the launcher watches that, or nobody.
        kills: whether to kill stopped ranks at the end of the job.
        interval: seconds between two looks.

    Attributes:
        beat: seconds between two posts.
        age: for how long this rank has been at its place.
    """

    def __init__(
        self, board: RecordBoard, *, host: int | None, limit: float, kills: bool, interval: float
    ) -> None:
        self._board = board
        self._host = host
        self._limit = limit
        self._kills = kills
        self._machine = socket.gethostname()
        self.beat = min(max(limit / 20, BEATS[0]), BEATS[1])
        self.age = 0.0
        self._clock = StallClock(min(interval, self.beat))
        self._next_post, self._suspects = 0.0, False
        self._newest_posts: dict[int, tuple[int, float]] = {}
        self._memory = SharedRecords.make(1) if limit else None
        self.end_writing = (lambda: None) if self._memory is None else self._memory.write(0)

    def place(self) -> RankRecord:
        """Where this rank is, as its own memory says it."""
        if self._memory is None:
            return RankRecord(memory=-1)
        return attrs.evolve(self._memory.read(0), memory=self._memory.descriptor, age=self.age)

    def look_at_itself(self, now: float) -> None:
        """Note for how long this rank has been at its place."""
        if self._memory is not None:
            self._clock.tick(now)
            here = attrs.evolve(self._memory.read(0), rank=self._board.rank)
            self.age = self._clock.see(here, process_state(os.getpid())).age

    def close(self) -> None:
        """Free the memory."""
        if self._memory is not None:
            self._memory.close()

    def look(self, now: float) -> None:
        """Post where this rank is, if it is time. End the job if the ranks have not gone on for too long."""
        if not self._limit or now < self._next_post:
            return
        self._next_post = now + self.beat
        self._board.post()
        if self._board.rank < 2 or self.age >= self._limit / 2:
            self._board.read()
            others = [self._see(record, now) for record in self._board.others if record.left is None]
            records = sorted([self._record_and_state(), *others], key=lambda record: record.rank)
            finding = judge(records, self._limit, apart=self._clock.compare(records))
            # twice: a rank may have moved since it posted
            if finding is not None and self._suspects:
                texts = [record.text() for record in records]
                found = {"by": self._board.rank, "finding": attrs.asdict(finding), "records": texts}
                self._board.client.compare_set("finding", "", json.dumps(found))
            self._suspects = finding is not None
        if self._board.client.check(["finding"]):
            self._end()

    def _record_and_state(self) -> RankRecord:
        return attrs.evolve(self._board.record(), state=process_state(os.getpid()))

    def _see(self, record: RankRecord, now: float) -> RankRecord:
        """Another rank as it is now, by its newest post and, on this machine, by its process."""
        posts, since = self._newest_posts.get(record.rank, (-1, now))
        if posts != record.posts:
            self._newest_posts[record.rank] = (record.posts, now)
            since = now
        missed = now - since
        silent = missed if missed > MISSED * self.beat else 0.0
        state, place, age = "", record, record.age + missed
        if record.host == self._machine:
            state = process_state(record.pid)
            if silent or state == "T":  # it may have gone on after its last post
                place = _newest_place(record)
                age = age if place.sequence == record.sequence else missed
        # a rank that begins to read finds ranks that were stopped before
        stopped = missed if state == "T" else 0.0
        return attrs.evolve(place, age=age, state=state, silent=silent, stopped=stopped)

    def judge_keeper(self) -> None:
        """End this rank if it does not go on, and the rank that keeps the store does not answer."""
        if not self._limit or self._host is None:
            return
        me = self._record_and_state()
        record = self._board.records.get(self._host, me)
        silent = attrs.evolve(record, rank=self._host, age=me.age, silent=me.age, state="", stopped=me.age)
        if record is not me and record.host == self._machine:
            silent = attrs.evolve(_newest_place(silent), state=process_state(record.pid))
        finding = judge([me, silent], self._limit)
        if finding is None:
            return
        prints = self._board.rank == (1 if self._host == 0 else 0)
        if prints:
            records = sorted([me, silent], key=lambda record: record.rank)
            self._print(finding, records, {self._board.rank: self._stacks()})
            self._kill_stopped(records)
        _leave(0.0 if prints else REPORT)

    def _end(self) -> NoReturn:
        """Post the stacks, print the report if it is this rank's, and end this process."""
        found = json.loads(self._board.client.get("finding"))
        finding = Finding(**found["finding"])
        records = [RankRecord.of_text(text) for text in found["records"]]
        pause = REPORT
        with contextlib.suppress(RuntimeError):
            self._board.client.set(f"stacks/{self._board.rank}", self._stacks())
            if found["by"] == self._board.rank:
                # ranks that are silent are not waited for
                writing = [record.rank for record in records if record.state != "T" and not record.silent]
                self._board.wait_for([f"stacks/{rank}" for rank in writing], REPORT)
                store, keys = self._board.client, {record.rank: f"stacks/{record.rank}" for record in records}
                stacks = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
                self._print(finding, records, stacks)
                self._board.client.set("printed", "1")
            else:
                self._board.wait_for(["printed"], 2 * REPORT)
            pause = 1.0 if self._board.rank == self._host else 0.1
        self._kill_stopped(records)
        _leave(pause)

    def _stacks(self) -> str:
        return own_stacks(threading.main_thread().ident or 0)

    def _print(self, finding: Finding, records: list[RankRecord], stacks: dict[int, str]) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            print(report(finding, records, stacks, limit=self._limit), file=sys.stderr, flush=True)

    def _kill_stopped(self, records: list[RankRecord]) -> None:
        """Kill the stopped ranks of this machine, which would get no other signal."""
        for record in records if self._kills else []:
            here = record.host == self._machine and record.rank != self._board.rank
            if here and process_state(record.pid) == "T":
                with contextlib.suppress(OSError):
                    os.kill(record.pid, signal.SIGKILL)


def _newest_place(record: RankRecord) -> RankRecord:
    """The record at the place that a rank of this machine has reached since its post."""
    memory = SharedRecords.of_process(record.pid, record.memory)
    return record if memory is None else memory.read(0, record)


def _leave(pause: float) -> NoReturn:
    """End this process. Its main thread waits in C++ and would not."""
    time.sleep(pause)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None if it was closed
            stream.flush()
    os._exit(CODE)
