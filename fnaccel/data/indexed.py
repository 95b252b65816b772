"""Map-style loaders: from the order of an epoch to this rank's batches.

Each rank reads its own rows only. Their numbers are arithmetic (`order.py`), so ranks send no
message, except if a sampler of the user's decides: then rank 0's order counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import attrs

from fnaccel.data import order
from fnaccel.data.batch import Batch
from fnaccel.data.epoch import Reading, check_any, check_start, epoch_order, users_order
from fnaccel.data.fetch import read
from fnaccel.data.loaders import Grouped, Indexed
from fnaccel.data.reader_ranks import Link
from fnaccel.errors import LoaderError
from fnaccel.state import Position
from fnaccel.texts import first_of


class Turn(NamedTuple):
    """One forward of this rank: the keys to read, and the number of rows that count.

    Attributes:
        keys: the samples to read.
        valid: how many of them count.
        rows: how many a full batch has on this rank.
        after: samples of the epoch that are used after it, on all ranks. Unread in the last turn.
        first: the place of its first row in the global batch.
        together: the rows of the global batch, on all ranks.
    """

    keys: list[Any]
    valid: int
    rows: int
    after: int
    first: int
    together: int


@attrs.frozen(kw_only=True)
class _EvenTurns:
    """Turns over batches of one size, computed as they are read, however long the epoch is.

    A rank without rows reads those of rank 0 again: there are some in every global batch, and
    then all ranks run forwards of one shape.
    """

    mine: order.Batches
    first: order.Batches

    def __iter__(self) -> Iterator[Turn]:
        mine, length, together = self.mine, len(self.mine), self.first.step
        for j in range(len(self.first)):
            keys = mine[j] if j < length else []
            after = self.first.start + (j + 1) * together
            yield Turn(keys or self.first[j], len(keys), mine.size, after, mine.offset, together)


@attrs.frozen(kw_only=True)
class _DrawnTurns:
    """Turns over batches in which each sample is with one probability, drawn anew for each batch.

    A position counts samples as if each batch had its expected size. A batch may have no row: then all ranks
    read the first sample, and it does not count.
    """

    n: int
    expected: int
    numbers: range
    reading: Reading
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[Turn]:
        full = order.span(self.expected, rank=self.rank, ranks=self.ranks)[1]
        for number in self.numbers:
            keys = order.drawn(self.n, self.expected / self.n, self.reading.seed, self.reading.epoch, number)
            first, size = order.span(len(keys), rank=self.rank, ranks=self.ranks)
            filler = keys[: order.span(len(keys), rank=0, ranks=self.ranks)[1]] or [0]
            mine = keys[first : first + size]
            yield Turn(mine or filler, size, full, (number + 1) * self.expected, first, len(keys))


def open_indexed(source: Indexed | Grouped, reading: Reading, link: Link) -> Iterator[Batch]:
    """This rank's batches from the epoch's position to its end.

    Raises:
        LoaderError: the epoch has no batch, or ends before the position.
    """
    turns: Iterable[Turn]
    if isinstance(source, Grouped):
        turns = _ragged(source, reading, link)
    else:
        turns = (_even if reading.shards.sampling is None else _drawn)(source, reading, link)
    data = read(
        source.loader,
        _Keys(turns),
        seed=reading.seed,
        epoch=reading.epoch,
        device=link.device,
        workers=reading.shards.kept,
    )
    return _batches(turns, data, reading)


@attrs.frozen
class _Keys:
    """The index lists of turns. They can be iterated beside the turns, as workers read ahead."""

    turns: Iterable[Turn]

    def __iter__(self) -> Iterator[list[Any]]:
        return (turn.keys for turn in self.turns)


def _batches(turns: Iterable[Turn], data: Iterator[Any], reading: Reading) -> Iterator[Batch]:
    upcoming, epoch = iter(turns), reading.epoch
    turn = next(upcoming, None)
    while turn is not None:
        following = next(upcoming, None)
        position = Position(epoch + 1, 0) if following is None else Position(epoch, turn.after)
        batch = next(data)
        if batch is None:  # on this rank alone, perhaps
            raise LoaderError(
                f"the collate function returned None for the samples {first_of(map(repr, turn.keys))}",
                where="shard(loader)",
                fix="return a batch for any samples: fill up those that it leaves out, or leave them out of "
                "the data set",
            )
        yield Batch(
            data=batch,
            valid=turn.valid,
            rows=turn.rows,
            position=position,
            first=turn.first,
            together=turn.together,
            samples=len(turn.keys),
            per_sample=reading.shards.rows_per_sample,
            source=reading.source,
        )
        turn = following


def _even(source: Indexed, reading: Reading, link: Link) -> _EvenTurns:
    samples = epoch_order(source, reading, link)
    n = len(samples)
    check_start(n, reading)

    def of(rank: int) -> order.Batches:
        return order.batches(
            n,
            source.batch_size,
            rank=rank,
            ranks=link.ranks,
            remainder=reading.remainder,
            split=not reading.shards.per_rank,
            start=reading.start,
            order=samples,
        )

    first = of(0)
    check_any(len(first), reading, f"{n} samples, and a global batch has {first.step}")
    return _EvenTurns(mine=of(link.rank), first=first)


def _drawn(source: Indexed, reading: Reading, link: Link) -> _DrawnTurns:
    n = len(source.loader.dataset)
    check_start(n, reading)
    expected = source.batch_size * (link.ranks if reading.shards.per_rank else 1)
    numbers = order.draws(n, expected, reading.remainder, start=reading.start)
    return _DrawnTurns(
        n=n, expected=expected, numbers=numbers, reading=reading, rank=link.rank, ranks=link.ranks
    )


def _ragged(source: Grouped, reading: Reading, link: Link) -> Sequence[Turn]:
    groups = users_order(source, reading, link) or []
    n = sum(map(len, groups))
    check_start(n, reading)

    def of(rank: int) -> list[Sequence[Any]]:
        return order.deal(
            groups,
            rank=rank,
            ranks=link.ranks,
            per_rank=reading.shards.per_rank,
            remainder=reading.remainder,
            start=reading.start,
        )

    batches, first = of(link.rank), of(0)
    check_any(len(first), reading, f"{len(groups)} batches among {link.ranks} ranks")
    left = order.skip(groups, reading.start)
    after = list(accumulate(map(len, left), initial=reading.start))[1:]
    each = link.ranks if reading.shards.per_rank else 1
    turns: list[Turn] = []
    for j, filler in enumerate(first):
        keys = list(batches[j]) if j < len(batches) else []
        seen = after[min((j + 1) * each, len(after)) - 1]
        sizes = [len(group) for group in left[j * each : (j + 1) * each]]
        first_row = (
            sum(sizes[: link.rank])
            if reading.shards.per_rank
            else order.span(sizes[0], rank=link.rank, ranks=link.ranks)[0]
        )
        turns.append(Turn(keys or list(filler), len(keys), len(keys or filler), seen, first_row, sum(sizes)))
    return turns
