"""Loaders that are split between ranks already (`fa.shard(loader, presplit=True)`): each rank reads its own.

Ranks exchange only how many rows each of them has in a round, so that all make the same number of steps. A
position is found by these counts again, so it is of use on the same number of ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch

from fnaccel import _torch
from fnaccel.data.batch import Batch
from fnaccel.data.batch_copies import copied
from fnaccel.data.epoch import Reading
from fnaccel.data.reader_ranks import Link
from fnaccel.data.source_facts import saved_at
from fnaccel.errors import LoaderError
from fnaccel.state import Position
from fnaccel.world.random_streams import fold

Open = Callable[[Reading, Link], Iterator[Batch]]
"""Opens an epoch of this rank's own loader."""


def open_presplit(open_own: Open, reading: Reading, link: Link) -> Iterator[Batch]:
    """This rank's batches from the epoch's position to its end. The same number on every rank.

    Args:
        open_own: opens an epoch of this rank's loader.
        reading: how to read. `start` counts the samples of all ranks.
        link: which rank this is.

    Raises:
        LoaderError: a rank's part is empty, or the position was saved on another number of ranks.
    """
    ranks = saved_at(reading).get("ranks", link.ranks)
    if ranks != link.ranks:
        raise _elsewhere(reading, f"it was saved on {ranks} ranks, and here are {link.ranks}")
    rounds = _Own(open_own, attrs.evolve(reading, start=0, seed=fold(reading.seed, link.rank)), link)
    used = 0
    upcoming = rounds.next_round()
    while upcoming is not None:
        batch, counts = upcoming
        used += sum(counts)
        upcoming = rounds.next_round()  # one ahead, to know which round is the last
        if used > reading.start:
            position = Position(reading.epoch + 1) if upcoming is None else Position(reading.epoch, used)
            yield attrs.evolve(
                batch,
                valid=counts[link.rank],
                position=position,
                first=sum(counts[: link.rank]),
                together=sum(counts),
            )
    if used < reading.start:
        raise _elsewhere(reading, f"the parts of {link.ranks} ranks have {used} samples")
    if used == 0:
        raise LoaderError(
            f"remainder={reading.remainder!r} leaves no batch that every rank can fill",
            where=f"epoch {reading.epoch} of shard(loader, presplit=True)",
            fix="make the batch smaller, or pass remainder='keep'",
        )


@attrs.define
class _Own:
    """The batches of this rank, in rounds of which every rank has one batch.

    Attributes:
        open: opens an epoch of this rank's loader.
        reading: how to read. Begins at the start of the epoch.
        link: which rank this is.
        batches: the iterator that is being read.
        first: the first batch of the epoch, which stands in for missing ones.
        ended: whether all batches were read once.
        problem: why not even a first batch could be read.
    """

    open: Open
    reading: Reading
    link: Link
    batches: Iterator[Batch] | None = None
    first: Batch | None = None
    ended: bool = False
    problem: LoaderError | None = None

    def next_round(self) -> tuple[Batch, list[int]] | None:
        """This rank's batch of the next round, and how many rows count on each rank. None at the end.

        Raises:
            LoaderError: a rank has no batch at all. Raised on every rank.
        """
        batch = self._next()
        remainder = self.reading.remainder
        valid = 0 if batch is None or (self.ended and remainder != "wrap") else batch.valid
        states = self._exchanged([int(self.ended), int(batch is None), valid])
        if self.problem is not None:
            raise self.problem
        empty = [rank for rank, (_, none, _) in enumerate(states) if none]
        if batch is None or empty:
            raise LoaderError(
                f"the part of rank {empty[0]} holds no batch",
                where=f"epoch {self.reading.epoch} of shard(loader, presplit=True)",
                fix="split the data so that every rank gets a batch, or use fewer ranks",
            )
        ended = [bool(state[0]) for state in states]
        if all(ended) or (remainder == "drop" and any(ended)):
            return None
        return batch, [valid for _, _, valid in states]

    def _next(self) -> Batch | None:
        """The next batch. After the last one, a batch that stands in for it. None if there is none at all."""
        if self.ended and self.reading.remainder != "wrap":
            return self.first
        if self.batches is None:
            self.batches = self._opened()
        try:
            batch = next(self.batches, None)
        except LoaderError as error:
            if self.first is not None:
                raise
            self.problem = error  # the other ranks are told before it is raised
            return None
        if self.first is None:  # it waits for the end of the epoch
            self.first = None if batch is None else batch.replace(copied(batch.data))
        elif batch is None:
            self.ended = True
            self.batches = None
            return self._next()
        return batch

    def _opened(self) -> Iterator[Batch]:
        return self.open(self.reading, Link(rank=0, ranks=1, device=self.link.device))

    def _exchanged(self, counts: list[int]) -> list[list[int]]:
        """The numbers of every rank."""
        if self.link.group is None:
            return [counts]
        numbers = torch.tensor(counts, device=self.link.wire)
        everyone = numbers.new_empty(self.link.ranks * len(counts))
        self.link.talk(_torch.all_gather_single, everyone, numbers, group=self.link.group)
        return everyone.view(self.link.ranks, len(counts)).tolist()


def _elsewhere(reading: Reading, why: str) -> LoaderError:
    return LoaderError(
        f"the position of {reading.start} samples can't be found in data that is split already: {why}",
        where=f"epoch {reading.epoch} of shard(loader, presplit=True)",
        fix="go on with the same data on the ranks that saved it; or begin at fa.state.Position(epoch)",
    )
