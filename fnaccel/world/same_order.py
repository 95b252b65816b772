"""`SameOrder`: ranks tell each other what they do next, and do it once all of them say the same.

Parameters that ranks gather in another order are mixed up, or wait for ever. No collective can find that: it
is the one that hangs. So before the first update each gather is compared through the store of the job. That
takes about half a millisecond each, and ends with the first backward pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from fnaccel.errors import PeerLostError
from fnaccel.texts import error_line

LONGEST = 0.05
"""Seconds between two looks at the store, if the others take long."""

_ONE_ORDER = (
    "call the same parts of the model, in the same order, on every rank. A rank that has nothing to do for a "
    "part calls it with a row whose weight is 0"
)


class SameOrder:
    """One sequence of things that all ranks do in the same order. Every rank makes it.

    Args:
        client: returns the client of the store for the thread that calls.
        rank, size: this rank, and the number of ranks.
        key: of the sequence, which no other one has used.
        call: the number of the call of all ranks that this rank is in. Positions begin anew in each, so that
            ranks that were interrupted in one meet in the next.
        lost: whether another rank is gone, so that nobody waits for it.
    """

    def __init__(
        self,
        client: Callable[[], Any],
        rank: int,
        size: int,
        key: str,
        call: Callable[[], int],
        lost: Callable[[], bool],
    ) -> None:
        self._client, self._rank, self._size, self._key = client, rank, size, key
        self._call, self._lost = call, lost
        self._in_call = 0
        self._position = 0

    def next(self, what: str) -> None:
        """Wait until all ranks are about to do `what`, the predicate of a sentence.

        Raises:
            PeerLostError: another rank does something else, or failed. Raised on all ranks.
        """
        store, at = self._client(), self._take_position()
        text = store.compare_set(f"{at}/first", "", json.dumps([self._rank, what])).decode()
        rank, other = json.loads(text)
        if other != what:
            low, high = sorted([(rank, other), (self._rank, what)])
            text = f"ranks call the model differently: rank {low[0]} {low[1]}, and rank {high[0]} {high[1]}"
            self._answer(at, text, _ONE_ORDER)
        elif store.add(f"{at}/count", 1) == self._size:
            self._answer(at, "", "")
        what, fix = json.loads(self._wait(f"{at}/answer"))
        if what:
            raise PeerLostError(what, where=f"a first pass of the model, on rank {self._rank}", fix=fix)

    def fail(self, error: BaseException) -> None:
        """Let the ranks that wait for this one raise PeerLostError: an error ended its pass."""
        if isinstance(error, PeerLostError):  # the other ranks have it, too
            return
        what = f"rank {self._rank} raised {error_line(error)}"
        self._answer(self._take_position(), what, "see the whole error on that rank. The state is live")

    def _take_position(self) -> str:
        call = self._call()
        self._position = self._position + 1 if call == self._in_call else 0
        self._in_call = call
        return f"{self._key}/{call}/{self._position}"

    def _answer(self, at: str, what: str, fix: str) -> None:
        self._client().compare_set(f"{at}/answer", "", json.dumps([what, fix]))

    def _wait(self, key: str) -> str:
        pause = 0.0002
        while not self._client().check([key]):
            if self._lost():
                raise RuntimeError("connection reset by peer")  # `CallLog` names the peer
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
        return self._client().get(key).decode()
