"""How many batches and updates an epoch has. Only lengths are asked for: nothing is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fnaccel.data import loaders, order, windows
from fnaccel.data.loaders import Indexed, Source, Stream

if TYPE_CHECKING:
    from fnaccel.data.shard import Shards


def steps_per_epoch(shards: Shards, ranks: int, *, start: int = 0, first: int = 0) -> int | None:
    """How many batches (or windows) an epoch yields, the same on each rank. None if unknown.

    Asks for lengths only, so a sampler, batch sampler or dataset that misstates its own is believed.

    Args:
        shards: the data.
        ranks: how many ranks share each batch.
        start: samples of the epoch that were read before. If there are some, the number is known for
            map-style data in batches of one size only.
        first: the step of the first window, if its size depends on the step.

    Example:
        >>> steps_per_epoch(fa.shard(DataLoader(range(10), batch_size=4)), ranks=2)
        3
    """
    count = batches_per_epoch(shards, ranks, start=start)
    return count if count is None else windows.count(shards.window, count, first)


def batches_per_epoch(shards: Shards, ranks: int, *, start: int = 0) -> int | None:
    """The same before batches are put together in windows."""
    if shards.presplit and ranks > 1:  # it takes all ranks to tell
        return None
    source: Source = loaders.classify(shards.loader, presplit=shards.presplit)
    if start and not isinstance(source, Indexed):
        return None
    if isinstance(source, Stream):
        return _rounds_per_epoch(shards, source, ranks)
    if not isinstance(source, Indexed):
        return _dealt(loaders.length_of(source.batch_sampler), shards, ranks)
    stock = loaders.order_of(source.sampler)
    n = stock[0] if stock is not None else loaders.length_of(source.sampler)
    if stock is None and shards.shuffle is not None:
        n = len(source.loader.dataset)
    if n is None:
        return None
    if shards.sampling is not None:
        expected = source.batch_size * (ranks if shards.per_rank else 1)
        return len(order.draws(n, expected, shards.remainder, start=start))
    left = order.batches(
        n,
        source.batch_size,
        ranks=ranks,
        remainder=shards.remainder,
        split=not shards.per_rank,
        start=start,
    )
    return len(left)


def _rounds_per_epoch(shards: Shards, source: Stream, ranks: int) -> int | None:
    if source.sampler is not None:
        return _dealt(loaders.length_of(source.sampler), shards, ranks)
    if source.batch_size is None:
        return _dealt(loaders.length_of(source.loader), shards, ranks)
    samples = loaders.length_of(source.loader.dataset)
    if samples is None:
        return None
    size = source.batch_size
    return _dealt(samples // size if shards.remainder == "drop" else -(-samples // size), shards, ranks)


def _dealt(count: int | None, shards: Shards, ranks: int) -> int | None:
    if count is None or not shards.per_rank:
        return count
    return count // ranks if shards.remainder == "drop" else -(-count // ranks)


def updates(shards: Shards, ranks: int, epochs: int, *, across: bool, first: int = 0) -> int | None:
    """How many updates some whole epochs make. None if unknown.

    Args:
        shards: the data.
        ranks: how many ranks share each batch.
        epochs: how many epochs.
        across: whether windows go over the end of an epoch.
        first: the step of the first of them.
    """
    batches = batches_per_epoch(shards, ranks)
    if batches is None:
        return None
    if across:
        return windows.count(shards.window, epochs * batches, first)
    done = first
    for _ in range(epochs):
        done += windows.count(shards.window, batches, done)
    return done - first
