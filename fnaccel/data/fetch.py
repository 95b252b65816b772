"""Reading the samples that index lists name, with the user's own settings of the DataLoader.

Without workers samples are read right here. With workers a DataLoader over our index lists does
it. The lists are made in `indexed.py`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
import torch.utils.data as torch_data

from fnaccel import tree
from fnaccel.data.loaders import keeps_workers
from fnaccel.data.seeding import SeededDataset
from fnaccel.tree import Tree
from fnaccel.world.random_streams import fold

_WORKERS = 0x776F726B657273  # "workers": their base seeds are no other part's seeds

_LOOK = 1.0
"""Seconds between two looks of a worker for its training process."""

_SETTINGS = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


@attrs.frozen
class FirstOf:
    """A collate function for items that are whole batches: the only one of its list, converted."""

    convert: Callable[[Any], Any]

    def __call__(self, rows: list[Any]) -> Any:
        """Convert the batch that is the only row."""
        return self.convert(rows[0])


@attrs.frozen
class Beginning:
    """The first call in a worker: ignores the signals that its process catches, and runs the user's own.

    Schedulers signal whole groups of processes. The training process needs its workers to finish its step
    and save. A worker ends with the training process.
    """

    own: Callable[[int], None] | None
    ignored: tuple[int, ...]

    def __call__(self, worker: int) -> None:
        """Begin in one worker."""
        _end_with_parent()
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)
        if self.own is not None:
            self.own(worker)


def _end_with_parent() -> None:
    """End this worker when the training process has ended.

    torch looks for a change of the parent once a worker has begun. If the training process ends sooner, the
    parent has changed already, and a worker would wait for index lists for ever. Nor does torch look while an
    item is read.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and sys.platform != "win32":  # where no process gets another parent
        threading.Thread(target=_wait_for_end, args=(parent,), name="fnaccel-parent", daemon=True).start()


def _wait_for_end(parent: Any) -> None:
    # a fork server is the parent of its workers. The pipe to a forking parent may be held by other workers
    served = isinstance(multiprocessing.current_process(), multiprocessing.context.ForkServerProcess)
    while parent.is_alive() if served else os.getppid() == parent.pid:
        time.sleep(_LOOK)
    os._exit(1)


def _caught() -> tuple[int, ...]:
    names = ("SIGTERM", "SIGUSR1")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return tuple(int(number) for number in numbers if callable(signal.getsignal(number)))


@attrs.define
class KeyFeed:
    """The index lists of the epoch at hand, as workers that live on are handed them."""

    keys: Iterable[list[Any]] = ()
    epoch: int = 0

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        return ((self.epoch, keys) for keys in self.keys)


@attrs.frozen
class Reopenable:
    """A DataLoader of ours with the feed and the generator to begin another epoch on it."""

    loader: torch_data.DataLoader[Any]
    feed: KeyFeed
    generator: torch.Generator

    def open(self, keys: Iterable[list[Any]], *, seed: int, epoch: int) -> Iterator[Any]:
        """Begin to read an epoch."""
        self.feed.keys, self.feed.epoch = keys, epoch
        self.generator.manual_seed(fold(seed, _WORKERS, epoch))
        return iter(self.loader)


def settings_of(loader: torch_data.DataLoader[Any], device: torch.device) -> dict[str, Any]:
    """The settings of a loader, as arguments for another one. Its batches are decided elsewhere.

    The generator is our own: workers are seeded from it, so ranks agree and PyTorch's global
    stream does not move.
    """
    settings = {name: getattr(loader, name) for name in _SETTINGS}
    if loader.num_workers:
        settings["worker_init_fn"] = Beginning(loader.worker_init_fn, _caught())
    return settings | {
        "pin_memory": loader.pin_memory and device.type != "cpu",
        "persistent_workers": loader.persistent_workers,
        "generator": torch.Generator(),
    }


def read(
    loader: torch_data.DataLoader[Any],
    keys: Iterable[list[Any]],
    *,
    seed: int,
    epoch: int,
    device: torch.device,
    workers: dict[str, Any],
    one_by_one: bool = False,
) -> Iterator[Any]:
    """The batch of each index list, in order.

    Args:
        loader: whose dataset, collate function and workers to use.
        keys: index lists, read ahead of the batches if there are workers.
        seed, epoch: the seeds of workers follow from these.
        device: the final device of batches. Memory is pinned only for an accelerator.
        workers: the persistent workers between epochs.
        one_by_one: each list holds one key, whose item is a whole batch.
    """
    collate: Any = FirstOf(loader.collate_fn) if one_by_one else loader.collate_fn
    if loader.num_workers == 0:
        return map(_reader(loader.dataset, collate, one_by_one), keys)
    name = "items" if one_by_one else "batches"

    def make() -> Reopenable:
        feed = KeyFeed()
        dataset = SeededDataset(loader.dataset, seed, one_by_one=one_by_one)
        settings = settings_of(loader, device)
        inner: Any = torch_data.DataLoader(dataset, batch_sampler=feed, collate_fn=collate, **settings)  # pyright: ignore[reportArgumentType]
        return Reopenable(inner, feed, settings["generator"])

    places = workers if keeps_workers(loader) else {}
    return reopened(places, name, make, keys, seed=seed, epoch=epoch)


def reopened(
    workers: dict[str, Any], name: str, make: Callable[[], Reopenable], keys: Any, *, seed: int, epoch: int
) -> Iterator[Any]:
    """Read an epoch through the workers kept under `name`, or through new ones.

    They are taken out while they read: a second reading at the same time gets workers of its own.
    """
    opened: Reopenable = workers.pop(name, None) or make()
    try:
        yield from opened.open(keys, seed=seed, epoch=epoch)
    finally:
        workers[name] = opened


def _reader(dataset: Any, collate: Any, one_by_one: bool) -> Callable[[list[Any]], Any]:
    """The quickest way to read one index list."""
    if not one_by_one and type(dataset) is torch_data.TensorDataset:
        columns = _Columns(dataset.tensors)
        if collate is torch_data.default_collate and _same(columns([0]), collate([dataset[0]])):
            return columns
    lists: Any = getattr(dataset, "__getitems__", None)
    if not one_by_one and callable(lists):
        return lambda keys: collate(lists(keys))
    return lambda keys: collate([dataset[key] for key in keys])


@attrs.frozen
class _Columns:
    """Rows of a TensorDataset, gathered a tensor at a time instead of a sample at a time."""

    tensors: tuple[torch.Tensor, ...]

    def __call__(self, keys: list[int]) -> list[torch.Tensor]:
        """The batch of the given rows, as PyTorch's default collate function makes it."""
        index = torch.tensor(keys)
        return [column[index].contiguous() for column in self.tensors]


def _same(first: Tree, second: Tree) -> bool:
    """Whether two batches are equal in all that a user can see. Collate functions can be changed."""
    if tree.structure(first) != tree.structure(second):
        return False
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    return all(type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
