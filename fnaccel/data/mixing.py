"""`fa.data.mix`: one loader out of several, with shares by weights. A resumed run finds the order again."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch
from torch.utils import data as torch_data

from fnaccel.extend import (
    ArgumentError,
    FnaccelError,
    Grouped,
    Indexed,
    Stream,
    classify,
    nearest,
    require,
    rows_of,
)

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]]
_WHERE = "fa.data.mix"
_SETTINGS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "persistent_workers",
    "multiprocessing_context", "prefetch_factor",
)  # fmt: skip
_WALKS = 1 << 20
"""Between the epochs that a data set is told for two walks of one epoch. No other epoch has these numbers."""


@attrs.frozen
class Shares:
    """What part of the draws each source gets. It is weights to the power 1 / temperature, over their sum."""

    names: tuple[str, ...]
    weights: Weights
    temperature: float

    def at(self, samples: int) -> list[float]:
        """The shares after so many samples.

        Raises:
            ArgumentError: a weight of no source, a negative one, or no positive one.
        """
        given = self.weights(samples) if callable(self.weights) else self.weights
        for name in given:
            if name not in self.names:
                fix = nearest(name, self.names)
                raise ArgumentError(f"there is no source {name!r}", where=f"{_WHERE}(weights=)", fix=fix)
        found = [float(given.get(name, 0.0)) for name in self.names]
        right = all(0 <= weight < math.inf for weight in found) and sum(found) > 0
        fix = "give each source a number of 0 or more, and one of them more than 0"
        require(right, f"weights of {dict(given)}", f"{_WHERE}(weights=)", fix)
        powers = [weight ** (1 / self.temperature) if weight else 0.0 for weight in found]
        return [power / sum(powers) for power in powers]


def _interleaved(
    shares: Shares,
    stop: str,
    samples: int,
    begin: Callable[[int, int], Iterable[Any]],
    size: Callable[[Any], int],
) -> Iterator[tuple[int, Any]]:
    """(source, draw) of an epoch. Each is of the source that is furthest behind its share.

    Args:
        shares: of the sources.
        stop: see `mix`.
        samples: those of the run before the epoch.
        begin: `begin(source, walk)` walks through a source, for the first time or once more.
        size: the samples of a draw.
    """
    count = len(shares.names)
    behind, walks, through = [0.0] * count, [0] * count, set[int]()
    running = [iter(begin(source, 0)) for source in range(count)]
    now = shares.at(samples)
    while True:
        now = shares.at(samples) if callable(shares.weights) else now
        behind = [value + share for value, share in zip(behind, now, strict=True)]
        source = max((each for each in range(count) if now[each]), key=behind.__getitem__)
        draw = next(running[source], None)
        if draw is None:
            through.add(source)
            if stop == "first" or all(each in through or not now[each] for each in range(count)):
                return
            walks[source] += 1
            running[source] = iter(begin(source, walks[source]))
            draw = next(running[source], None)
            require(draw is not None, f"{shares.names[source]} has no batch", _WHERE, "leave it out")
        behind[source] -= 1.0
        samples += size(draw)
        yield source, draw


class _Rows(torch_data.ConcatDataset[Any]):
    """The data sets of all sources, one after the other."""

    def __init__(self, datasets: list[Any], label: str | None) -> None:
        super().__init__(datasets)
        self._label = label

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        if self._label is None:
            return item
        return _labelled(item, self._label, bisect.bisect_right(self.cumulative_sizes, index))


class _Order(torch_data.Sampler[Any]):
    """The rows, or the batches of rows, of an epoch: a function of seed, epoch, sizes and weights."""

    def __init__(
        self, sources: list[Indexed], shares: Shares, stop: str, seed: int, *, batches: bool
    ) -> None:
        self._sources, self._shares, self._stop, self._seed = sources, shares, stop, seed
        self._batches = batches
        self._starts, self._epoch = [0], 0  # samples of the run before each epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch."""
        self._epoch = epoch
        while len(self._starts) <= epoch:  # only a schedule asks for them
            count = sum(map(len, self._drawn(len(self._starts) - 1))) if callable(self._shares.weights) else 0
            self._starts.append(self._starts[-1] + count)

    def __len__(self) -> int:
        if callable(self._shares.weights):
            raise TypeError("epochs of a mixture differ in length if weights are a function")
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        """The draws of each epoch: sizes and weights decide, and the seed does not."""
        return sum(1 for _ in self._drawn(0))

    def __iter__(self) -> Iterator[Any]:
        return (keys if self._batches else keys[0] for keys in self._drawn(self._epoch))

    def _drawn(self, epoch: int) -> Iterator[list[int]]:
        """The keys of each draw: one row, or those of a batch."""
        begin = functools.partial(self._walk, epoch)
        draws = _interleaved(self._shares, self._stop, self._starts[epoch], begin, len)
        return (keys for _, keys in draws)

    def _walk(self, epoch: int, number: int, walk: int) -> list[list[int]]:
        """All draws of one walk through a source."""
        source = self._sources[number]
        rows, step = len(source.loader.dataset), source.batch_size if self._batches else 1
        first = sum(len(before.loader.dataset) for before in self._sources[:number])
        order = torch.arange(rows)
        if isinstance(source.sampler, torch_data.RandomSampler):
            seed = hash((self._seed, epoch, number, walk))  # of ints: the same in every process
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        keys = [part.tolist() for part in (order + first).split(step)]
        return keys[:-1] if self._batches and source.drop_last and len(keys[-1]) < step else keys


