"""Loaders that can only be read in order: iterables, `IterableDataset`, `batch_size=None`.

Every rank reads the same stream and keeps its part of each batch, so all ranks see its end
without a message. An `IterableDataset` must therefore yield the same on all ranks. One that
can't (a queue, a socket) is for `dispatch=True`. A position inside it is reached by reading, or by
`dataset.skip(samples)` if the data set offers that, as Hugging Face's do in their first epoch, and no
workers read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import attrs
import torch.utils.data as torch_data

from fnaccel import tree
from fnaccel.data.batch import Batch, made_of
from fnaccel.data.batch_copies import copied, makes_new_tensors
from fnaccel.data.cut import Columns, cut, join, rows_of, split_sizes
from fnaccel.data.epoch import Reading, check_any, check_start, epoch_order
from fnaccel.data.fetch import KeyFeed, Reopenable, read, reopened, settings_of
from fnaccel.data.loaders import Stream, is_plain, keeps_workers
from fnaccel.data.order import span
from fnaccel.data.reader_ranks import Link
from fnaccel.data.seeding import read_apart
from fnaccel.errors import LoaderError
from fnaccel.state import Position
from fnaccel.step.choices import Remainder


@attrs.frozen
class Piece:
    """A batch of the stream, its rows, and the samples of the epoch that were read up to its end."""

    data: tree.Tree
    rows: int
    after: int


def open_stream(source: Stream, reading: Reading, link: Link) -> Iterator[Batch]:
    """This rank's batches from the epoch's position to its end.

    Raises:
        LoaderError: the stream is empty, ends before the position, or leaves no batch.
    """
    for lot, position in _placed(rounds(source, reading, link), reading.epoch):
        if reading.shards.per_rank:
            piece = lot[link.rank] if link.rank < len(lot) else None
            read_piece = lot[0] if piece is None else piece
            data, valid, rows = (
                read_piece.data,
                0 if piece is None else piece.rows,
                source.batch_size or read_piece.rows,
            )
            first = sum(before.rows for before in lot[: link.rank])
        else:
            whole = lot[0]
            if (
                link.ranks > 1
                and source.batch_size
                and whole.rows > source.batch_size
                and "rows" not in reading.shards.kept
            ):
                reading.shards.kept["rows"] = True
                warnings.warn(made_of(whole.rows, source.batch_size, "ranks"), UserWarning, stacklevel=2)
            data, valid = part(whole, reading.shards.rows_per_sample, rank=link.rank, ranks=link.ranks)
            rows = span(source.batch_size or whole.rows, rank=link.rank, ranks=link.ranks)[1]
            first = span(whole.rows, rank=link.rank, ranks=link.ranks)[0]
        yield Batch(
            data=data,
            valid=valid,
            rows=rows,
            position=position,
            first=first,
            together=sum(each.rows for each in lot),
            samples=min(valid, rows),
            per_sample=reading.shards.rows_per_sample,
            source=reading.source,
        )


def part(piece: Piece, per_sample: int, *, rank: int, ranks: int) -> tuple[tree.Tree, int]:
    """(this rank's rows of a global batch, how many). Rank 0's rows and 0 if there are none."""
    if ranks == 1:
        return piece.data, piece.rows
    parts, sizes = shares(piece.data, piece.rows, ranks, per_sample)
    return parts[rank], sizes[rank]


def shares(data: tree.Tree, rows: int, ranks: int, per_sample: int) -> tuple[list[tree.Tree], list[int]]:
    """Every rank's part of a global batch and how many of its rows count."""
    sizes = split_sizes(rows, ranks)
    parts = Columns(data, per_sample=per_sample).cut(sizes)
    return [share if size else parts[0] for share, size in zip(parts, sizes, strict=True)], sizes


def rounds(source: Stream, reading: Reading, link: Link) -> Iterator[list[Piece]]:
    """The batches that the ranks use at a time: one to be cut, or with `per_rank` one for each."""
    each = link.ranks if reading.shards.per_rank else 1
    head: list[Piece] = []
    skipped = _skippable(source, reading)
    trees = _trees(source, reading, link, skipped)
    if reading.shards.copies and not makes_new_tensors(source.loader):
        trees = map(copied, trees)
    pieces = _counted(trees, source.batch_size, reading, head, each, skipped)
    count = 0
    while lot := list(islice(pieces, each)):
        if len(lot) < each and reading.remainder == "drop":
            break
        if len(lot) < each and reading.remainder == "wrap":
            end = lot[-1].after
            lot += [attrs.evolve(head[i % len(head)], after=end) for i in range(each - len(lot))]
        count += 1
        yield lot
    check_any(count, reading, "the stream fills no global batch")


def _placed(lots: Iterator[list[Piece]], epoch: int) -> Iterator[tuple[list[Piece], Position]]:
    """Each round with the position after it. Reads one ahead, to know which is the last."""
    lot = next(lots, None)
    while lot is not None:
        following = next(lots, None)
        yield lot, Position(epoch + 1, 0) if following is None else Position(epoch, lot[-1].after)
        lot = following


def _counted(
    trees: Iterable[tree.Tree],
    nominal: int | None,
    reading: Reading,
    head: list[Piece],
    keep: int,
    after: int,
) -> Iterator[Piece]:
    """Batches from the position on, counted, those that are not full treated as `remainder` says.

    The first `keep` of the epoch go into `head`, from which "wrap" repeats. `after` samples were skipped.
    """
    for data in trees:
        rows = Columns(data, per_sample=reading.shards.rows_per_sample).rows
        if rows == 0:
            continue
        begin, after = after, after + rows
        if reading.remainder == "wrap" and len(head) < keep:
            whole = _complete(data, rows, nominal, head[0].data if head else data, "wrap")
            kept, count = whole or (data, rows)
            head.append(Piece(copied(kept), count, after))  # it waits for the end of the epoch
        if after <= reading.start:
            continue
        whole = _complete(data, rows, nominal, head[0].data if head else data, reading.remainder)
        if whole is None:
            continue
        data, rows = whole
        used = reading.start - begin
        if used > 0:
            columns = Columns(data, per_sample=reading.shards.rows_per_sample)
            data, rows = columns.cut([used, rows - used])[1], rows - used
        yield Piece(data, rows, after)
    check_start(after, reading)


def _complete(
    data: tree.Tree, rows: int, nominal: int | None, first: tree.Tree, remainder: Remainder
) -> tuple[tree.Tree, int] | None:
    """A batch that has less than its nominal rows: left out, filled up from `first`, or as it is."""
    if nominal is None or rows >= nominal or remainder == "keep":
        return data, rows
    if remainder == "drop":
        return None
    parts = [data]
    missing = nominal - rows
    available = rows_of(first)
    while missing > 0:
        taken = min(missing, available)
        parts.append(cut(first, [taken, available - taken])[0])
        missing -= taken
    return join(parts), nominal


def _skippable(source: Stream, reading: Reading) -> int:
    """Samples that the data set passes over without reading them."""
    loader, size = source.loader, source.batch_size
    if not is_plain(loader) or size is None or source.sampler is not None:
        return 0
    # each worker would skip so many, and "wrap" needs the first batches. The data set that `skip` of datasets
    # makes is in epoch 0, and told another epoch it keeps its shards in the order of epoch 0
    same = reading.epoch == 0 or not hasattr(loader.dataset, "set_epoch")
    able = same and callable(getattr(loader.dataset, "skip", None)) and loader.num_workers == 0
    return reading.start // size * size if able and reading.remainder != "wrap" else 0


def _trees(source: Stream, reading: Reading, link: Link, skipped: int) -> Iterable[tree.Tree]:
    loader = source.loader
    if source.sampler is not None:
        samples = epoch_order(source, reading, link)
        return read(
            loader,
            [[key] for key in samples],
            seed=reading.seed,
            epoch=reading.epoch,
            device=link.device,
            workers=reading.shards.kept,
            one_by_one=True,
        )
    if is_plain(loader):
        return _iterable(loader, reading, link, skipped)
    if source.drop_last and reading.remainder != "drop":
        raise LoaderError(
            f"the loader drops its last batch by itself, and remainder={reading.remainder!r} was asked for",
            where="shard(loader)",
            fix="make the loader with drop_last=False",
        )
    return loader


def _iterable(
    loader: torch_data.DataLoader[Any], reading: Reading, link: Link, skipped: int
) -> Iterator[tree.Tree]:
    """An `IterableDataset` through a DataLoader that drops nothing by itself and is seeded by epoch."""

    def make() -> Reopenable:
        settings = settings_of(loader, link.device)
        dataset: Any = loader.dataset
        inner: Any = torch_data.DataLoader(
            dataset.skip(skipped) if skipped else dataset,
            batch_size=loader.batch_size,
            collate_fn=loader.collate_fn,
            **settings,
        )
        return Reopenable(inner, KeyFeed(), settings["generator"])

    places = reading.shards.kept if keeps_workers(loader) else {}
    batches = reopened(places, "stream", make, (), seed=reading.seed, epoch=reading.epoch)
    if loader.num_workers:
        return batches
    # read one ahead: its random numbers must not depend on those of the training loop
    return read_apart(batches, reading.seed, reading.epoch, skipped // (loader.batch_size or 1))
