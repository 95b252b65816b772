"""Map-style loaders: from the order of an epoch to this rank's batches.

Each rank reads its own rows only. Who reads what is arithmetic (`order.py`), so ranks send no
message, save where a sampler of the user's decides and rank 0's word has to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import attrs

from fnaccel.data import loaders, order
from fnaccel.data.batch import Batch
from fnaccel.data.fetch import read
from fnaccel.data.link import Link
from fnaccel.data.loaders import Grouped, Indexed
from fnaccel.errors import LoaderError
from fnaccel.state import Position


@attrs.frozen
class Turn:
    """One forward of this rank: what to read, and what of it counts."""

    keys: list[Any]
    valid: int
    rows: int
    after: int


@attrs.frozen(kw_only=True)
class _EvenTurns:
    """Turns over batches of one size; computed as they are read, however long the epoch is.

    A rank without rows reads those of rank 0 again: there are some in every global batch, and
    then all ranks run forwards of one shape.
    """

    mine: order.Batches
    first: order.Batches

    def __iter__(self) -> Iterator[Turn]:
        after = self.first.start
        for j in range(len(self.first)):
            after = min(after + self.first.step, self.first.n)
            keys = self.mine[j] if j < len(self.mine) else []
            yield Turn(keys or self.first[j], len(keys), self.mine.size, after)


@attrs.frozen(kw_only=True)
class Reading:
    """What `open_epoch` decided about the reading of one epoch.

    Attributes:
        epoch, start: which epoch, and how many of its samples were read before.
        remainder: what becomes of a global batch that is not full.
        per_rank: whether a batch of the loader is one rank's.
        shuffle: overrides what the loader's sampler does; None leaves it.
        seed: the root seed of order and workers.
        kept: where persistent workers live between epochs.
    """

    epoch: int
    start: int
    remainder: order.Remainder
    per_rank: bool
    shuffle: bool | None
    seed: int
    kept: dict[str, Any]


def epoch_order(sampler: Any, reading: Reading, link: Link, dataset: Any = None) -> order.Order:
    """The samples of an epoch in order; a sampler of the user's own is iterated on rank 0."""
    known = loaders.order_of(sampler)
    if known is None and reading.shuffle is None:
        return link.agree(lambda: list(sampler))
    n, shuffled = known if known is not None else (len(dataset), False)
    if reading.shuffle is not None:
        shuffled = reading.shuffle
    return order.permutation(n, reading.seed, reading.epoch) if shuffled else range(n)


def open_indexed(source: Indexed | Grouped, reading: Reading, link: Link) -> Iterator[Batch]:
    """This rank's batches from where the epoch stands to its end.

    Raises:
        LoaderError: the epoch has no batch, or is shorter than what was read before.
    """
    turns = _even(source, reading, link) if isinstance(source, Indexed) else _ragged(source, reading, link)
    data = read(
        source.loader,
        _Keys(turns),
        seed=reading.seed,
        epoch=reading.epoch,
        device=link.device,
        kept=reading.kept,
    )
    return _batches(turns, data, reading.epoch)


@attrs.frozen
class _Keys:
    """The index lists of turns; can be iterated beside the turns, as workers read ahead."""

    turns: Iterable[Turn]

    def __iter__(self) -> Iterator[list[Any]]:
        return (turn.keys for turn in self.turns)


def _batches(turns: Iterable[Turn], data: Iterator[Any], epoch: int) -> Iterator[Batch]:
    upcoming = iter(turns)
    turn = next(upcoming, None)
    while turn is not None:
        following = next(upcoming, None)
        position = Position(epoch + 1, 0) if following is None else Position(epoch, turn.after)
        yield Batch(data=next(data), valid=turn.valid, rows=turn.rows, position=position)
        turn = following


def _even(source: Indexed, reading: Reading, link: Link) -> _EvenTurns:
    samples = epoch_order(source.sampler, reading, link, source.loader.dataset)
    n = len(samples)
    check_start(n, reading)

    def of(rank: int) -> order.Batches:
        return order.batches(
            n,
            source.batch_size,
            rank=rank,
            ranks=link.ranks,
            remainder=reading.remainder,
            split=not reading.per_rank,
            start=reading.start,
            order=samples,
        )

    first = of(0)
    check_any(len(first), reading, f"{n} samples, and a global batch has {first.step}")
    return _EvenTurns(mine=of(link.rank), first=first)


def _ragged(source: Grouped, reading: Reading, link: Link) -> Sequence[Turn]:
    groups = link.agree(lambda: [list(batch) for batch in source.batch_sampler])
    n = sum(map(len, groups))
    check_start(n, reading)

    def of(rank: int) -> list[Sequence[Any]]:
        return order.deal(
            groups,
            rank=rank,
            ranks=link.ranks,
            per_rank=reading.per_rank,
            remainder=reading.remainder,
            start=reading.start,
        )

    mine, first = of(link.rank), of(0)
    check_any(len(first), reading, f"{len(groups)} batches among {link.ranks} ranks")
    left = order.skip(groups, reading.start)
    after = list(accumulate(map(len, left), initial=reading.start))[1:]
    each = link.ranks if reading.per_rank else 1
    turns: list[Turn] = []
    for j, lent in enumerate(first):
        keys = list(mine[j]) if j < len(mine) else []
        seen = after[min((j + 1) * each, len(after)) - 1]
        turns.append(Turn(keys or list(lent), len(keys), len(keys or lent), seen))
    return turns


def check_start(n: int, reading: Reading) -> None:
    """Raise LoaderError where an epoch is empty, or shorter than where it is to be taken up."""
    if n == 0:
        raise LoaderError(
            "the loader holds nothing",
            where=f"epoch {reading.epoch} of shard(loader)",
            fix="check the dataset and the sampler; a generator can be read once only: pass a list, or an "
            "object whose __iter__ begins anew",
        )
    if reading.start > n:
        raise LoaderError(
            f"the position is {reading.start} samples into an epoch of {n}",
            where=f"epoch {reading.epoch} of shard(loader)",
            fix="resume with the data the position was saved with, or begin at Position(epoch)",
        )


def check_any(count: int, reading: Reading, described: str) -> None:
    """Raise LoaderError where a whole epoch would give no batch at all."""
    if count == 0 and reading.start == 0:
        raise LoaderError(
            f"remainder={reading.remainder!r} leaves no batch: {described}",
            where=f"epoch {reading.epoch} of shard(loader)",
            fix="make the batch smaller, or pass remainder='keep'",
        )