class _Batches(torch_data.IterableDataset[Any]):
    """Batches of loaders, each whole of one source.

    It is a data set because `fa.shard` seeds the random streams before each batch of one. So a source that
    draws from them gives the same on all ranks, and again in a resumed run.
    """

    def __init__(self, loaders: Mapping[str, Any], shares: Shares, stop: str, label: str | None) -> None:
        self._loaders, self._shares, self._stop, self._label = [*loaders.values()], shares, stop, label
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch."""
        self._epoch = epoch

    def _begin(self, source: int, walk: int) -> Any:
        """A source whose data set is told that another epoch begins with each walk: some shuffle by it."""
        loader = self._loaders[source]
        generator = getattr(loader, "generator", None)
        if generator is not None:  # it would go on where the last run left it
            generator.manual_seed(int(torch.randint(1 << 62, ())))
        for part in (getattr(loader, "sampler", None), getattr(loader, "dataset", loader)):
            told = getattr(part, "set_epoch", None)
            if told is not None:
                told(self._epoch + walk * _WALKS)
        return loader

    def __iter__(self) -> Iterator[Any]:
        for source, batch in _interleaved(self._shares, self._stop, 0, self._begin, rows_of):
            if self._label is not None:
                batch = _labelled(batch, self._label, torch.full((rows_of(batch),), source))
            yield batch


def _unchanged(batch: Any) -> Any:
    return batch


def mix(
    loaders: Mapping[str, Any],
    *,
    weights: Weights | None = None,
    temperature: float = 1.0,
    by: Literal["rows", "batches"] = "rows",
    stop: Literal["first", "last"] = "first",
    seed: int = 0,
    label: str | None = None,
) -> Any:
    """One loader of several sources, for `fa.shard`. Nothing is read.

    After n draws a source with the share p has had less than n * p + 1 of them, and with k sources more than
    n * p - k + 1. The order follows from the seed, the epoch, sizes and weights, so a run resumes exactly, on
    any number of ranks.

    Args:
        loaders: by name: DataLoaders of map-style data, or, by batches, also iterables of batches. Each epoch
            begins them anew. One that is shuffled is so each time that it is walked through.
        weights: of the sources, of any sum, or a function of the samples drawn so far that returns them (of
            streams, so far in the epoch). By default the sizes of the data sets.
        temperature: T gives shares of w to the power 1 / T. Above 1 small sources get more
            (arXiv:2010.11934).
        by: `"rows"` mixes the rows of a batch, `"batches"` takes each batch from one source.
        stop: an epoch ends at the turn of a source that is through: the `"first"` one, or the `"last"` one.
            Others begin anew, and one of weight 0 is not waited for.
        seed: of the shuffling. With a stream among the sources, that of `fa.shard` counts.
        label: a key under which each row has the number of its source. Items, or batches of streams, are
            dicts.

    Returns:
        A DataLoader: with the collate function and the workers of the first one, or over the batches of
        streams.

    Raises:
        LoaderError: a source is empty, or split between ranks already.
        ArgumentError: weights that fit no source, rows of streams, sizes of batches or collate functions that
            differ, a sampler of another kind, shards in the place of a loader.

    Example:
        >>> other = DataLoader(loader.dataset, batch_size=4)
        >>> mixed = fa.data.mix({"web": loader, "code": other}, weights={"web": 3, "code": 1}, label="source")
        >>> next(iter(fa.shard(mixed))).data["source"]
        tensor([0, 0, 1, 0])
    """
    for option, given, known in (("by", by, ("rows", "batches")), ("stop", stop, ("first", "last"))):
        require(given in known, f"{option}={given!r}", _WHERE, f"{option} is one of {', '.join(known)}")
    require(temperature > 0, f"temperature={temperature}", _WHERE, "a temperature is above 0")
    require(bool(loaders), "no source", _WHERE, 'fa.data.mix({"web": loader, "code": other})')
    kinds = {name: _kind_of(name, loader) for name, loader in loaders.items()}
    streams = [name for name, kind in kinds.items() if isinstance(kind, Stream)]
    if weights is None and not streams:
        weights = {name: float(len(loaders[name].dataset)) for name in loaders}
    shares = Shares(tuple(loaders), {} if weights is None else weights, temperature)
    fits = not streams or (by == "batches" and weights is not None)
    fix = 'by="batches", with weights'
    require(fits, f"{', '.join(streams)} can only be read in order", _WHERE, fix)
    dead = 0.0 in shares.at(0) and stop == "last" and not callable(weights)
    require(not dead, "a source of weight 0 is never through", _WHERE, 'leave it out; or stop="first"')
    if streams:
        batches: Any = _Batches(loaders, shares, stop, label)
        return torch_data.DataLoader(batches, batch_size=None, collate_fn=_unchanged)
    sources = [_with_rows(name, kind) for name, kind in kinds.items()]
    first = sources[0].loader
    for option in ("batch_size", "collate_fn")[by == "batches" :]:
        found = [getattr(source.loader, option) for source in sources]
        same = all(value == found[0] for value in found)
        require(same, f"{option} differs: {found}", _WHERE, "give all loaders the same")
    order = _Order(sources, shares, stop, seed, batches=by == "batches")
    rows = _Rows([source.loader.dataset for source in sources], label)
    settings = {name: getattr(first, name) for name in _SETTINGS}
    if by == "batches":
        return torch_data.DataLoader(rows, batch_sampler=order, **settings)
    return torch_data.DataLoader(rows, first.batch_size, sampler=order, drop_last=first.drop_last, **settings)


def _kind_of(name: str, loader: Any) -> Indexed | Grouped | Stream:
    """How a source makes its batches. An error names it."""
    shared = hasattr(loader, "updates_per_epoch")
    require(not shared, f"{name} is the result of fa.shard", _WHERE, f"give the loader: {name}.loader")
    try:
        return classify(loader)
    except FnaccelError as error:
        error.add_note(f"it is the source {name!r} of {_WHERE}")
        raise


def _with_rows(name: str, kind: Any) -> Indexed:
    """A source whose rows a mixture can order. Raises ArgumentError if a sampler of the user's does."""
    stock = torch_data.RandomSampler | torch_data.SequentialSampler
    if isinstance(kind, Indexed) and isinstance(kind.sampler, stock):
        whole = len(kind.sampler) == len(kind.loader.dataset)
        if whole and not getattr(kind.sampler, "replacement", False):
            return kind
    fix = "DataLoader(dataset, batch_size=..., shuffle=True)"
    what = f"{name} has a sampler of its own, and a mixture orders its rows"
    raise ArgumentError(what, where=_WHERE, fix=fix)


def _labelled(item: Any, label: str, number: Any) -> dict[str, Any]:
    fix = 'give items such as {"tokens": ..., "labels": ...}, or no label'
    what = f"an item is {type(item).__name__}, and label={label!r} adds a key to dicts"
    require(isinstance(item, dict), what, _WHERE, fix)
    require(label not in item, f"the items have {label!r} already", f"{_WHERE}(label=)", "another key")
    return {**item, label: number}
