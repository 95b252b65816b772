"""`RecordBoard`: the records of all ranks in the store of the job.

A rank posts its record when it leaves, when a rank calls the roll, and every few seconds if no launcher of
one machine watches. A roll call raises a counter: each watcher that finds a higher number reads the records
of all, and then posts its own. So a new post also says that its rank has read the others.

Nothing is judged here: `watcher.py` does that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs

from fnaccel.world.connections import bounded_client
from fnaccel.world.rank_record import RankRecord

STORE = 5.0
"""Seconds for which the store may not answer."""

DEPARTURE = 5.0
"""Seconds for which a rank that leaves waits for ranks that still compute."""


@attrs.define
class RecordBoard:
    """The board for one thread of one rank: a client of a store serves one thread at a time.

    Every method raises RuntimeError if the rank that keeps the store is gone, or does not answer in time.

    Attributes:
        client: this thread's client of the store. Made from a store that all ranks share, with a prefix that
            no earlier world has used. That store is not kept: it would stay open after the world.
        rank, size: this rank, and the number of ranks.
        record: returns the record of this rank as it is now.
        records: the newest records of the other ranks, by rank. The threads of a rank share them.
    """

    client: Any
    rank: int
    size: int
    record: Callable[[], RankRecord]
    records: dict[int, RankRecord] = attrs.field(factory=dict)
    _answers: Any = attrs.field(init=False)
    _posting: threading.Lock = attrs.field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self.client, self._answers = bounded_client(self.client, STORE)
        self.client.add("roll", 0)
        self.client.add("left", 0)

    def of_thread(self, store: Any) -> RecordBoard:
        """The same board for another thread, from a store whose own limit a busy machine does not reach."""
        return RecordBoard(store, self.rank, self.size, self.record, self.records, self._posting)

    def close(self) -> None:
        """Close the connection now: a watcher is part of a circle, which Python frees at any time later."""
        self.client = self._answers = None

    def answers_again(self) -> bool:
        """Whether the store, which did not answer in time, answers now. If so the board can be used again."""
        if not self._answers():
            return False
        self.client, self._answers = bounded_client(self.client, STORE)
        return True

    @property
    def others(self) -> list[RankRecord]:
        """The records of the other ranks. A copy, since another thread may add records meanwhile."""
        return list(self.records.values())

    def post(self) -> None:
        """Post the record of this rank."""
        with self._posting:  # the last record of a rank that leaves stays the last
            self.client.set(f"record/{self.rank}", self.record().text())

    def read(self) -> list[RankRecord]:
        """Read the records of the other ranks, as far as these have posted one."""
        keys = {f"record/{rank}": rank for rank in range(self.size) if rank != self.rank}
        if not self.client.check(list(keys)):
            keys = {key: rank for key, rank in keys.items() if self.client.check([key])}
        texts = self.client.multi_get(list(keys)) if keys else []
        for rank, text in zip(keys.values(), texts, strict=True):
            self.records[rank] = RankRecord.of_text(text)
        return self.others

    def roll(self) -> int:
        """How many roll calls there were."""
        return int(self.client.get("roll"))

    def call_roll(self) -> None:
        """Post the record of this rank, and ask all other ranks for theirs."""
        self.post()
        self.client.add("roll", 1)

    def call_and_wait(self, seconds: float, *, enough: Callable[[], Any] = lambda: False) -> list[int]:
        """Call the roll. Returns the ranks that do not answer in time, or before `enough()` is true."""
        before = {record.rank: record.posts for record in self.read()}
        self.call_roll()
        end = time.monotonic() + seconds
        while True:
            answered = {
                record.rank
                for record in self.read()
                if record.left is not None or record.posts != before.get(record.rank)
            }
            silent = [rank for rank in range(self.size) if rank not in {self.rank, *answered}]
            if not silent or time.monotonic() > end or enough():
                return silent
            time.sleep(0.02)

    def all_come(self, limit: float) -> bool:
        """Whether all ranks come here after the same calls, within `limit` seconds. All get the same answer.

        For a place to which a rank may come alone: nothing but keys of the store is sent.
        """
        place = f"come/{self.record().calls}"
        everyone, end = self.client.add(place, 1) == self.size, time.monotonic() + limit
        while not (everyone or self.client.check([f"{place}/answer"]) or time.monotonic() > end):
            time.sleep(0.005)
        if self.client.add(f"{place}/answers", 1) == 1:
            self.client.set(f"{place}/answer", "all" if everyone else "some")
        return bool(self.client.get(f"{place}/answer") == b"all")

    def all_leave(self) -> bool:
        """Wait some seconds until all ranks have left. Returns whether they have."""
        start, calls = time.monotonic(), self.record().calls
        while int(self.client.get("left")) < self.size:
            waited = time.monotonic() - start
            if waited > DEPARTURE:
                return False
            # a rank that is inside a call which this rank never made waits for this rank
            if waited > 0.1 and any(record.inside and record.calls > calls for record in self.read()):
                return False
            time.sleep(0.002 if waited < 0.1 else 0.05)
        return True

    def wait_for(self, keys: list[str], seconds: float) -> None:
        """Wait until these keys are there, for some seconds at most."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.client.check(keys):
            time.sleep(0.05)
