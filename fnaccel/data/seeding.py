"""Randomness of data sets: random numbers follow from (seed, epoch, place), whichever process reads.

In worker processes a dataset is reseeded before each sample: not the number of workers or ranks, nor
which of them reads, matters. It costs about 7 us a sample. An iterable that the process of the training
loop reads by itself is reseeded before each batch, and that loop's streams are put back. A map-style
loader without workers draws from the streams of the training loop, which a checkpoint keeps.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.utils.data as torch_data

from fnaccel.errors import require
from fnaccel.world.random_streams import fold, reseed
from fnaccel.world.world import World, find_current

T = TypeVar("T")

_BATCH = 0x6261746368  # "batch" as well
_SAMPLER = 0x73616D706C6572  # "sampler" as well
_END = object()
_SAMPLE = 0x73616D706C65  # "sample": seeds of samples are no other part's seeds


def set_seed(seed: int, *, per_rank: bool = False, world: World | None = None) -> None:
    """Seed the global generators of Python, NumPy (if it is installed) and PyTorch, on all devices.

    A train step seeds its own draws by `init(seed=)`. This function is for the code around it: splits of a
    data set, augmentations without workers, models that are built by hand.

    Args:
        seed: 0 or more.
        per_rank: ranks draw different numbers. By default all ranks draw the same.
        world: the world, if none was started in this context. Without a world there is one rank.

    Raises:
        ArgumentError: a negative seed, or no int.

    Example:
        >>> fa.set_seed(0)
        >>> first = torch.randperm(100)
        >>> fa.set_seed(0)
        >>> torch.equal(torch.randperm(100), first)
        True
    """
    require(type(seed) is int and seed >= 0, f"a seed of {seed!r}", "fa.set_seed", "an int that is 0 or more")
    there = world or find_current()
    rank = 0 if there is None else there.rank
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy")  # one that is imported later would not be seeded
    chosen = fold(seed, rank) if per_rank else seed
    reseed(chosen)
    torch.manual_seed(chosen)


def read_apart(batches: Iterable[T], seed: int, epoch: int, first: int) -> Iterator[T]:
    """Batches of an iterable, each read from streams seeded with its number. The caller's don't move.

    Args:
        batches: read one at a time.
        seed, epoch: the seeds of the streams follow from these.
        first: the number of the first batch.
    """
    upcoming = iter(batches)
    for number in count(first):
        with _streams(fold(seed, _BATCH, epoch, number)):
            batch = next(upcoming, _END)
        if batch is _END:
            return
        yield cast(T, batch)


def replayed(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """The indices of a user's own sampler for an epoch: the same in every call.

    The global streams, and generators among the attributes of it and of samplers within it, are seeded for it
    and put back: a run that goes on in the middle of an epoch has to see the order that it began with.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_streams(fold(seed, _SAMPLER, epoch)))
        for owner, generator in _generators(sampler):
            # torchdata makes up a seed in each process
            made_up = type(owner).__module__.startswith("torchdata.")
            stack.callback(_begin(generator, partial(fold, seed, _SAMPLER, epoch), made_up=made_up))
        return list(sampler)


def _generators(owner: Any) -> Iterator[tuple[Any, Any]]:
    """The random generators of torch, Python and NumPy in a sampler and samplers within it, with owners."""
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        numpys = hasattr(value, "bit_generator") or hasattr(value, "_bit_generator")
        if numpys or isinstance(value, torch.Generator) or type(value) is random.Random:
            yield owner, value
        elif isinstance(value, torch_data.Sampler) or name == "sampler":
            yield from _generators(value)


def _begin(generator: Any, seed: Callable[[int], int], *, made_up: bool) -> Callable[[], object]:
    """Seed a generator, dependent on the seed that the user gave it. Returns a function that puts it back."""
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state()
        generator.manual_seed(seed(0 if made_up else generator.initial_seed()))
        return partial(generator.set_state, state)
    if isinstance(generator, random.Random):
        state = generator.getstate()
        generator.seed(seed(_number(repr(state))))
        return partial(generator.setstate, state)
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator  # noqa: SLF001
    state = bits.state
    bits.state = type(bits)(seed(_number(repr(state)))).state
    return partial(setattr, bits, "state", state)


@contextlib.contextmanager
def _streams(seed: int) -> Generator[None]:
    """Python's, PyTorch's and NumPy's global streams seeded in the body, and as they were after it."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.default_generator.get_state(), numpy and numpy.random.get_state()
    reseed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.default_generator.set_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])


def _number(key: object) -> int:
    """An integer that stands for a dataset key: the first one of a list of keys."""
    if isinstance(key, list | tuple) and key:
        return _number(key[0])
    return key if isinstance(key, int) else zlib.crc32(repr(key).encode())


def reads_lists(dataset: Any) -> bool:
    """Whether a dataset reads a list of samples in a way of its own (`__getitems__`).

    A Subset only passes the call on, so its inner dataset decides.
    """
    while type(dataset) is torch_data.Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class SeededDataset(torch_data.Dataset[Any]):
    """Reads `(epoch, keys)` from a dataset, reseeding before each key.

    A dataset that reads lists by itself (`__getitems__`) is reseeded once a list, from its first
    key: then random numbers depend on how samples are grouped.

    Args:
        dataset: the user's map-style dataset.
        seed: the root seed of the data.
        one_by_one: never read lists (the items of the dataset are whole batches).
    """

    def __init__(self, dataset: Any, seed: int, *, one_by_one: bool = False) -> None:
        self.dataset = dataset
        self.seed = seed
        self.lists = not one_by_one and reads_lists(dataset)

    def __getattr__(self, name: str) -> Any:
        # a worker_init_fn finds its dataset through get_worker_info(), and reads attributes of it
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, request: tuple[int, list[Any]]) -> list[Any]:
        """The samples of one batch, as `request = (epoch, keys)` names them."""
        epoch, keys = request
        if self.lists:
            reseed(fold(self.seed, _SAMPLE, epoch, _number(keys)))
            return self.dataset.__getitems__(keys)
        return [self._sample(epoch, key) for key in keys]

    def _sample(self, epoch: int, key: Any) -> Any:
        reseed(fold(self.seed, _SAMPLE, epoch, _number(key)))
        return self.dataset[key]
