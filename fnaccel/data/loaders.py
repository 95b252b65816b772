"""The kind of a user's loader: how it makes batches, and its sizes if they are known beforehand.

Only attributes are looked at: nothing is read. Turning a kind into batches is in `indexed.py`
and `stream.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeAlias, TypeVar

import attrs
import torch.utils.data as torch_data

from fnaccel.errors import LoaderError
from fnaccel.tree import Tree

_WHERE = "shard(loader)"


@attrs.frozen(kw_only=True)
class Indexed:
    """A map-style loader with a batch size: which samples are whose is arithmetic.

    Attributes:
        loader: with the `dataset`, `collate_fn` and workers of a DataLoader.
        sampler: gives the indices of an epoch, each time it is iterated.
        batch_size: rows of a full batch.
        drop_last: whether the loader leaves out a batch that is not full.
    """

    loader: Any
    sampler: Any
    batch_size: int
    drop_last: bool


@attrs.frozen(kw_only=True)
class Grouped:
    """A map-style loader with a batch sampler of its own: index lists of any sizes.

    Attributes:
        loader: as for `Indexed`.
        batch_sampler: gives lists of indices, each time it is iterated.
        drop_last: whether the loader leaves out a batch that is not full.
    """

    loader: Any
    batch_sampler: Any
    drop_last: bool = False


@attrs.frozen(kw_only=True)
class Stream:
    """Whole batches that can only be read in order.

    Attributes:
        loader: the iterable.
        batch_size: rows of a full batch, if it is known.
        drop_last: whether the loader leaves out a batch that is not full.
        sampler: of a map-style loader with `batch_size=None`, whose items are whole batches.
    """

    loader: Any
    batch_size: int | None = None
    drop_last: bool = False
    sampler: Any = None


Source: TypeAlias = Indexed | Grouped | Stream


_readers: dict[type, Callable[[Any], Source]] = {}

R = TypeVar("R", bound=Callable[[Any], Source])


def reader(kind: type) -> Callable[[R], R]:
    """Decorator: this function says how a loader of this class makes its batches.

    It gets the loader that `fa.shard` was given, and returns an `Indexed`, a `Grouped` or a `Stream`.
    """

    def register(fn: R) -> R:
        _readers[kind] = fn
        return fn

    return register


def classify(loader: object, *, presplit: bool = False) -> Source:
    """Say how a loader makes its batches.

    Args:
        loader: any iterable of batches.
        presplit: whether it may hold one rank's part of the data.

    Raises:
        LoaderError: it is not iterable, holds nothing, or is split between ranks already.
    """
    for kind, read in _readers.items():
        if isinstance(loader, kind):
            source = read(loader)
            if not isinstance(source, Indexed | Grouped | Stream):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise LoaderError(
                    f"the reader of {kind.__name__} returned {type(source).__name__}",
                    where=_WHERE,
                    fix="return an Indexed, a Grouped or a Stream, as fnaccel.data.classify does",
                )
            return source
    if not isinstance(loader, Iterable):
        raise LoaderError(
            f"a {type(loader).__name__} can't be read: it is not iterable",
            where=_WHERE,
            fix="pass a torch DataLoader, or any iterable of batches",
        )
    _check_no_place(loader)
    if not presplit:
        _check_whole(loader)
    if not isinstance(loader, torch_data.DataLoader) or _iterates_itself(loader):
        _check_not_empty(loader)
        return Stream(loader=loader)
    batching: Any = loader.batch_sampler
    if isinstance(loader.dataset, torch_data.IterableDataset):
        return Stream(loader=loader, batch_size=loader.batch_size, drop_last=loader.drop_last)
    _check_not_empty(loader.dataset)
    if batching is None:
        return Stream(loader=loader, sampler=loader.sampler)
    if _is_stock(batching, "BatchSampler"):
        return Indexed(
            loader=loader,
            sampler=batching.sampler,
            batch_size=batching.batch_size,
            drop_last=batching.drop_last,
        )
    return Grouped(loader=loader, batch_sampler=batching)


def _iterates_itself(loader: torch_data.DataLoader[Any]) -> bool:
    """Whether a subclass of DataLoader makes batches in a way of its own.

    torchdata's StatefulDataLoader overrides `__iter__` too, but only to count its batches,
    which a `Position` does here.
    """
    return type(loader).__iter__ is not torch_data.DataLoader.__iter__ and not is_plain(loader)


def is_plain(loader: object) -> bool:
    """Whether a loader makes its batches as torch's own does, and can be rebuilt from its attributes."""
    kind = type(loader)
    return kind is torch_data.DataLoader or kind.__module__.startswith("torchdata.")


def keeps_workers(loader: torch_data.DataLoader[Any]) -> bool:
    """Whether workers live on after an epoch: those of a data set that is told the epoch would miss it.

    Streams of datasets have their epoch in shared memory, where workers see it.
    """
    told = hasattr(loader.dataset, "set_epoch") and not hasattr(
        getattr(loader.dataset, "_epoch", 0), "is_shared"
    )
    return loader.persistent_workers and not told


