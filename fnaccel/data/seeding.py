"""Randomness inside worker processes: a dataset that is reseeded before each sample.

What an augmentation draws then follows from (seed, epoch, index): not from the number of workers
or ranks, nor from which of them reads the sample. Only worker processes use this; a loader
without workers reads in the process of the training loop and draws from its streams. It costs
about 7 us a sample.
"""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch
import torch.utils.data as torch_data

from fnaccel.state import fold

_SAMPLE = 0x73616D706C65  # "sample": seeds of samples are no other part's seeds


def reseed(seed: int) -> None:
    """Seed `random`, PyTorch's CPU generator, and NumPy's global one where NumPy is loaded."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _number(key: Any) -> int:
    """An integer that stands for a dataset key; the first one of a list of keys."""
    if isinstance(key, list | tuple) and key:
        return _number(key[0])
    return key if isinstance(key, int) else zlib.crc32(repr(key).encode())


def reads_lists(dataset: Any) -> bool:
    """Whether a dataset reads a list of samples in a way of its own (`__getitems__`).

    A Subset only passes the call on, so what it wraps is asked.
    """
    while type(dataset) is torch_data.Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class SeededDataset(torch_data.Dataset[Any]):
    """Reads `(epoch, keys)` from a dataset, reseeding before each key.

    A dataset that reads lists by itself (`__getitems__`) is reseeded once a list, from its first
    key: then what is drawn depends on how samples are grouped.

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
