from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.utils.data as torch_data

import fnaccel as fa
from fnaccel.data import open_epoch, shard
from fnaccel.data.seeding import SeededDataset
from fnaccel.errors import ArgumentError
from fnaccel.state import Position

from .reading import numbers, read, samples, values


class Noisy(torch_data.Dataset):
    """Draws from every global stream, as augmentations do."""

    flavour = "noisy"

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random()], dtype=torch.float64)


class Lists(Noisy):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def noise(workers, ranks=1, dataset=None, epoch=0, batch_size=4):
    loader = torch_data.DataLoader(
        dataset or Noisy(), batch_size=batch_size, shuffle=True, num_workers=workers
    )
    shards = shard(loader, seed=7).at(Position(epoch))
    rows = [
        row for rank in range(ranks) for b in read(shards, rank, ranks) for row in b.data[: b.valid].tolist()
    ]
    return sorted(map(tuple, rows))


def test_what_is_drawn_depends_on_the_sample_only():
    one = noise(1)
    assert noise(2) == one
    assert noise(1, ranks=2, batch_size=3) == one
    assert noise(1, dataset=torch_data.Subset(Noisy(), range(12))) == one
    assert noise(1, epoch=1) != one


def test_workers_read_what_no_workers_read():
    for count in (0, 2):
        loader = torch_data.DataLoader(numbers(11), batch_size=4, shuffle=True, num_workers=count)
        before = torch.random.get_rng_state()
        parts = [read(shard(loader), rank, 3) for rank in range(3)]
        assert torch.equal(torch.random.get_rng_state(), before)
        if count == 0:
            expected = [[(values(b.data), b.valid, b.position) for b in one] for one in parts]
    assert [[(values(b.data), b.valid, b.position) for b in one] for one in parts] == expected


def test_persistent_workers_live_from_epoch_to_epoch():
    def pid_of(batch):
        return batch.data[0, 1].item()

    loader = torch_data.DataLoader(Pids(), batch_size=4, num_workers=1, persistent_workers=True, shuffle=True)
    shards = shard(loader)
    first, second = read(shards), read(shards.at(Position(1)))
    assert {pid_of(batch) for batch in first} == {pid_of(batch) for batch in second}
    order = [[row for batch in one for row in batch.data[:, 0].tolist()] for one in (first, second)]
    assert order[0] != order[1]
    assert sorted(order[0]) == sorted(order[1]) == list(range(8))


class Pids(torch_data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import os

        return torch.tensor([index, os.getpid()])


def test_a_stream_through_workers_is_the_same_on_all_ranks():
    class Shuffling(torch_data.IterableDataset):
        def __iter__(self):
            return iter(torch.randperm(9).tolist())

    shards = shard(torch_data.DataLoader(Shuffling(), batch_size=4, num_workers=1))
    first = samples([read(shards, rank, 2) for rank in range(2)])
    second = samples([read(shards.at(Position(1)), rank, 2) for rank in range(2)])
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second


def test_lists_are_seeded_from_their_first_key():
    seeded = SeededDataset(Lists(), seed=1)
    assert (
        seeded.__getitems__((0, [3, 4]))[0].tolist()
        == SeededDataset(Noisy(), 1).__getitems__((0, [3]))[0].tolist()
    )
    assert (
        seeded.__getitems__((0, [3, 4]))[1].tolist()
        != SeededDataset(Noisy(), 1).__getitems__((0, [4]))[0].tolist()
    )
    assert seeded.flavour == "noisy"


def test_keys_of_any_kind_have_a_seed():
    seeded = SeededDataset({"a": 1, (2, 3): 4}, seed=0)
    assert seeded.__getitems__((0, ["a", (2, 3)])) == [1, 4]


def test_two_readings_at_once_have_workers_of_their_own():
    loader = torch_data.DataLoader(list(range(12)), batch_size=3, num_workers=1, persistent_workers=True)
    shards = shard(loader)
    first = open_epoch(shards, rank=0, ranks=1, device=torch.device("cpu"))
    begun = next(first).data.tolist()
    inner = [b.data.tolist() for b in open_epoch(shards, rank=0, ranks=1, device=torch.device("cpu"))]
    rest = [b.data.tolist() for b in first]
    assert [begun, *rest] == inner == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def drawn(per_rank):
    fa.set_seed(5, per_rank=per_rank)
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("per_rank", [False, True])
def test_set_seed_on_all_ranks(pools, per_rank):
    first, second = pools.run(2, drawn, per_rank)
    assert pools.run(2, drawn, per_rank) == [first, second]
    assert all((a != b) is per_rank for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_seeds_that_are_none(seed):
    with pytest.raises(ArgumentError, match="a seed of"):
        fa.set_seed(seed)
