"""Which rows of the data are whose: index arithmetic, and nothing that talks to other ranks.

Every function here is pure. The rows of a rank follow from its arguments alone, so ranks agree
without a message, and any rank can compute another rank's rows. Reading is in `fetch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, get_args, overload

import attrs
import torch

from fnaccel.errors import ArgumentError, LoaderError, UnknownNameError, nearest
from fnaccel.step.choices import Remainder
from fnaccel.world.random_streams import fold

ORDER_VERSION = "randperm-splitmix64/1"
"""The algorithm of `permutation`. It changes whenever the order of one (seed, epoch) would."""

_ORDER = 0x6F72646572  # "order": seeds of the order are no other part's seeds
_DRAWS = 0x6472617773  # "draws"

REMAINDERS: tuple[Remainder, ...] = get_args(Remainder)

Order: TypeAlias = Sequence[Any]
"""The samples of one epoch, in order."""


def check_remainder(remainder: str, where: str) -> None:
    """Raise UnknownNameError unless `remainder` is one of "wrap", "drop" and "keep"."""
    if remainder not in REMAINDERS:
        raise UnknownNameError(
            f"there is no remainder {remainder!r}", where=where, fix=nearest(str(remainder), REMAINDERS)
        )


def span(rows: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """(first row, how many) of a rank's part of `rows` rows that are cut as `split_sizes` cuts.

    Example:
        >>> span(7, rank=1, ranks=3)
        (3, 2)
    """
    size, extra = divmod(rows, ranks)
    return rank * size + min(rank, extra), size + (rank < extra)


def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """The shuffled order of `n` samples, a pure function of (seed, epoch).

    It reads and moves no global random stream. `ORDER_VERSION` names the algorithm.

    Example:
        >>> sorted(permutation(4, seed=0, epoch=0))
        [0, 1, 2, 3]
    """
    generator = torch.Generator().manual_seed(fold(seed, _ORDER, epoch))
    return torch.randperm(n, generator=generator).tolist()


def draws(n: int, expected: int, remainder: Remainder, *, start: int = 0) -> range:
    """The numbers of the batches of Poisson sampling in an epoch: as many as of `expected` rows each.

    Args:
        n: how many samples an epoch has.
        expected: rows of a global batch, on average.
        remainder: `"drop"` leaves out what fills no whole batch.
        start: samples of the epoch that were used before, `expected` for each batch.

    Raises:
        LoaderError: more rows are expected in a batch than there are.
    """
    if expected > n:
        raise LoaderError(
            f"a batch with {expected} of {n} samples can't be drawn",
            where='fa.shard(loader, sampling="poisson")',
            fix="a smaller batch_size. It is the expected number of rows of a batch, on all ranks together",
        )
    return range(-(-start // expected), n // expected if remainder == "drop" else -(-n // expected))


def drawn(n: int, rate: float, seed: int, epoch: int, number: int) -> list[int]:
    """The samples of batch `number` of an epoch by Poisson sampling: each is in it with probability `rate`.

    A pure function of its arguments. Gaps between samples have a geometric distribution, so the time does not
    depend on `n`.

    Example:
        >>> drawn(3, 1.0, seed=0, epoch=0, number=0)
        [0, 1, 2]
    """
    if rate >= 1:
        return list(range(n))
    generator = torch.Generator().manual_seed(fold(seed, _DRAWS, epoch, number))
    often = math.ceil(n * rate + 8 * math.sqrt(n * rate)) + 8  # nearly always enough
    found: list[int] = []
    last = -1
    while last < n:
        uniform = torch.rand(often, generator=generator, dtype=torch.float64)
        gaps = (torch.log1p(-uniform) / math.log1p(-rate)).floor().clamp(max=float(n)).long() + 1
        places = (last + gaps.cumsum(0)).tolist()
        found += places
        last = places[-1]
    return [place for place in found if place < n]


@attrs.frozen(kw_only=True, eq=False)
class Batches(Sequence[list[Any]]):
    """One rank's index lists of one epoch, each computed when it is asked for.

    Attributes:
        order: the samples of the epoch, in order.
        n: how many there are.
        start: the row of the epoch at which the first global batch begins.
        step: rows from one global batch to the next, on all ranks together.
        offset, size: the first of this rank's rows in a global batch, and their number.
        length: how many batches this rank has.
        wraps: whether rows past the end are taken from the beginning.
    """

    order: Order
    n: int
    start: int
    step: int
    offset: int
    size: int
    length: int
    wraps: bool

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> list[Any] | list[list[Any]]:
        chosen = range(self.length)[index]
        return self._rows(chosen) if isinstance(chosen, int) else [self._rows(j) for j in chosen]

    def __iter__(self) -> Iterator[list[Any]]:
        return map(self._rows, range(self.length))

    def _rows(self, j: int) -> list[Any]:
        first = self.start + j * self.step + self.offset
        stop = first + self.size
        if self.wraps and stop > self.n:
            return [self.order[row % self.n] for row in range(first, stop)]
        return list(self.order[first : min(stop, self.n)])


def batches(
    n: int,
    batch_size: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    remainder: Remainder = "keep",
    split: bool = True,
    start: int = 0,
    order: Order | None = None,
) -> Batches:
    """The index lists that one rank reads, as a sequence that computes them when asked.

    Batch `j` of the epoch begins at row `start + j * g`, where `g` is the size of the global
    batch, and this rank has `size` rows of it from `offset` on:

    - `"drop"`: only global batches that are full.
    - `"wrap"`: rows past the end are taken from the beginning.
    - `"keep"`: rows past the end are left out, and so is a batch that has none.

    Args:
        n: how many samples an epoch has.
        batch_size: rows of a global batch, or of each rank's batch if `split` is False.
        rank, ranks: which part, of how many.
        remainder: the treatment of a last global batch that is not full.
        split: whether `batch_size` is global. It is cut by divmod: the first ranks get one more.
        start: rows of the epoch that were read before, on all ranks together.
        order: the samples in order. By default `range(n)`.

    Raises:
        UnknownNameError: no such remainder.
        ArgumentError: a count, rank or start that is out of range.

    Example:
        >>> batches(22, 3, rank=1, ranks=2, remainder="wrap", split=False)[-1]
        [21, 0, 1]
    """
    check_remainder(remainder, "fnaccel.data.order.batches")
    if n < 0 or batch_size < 1 or not 0 <= rank < ranks or not 0 <= start <= n:
        raise ArgumentError(
            f"n={n}, batch_size={batch_size}, rank={rank}, ranks={ranks}, start={start} describe no batches",
            where="fnaccel.data.order.batches",
            fix="n >= 0, batch_size >= 1, 0 <= rank < ranks, 0 <= start <= n",
        )
    step = batch_size if split else batch_size * ranks
    offset, size = span(step, rank=rank, ranks=ranks)
    left = n - start
    if size == 0:
        count = 0
    elif remainder == "drop":
        count = left // step
    elif remainder == "wrap":
        count = -(-left // step)
    else:
        count = max(0, -(-(left - offset) // step))
    return Batches(
        order=range(n) if order is None else order,
        n=n,
        start=start,
        step=step,
        offset=offset,
        size=size,
        length=count,
        wraps=remainder == "wrap",
    )


def skip(batches: Sequence[Sequence[Any]], start: int) -> list[Sequence[Any]]:
    """The rest of `batches` after `start` samples. A batch that was begun is cut.

    Example:
        >>> skip([[0, 1, 2], [3, 4]], 2)
        [[2], [3, 4]]
    """
    seen = 0
    for place, batch in enumerate(batches):
        if seen + len(batch) > start:
            return [batch[start - seen :], *batches[place + 1 :]]
        seen += len(batch)
    return []


def deal(
    batches: Sequence[Sequence[Any]],
    *,
    rank: int,
    ranks: int,
    per_rank: bool = False,
    remainder: Remainder = "keep",
    start: int = 0,
) -> list[Sequence[Any]]:
    """One rank's part of batches of any sizes, such as a custom batch sampler makes.

    By default each batch is cut by divmod between the ranks. A batch with fewer rows than ranks
    leaves some of them an empty part. With `per_rank` whole batches are dealt in turn, and
    `remainder` is the rule for a last round that has too few: `"wrap"` deals the first
    batches again, `"keep"` gives the last ranks one batch less, `"drop"` leaves the round out.

    Args:
        batches: index lists (or anything that can be sliced), in order.
        rank, ranks: which part, of how many.
        per_rank: deal whole batches instead of cutting each.
        remainder: only read with `per_rank`.
        start: samples of the epoch that were read before, on all ranks together.

    Raises:
        UnknownNameError: no such remainder.

    Example:
        >>> deal([[0, 1, 2], [3, 4]], rank=1, ranks=2)
        [[2], [4]]
    """
    check_remainder(remainder, "fnaccel.data.order.deal")
    left = skip(batches, start)
    if not per_rank:
        spans = [span(len(batch), rank=rank, ranks=ranks) for batch in left]
        return [batch[first : first + size] for batch, (first, size) in zip(left, spans, strict=True)]
    count = len(left)
    if remainder == "drop":
        return left[: count // ranks * ranks][rank::ranks]
    dealt = left[rank::ranks]
    if remainder == "wrap" and len(dealt) < -(-count // ranks):
        turn = len(dealt) * ranks + rank - count
        dealt.append(batches[turn % len(batches)])
    return dealt