def _check_not_empty(data: Tree) -> None:
    if length_of(data) == 0:
        raise LoaderError(
            "the loader holds nothing",
            where=_WHERE,
            fix="check the path and the filters of the dataset; it needs one item or more",
        )


def _check_no_place(loader: object) -> None:
    """Raise LoaderError if `load_state_dict` gave a loader or its data a place to begin at."""
    marks = ((loader, "next_iter_state"), (getattr(loader, "dataset", loader), "_starting_state_dict"))
    for holder, mark in marks:  # torchdata's StatefulDataLoader, a stream of Hugging Face datasets
        if getattr(holder, mark, None) is not None:
            raise LoaderError(
                f"the {type(holder).__name__} begins at a place that load_state_dict gave it, and the "
                "position stands in the train state",
                where=_WHERE,
                fix="make the loader anew, and go on at shards.at(fa.state.Position(epoch, samples))",
            )


def _check_whole(loader: object) -> None:
    """Raise LoaderError if a loader says of itself that it holds one rank's part of the data."""
    for holder, _ in _parts(loader):
        kind = type(holder).__name__
        if _stream_part(holder) is None:
            what = f"the loader has a {kind}"
            fix = (
                "give the loader the whole data: remove sampler=, and set shuffle=True if it shuffled; "
                "or let each rank read its own part: fa.shard(loader, presplit=True)"
            )
        else:
            what = f"the {kind} is split between ranks already (split_dataset_by_node)"
            fix = (
                "let each rank read its own part: fa.shard(loader, presplit=True); or split nothing, "
                "and let fa.shard do it"
            )
        raise LoaderError(f"{what}, so each rank would see a part of a part", where=_WHERE, fix=fix)


def check_part(loader: object, rank: int, ranks: int) -> None:
    """Raise LoaderError if a loader says of itself that it holds the part of another rank."""
    for holder, part in _parts(loader):
        if part != (rank, ranks):
            raise LoaderError(
                f"the {type(holder).__name__} gives part {part[0]} of {part[1]} to rank {rank} of {ranks}, "
                "so samples would be lost or read twice",
                where="shard(loader, presplit=True)",
                fix=f"split the data for rank {rank} of {ranks}: train_step.mesh['batch'] has both numbers",
            )


def splits(sampler: object) -> bool:
    """Whether a sampler gives one rank its part: torch's DistributedSampler, or one with its attributes."""
    return _part_of(sampler) is not None


def _parts(loader: object) -> list[tuple[Any, tuple[int, int]]]:
    """The samplers and streams of a loader that hold one rank's part of the data, with (rank, ranks)."""
    parts = [(sampler, _part_of(sampler)) for sampler in _samplers(loader)]
    parts += [(data, _stream_part(data)) for data in (loader, getattr(loader, "dataset", None))]
    return [(holder, part) for holder, part in parts if part is not None]


def _samplers(loader: object) -> list[Any]:
    batching: Any = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batching, getattr(batching, "sampler", None)]


def _part_of(sampler: object) -> tuple[int, int] | None:
    """(rank, ranks) of a sampler that gives one rank its part. None for others."""
    if isinstance(sampler, torch_data.DistributedSampler):
        return sampler.rank, sampler.num_replicas
    pairs = (("num_replicas", "rank"), ("num_processes", "process_index"))  # the second: accelerate's
    for count, rank in pairs:
        part = getattr(sampler, rank, None), getattr(sampler, count, None)
        if isinstance(part[0], int) and isinstance(part[1], int) and part[1] > 1:
            return part[0], part[1]
    return None


def _stream_part(data: Tree) -> tuple[int, int] | None:
    """(rank, ranks) of a stream that `split_dataset_by_node` has split. None for others."""
    split = getattr(data, "_distributed", None)
    ranks = getattr(split, "world_size", 1)
    return (split.rank, ranks) if split is not None and ranks > 1 else None


def length_of(data: Tree) -> int | None:
    """`len(data)`, or None if it is unknown."""
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # a DataLoader has __len__ even if its dataset has none
        return None


def order_of(sampler: Any) -> tuple[int, bool] | None:
    """(samples, whether shuffled) if the order is ours to make. None for a sampler of another kind."""
    if _is_stock(sampler, "SequentialSampler"):
        return len(sampler.data_source), False
    if _is_stock(sampler, "RandomSampler") and not sampler.replacement:
        n = len(sampler.data_source)
        return (n, True) if sampler.num_samples == n else None
    return None


def _is_stock(sampler: object, name: str) -> bool:
    """Whether a sampler is torch's own of that name, or torchdata's, which only counts samples."""
    kind = type(sampler)
    return kind.__name__ == name and kind.__module__.partition(".")[0] in ("torch", "torchdata")


def announce(source: Source, epoch: int) -> None:
    """Tell samplers and datasets that shuffle by epoch (`set_epoch`) which one begins."""
    loader = source.loader
    informed: set[int] = set()
    for listener in [*_samplers(loader), getattr(loader, "dataset", loader)]:
        set_epoch = getattr(listener, "set_epoch", None)
        if callable(set_epoch) and id(listener) not in informed:
            informed.add(id(listener))
            set_epoch(epoch)
