"""Loaders pickle, can be left and nested, and are freed."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fnaccel as fa
from fnaccel.state import Position


def loader(rows=8, size=2):
    return DataLoader(TensorDataset(torch.arange(rows)), batch_size=size)


def read(shards):
    return [batch.data[0].tolist() for batch in shards]


def pickled(dispatch):
    shards = fa.shard(loader(), dispatch=dispatch)
    copy = pickle.loads(pickle.dumps(shards))
    skipped = shards.at(Position(epoch=0, samples=4))
    return read(shards) == read(copy), read(skipped) == read(pickle.loads(pickle.dumps(skipped)))


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loaders_pickle(pools, ranks, dispatch):
    assert pools.run(ranks, pickled, dispatch) == [(True, True)] * ranks


def test_loops_may_be_left_and_nested():
    with fa.start(device="cpu"):
        outer, inner = fa.shard(loader()), fa.shard(loader(6))
        for _ in outer:
            break
        assert [len(read(inner)) for _ in outer] == [3] * 4
        assert len(read(outer)) == 4


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index)


def test_nothing_keeps_a_loader_alive():
    with fa.start(device="cpu"):
        data = Rows()
        shards = fa.shard(DataLoader(data, batch_size=2))
        assert len(read_all(shards)) == 2
        known = weakref.ref(data), weakref.ref(shards)
        gc.disable()
        try:
            del data, shards
            assert [each() for each in known] == [None, None]
        finally:
            gc.enable()


def read_all(shards):
    return [batch.data for batch in shards]


class Batches:
    """A batch sampler that is told the epoch, and begins each at another row."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __iter__(self):
        rows = [(row + self.epoch) % 8 for row in range(8)]
        return iter([rows[start : start + 2] for start in range(0, 8, 2)])


def test_a_batch_sampler_is_told_the_epoch():
    with fa.start(device="cpu"):
        shards = fa.shard(DataLoader(TensorDataset(torch.arange(8)), batch_sampler=Batches()))
        first = read(shards)
        second = read(shards.at(Position(epoch=1)))
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert second == [[1, 2], [3, 4], [5, 6], [7, 0]]
