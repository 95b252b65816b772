"""One reading of an epoch: its start, its order, and the errors when there is nothing to read.

Shared by the readers of map-style loaders (`indexed.py`) and of streams (`stream.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from fnaccel.data import loaders, order
from fnaccel.data.reader_ranks import Link
from fnaccel.data.seeding import replayed
from fnaccel.errors import LoaderError

if TYPE_CHECKING:
    from fnaccel.data.shard import Shards


@attrs.frozen(kw_only=True)
class Reading:
    """The decisions of `open_epoch` for the reading of one epoch.

    Attributes:
        shards: the record.
        epoch, start: which epoch, and how many of its samples were read before.
        remainder, seed: as for `Shards`, but for this epoch.
        source: facts about the loader, for the batches.
        order: the order of a sampler of the user's own, if it was made before.
    """

    shards: Shards
    epoch: int
    start: int
    remainder: order.Remainder
    seed: int
    source: Mapping[str, Any] | None = None
    order: list[Any] | None = None


def users_order(source: loaders.Source, reading: Reading, link: Link) -> list[Any] | None:
    """The samples (or lists of them) of a sampler of the user's own, iterated on rank 0. None without."""
    if reading.order is not None:
        return reading.order
    groups = isinstance(source, loaders.Grouped)
    sampler = source.batch_sampler if groups else source.sampler
    if sampler is None or (not groups and (reading.shards.shuffle is not None or loaders.order_of(sampler))):
        return None

    def make() -> list[Any]:
        samples = replayed(sampler, reading.seed, reading.epoch)
        return list(map(list, samples)) if groups else samples

    return link.agree(make)


def epoch_order(source: loaders.Indexed | loaders.Stream, reading: Reading, link: Link) -> order.Order:
    """The samples of an epoch in order. A sampler of the user's own is iterated on rank 0."""
    samples = users_order(source, reading, link)
    if samples is not None:
        return samples
    n, shuffled = loaders.order_of(source.sampler) or (len(source.loader.dataset), False)
    if reading.shards.shuffle is not None:
        shuffled = reading.shards.shuffle
    return order.permutation(n, reading.seed, reading.epoch) if shuffled else range(n)


def check_start(n: int, reading: Reading) -> None:
    """Raise LoaderError if an epoch is empty, or ends before its start position."""
    if n == 0:
        raise LoaderError(
            "the loader holds nothing",
            where=f"epoch {reading.epoch} of shard(loader)",
            fix="check the dataset and the sampler; a generator can be read once only: pass a list, or an "
            "object whose __iter__ begins again",
        )
    if reading.start > n:
        raise LoaderError(
            f"the position is {reading.start} samples into an epoch of {n}",
            where=f"epoch {reading.epoch} of shard(loader)",
            fix="resume with the data the position was saved with, or begin at fa.state.Position(epoch)",
        )


def check_any(count: int, reading: Reading, described: str) -> None:
    """Raise LoaderError if a whole epoch would give no batch at all."""
    if count == 0 and reading.start == 0:
        raise LoaderError(
            f"remainder={reading.remainder!r} leaves no batch: {described}",
            where=f"epoch {reading.epoch} of shard(loader)",
            fix="make the batch smaller, or pass remainder='keep'",
        )
