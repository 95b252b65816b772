from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

from fnaccel.data import order, shard, steps_per_epoch
from fnaccel.errors import LoaderError
from fnaccel.state import Position

from .reading import counted, members, numbers, read, read_all, samples, values

REMAINDERS = st.sampled_from(order.REMAINDERS)


class Counting(torch_data.IterableDataset):
    def __init__(self, n):
        self.n = n
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.epoch * 100, self.epoch * 100 + self.n))


def stream(n, batch_size, **options):
    return torch_data.DataLoader(Counting(n), batch_size=batch_size, **options)


@pytest.mark.long
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 4), REMAINDERS, st.booleans())
def test_every_row_is_used_and_ranks_keep_step(n, batch_size, ranks, remainder, per_rank):
    shards = shard(stream(n, batch_size), remainder=remainder, per_rank=per_rank)
    step = batch_size * (ranks if per_rank else 1)
    if remainder == "drop" and n < step:
        with pytest.raises(LoaderError, match="leaves no batch"):
            read(shards, 0, ranks)
        return
    parts = read_all(shards, ranks)
    assert len({len(one) for one in parts}) == 1
    assert all(values(batch.data) for one in parts for batch in one)
    seen = Counter(samples(parts))
    if remainder == "keep":
        assert seen == Counter(range(n))
    elif remainder == "drop":
        assert samples(parts) == list(range(n // step * step))
    else:
        assert set(seen) == set(range(n))
        assert sum(seen.values()) == -(-n // step) * step
    assert parts[0][-1].position == Position(1, 0)
    for rank, whole in enumerate(parts):
        for done, batch in enumerate(whole[:-1], start=1):
            rest = read(shards.at(batch.position), rank, ranks)
            assert [(values(b.data), b.valid) for b in rest] == [
                (values(b.data), b.valid) for b in whole[done:]
            ]


def test_wrap_fills_from_the_beginning():
    parts = read_all(shard(stream(6, 4), remainder="wrap"), 2)
    assert [[counted(batch) for batch in one] for one in parts] == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    dealt = read_all(shard(stream(7, 2), remainder="wrap", per_rank=True), 3)
    assert [[counted(batch) for batch in one] for one in dealt] == [
        [[0, 1], [6, 0]],
        [[2, 3], [0, 1]],
        [[4, 5], [2, 3]],
    ]
    (only,) = read(shard(stream(3, 8), remainder="wrap"))
    assert counted(only) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_rows_are_those_of_a_full_batch():
    parts = read_all(shard(stream(5, 4)), 2)
    assert [[(batch.valid, batch.rows) for batch in one] for one in parts] == [
        [(2, 2), (1, 2)],
        [(2, 2), (0, 2)],
    ]


def test_thirty_rows_are_thirty():
    for ranks in (1, 2, 3, 4):
        assert len(samples(read_all(shard(stream(30, 8)), ranks))) == 30


def test_a_dataset_is_told_the_epoch():
    assert samples([read(shard(stream(3, 2)).at(Position(2)))]) == [200, 201, 202]


def test_persistent_workers_are_told_the_epoch():
    """They read epoch 0 for ever, and a resumed run read another epoch."""
    shards = shard(stream(3, 2, num_workers=1, persistent_workers=True))
    assert [samples([read(shards.at(Position(epoch)))])[0] for epoch in (0, 2)] == [0, 200]


def test_drop_last_of_a_stream_can_be_overridden():
    shards = shard(stream(5, 2, drop_last=True))
    assert samples([read(shards)]) == [0, 1, 2, 3]
    assert samples([read(shards, remainder="keep")]) == [0, 1, 2, 3, 4]


def test_lists_of_batches_of_any_size():
    batches = [torch.arange(3), torch.arange(3, 4), torch.arange(4, 9)]
    parts = read_all(shard(batches), 2)
    assert [[counted(batch) for batch in one] for one in parts] == [
        [[0, 1], [3], [4, 5, 6]],
        [[2], [], [7, 8]],
    ]
    assert values(parts[1][1].data) == [3]
    assert [batch.position for batch in parts[0]] == [Position(0, 3), Position(0, 4), Position(1, 0)]
    assert samples(read_all(shard(batches).at(Position(0, 2)), 2)) == [2, 3, 4, 5, 6, 7, 8]
    assert steps_per_epoch(shard(batches, window=2), 2) == 2
    assert steps_per_epoch(shard(batches, per_rank=True), 2) == 2


def test_generators_can_be_read_once():
    shards = shard(torch.full((2,), i) for i in range(3))
    assert samples(read_all(shards, 1)) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(LoaderError, match="a generator can be read once"):
        read(shards)
    assert steps_per_epoch(shards, 1) is None


def test_an_empty_stream_raises_at_first_use():
    shards = shard(stream(0, 2))
    with pytest.raises(LoaderError, match="holds nothing"):
        read(shards)


def test_a_position_past_the_end_raises():
    with pytest.raises(LoaderError, match="9 samples into an epoch of 6"):
        read(shard(stream(6, 2)).at(Position(0, 9)))


def test_batch_size_none_reads_items_as_batches():
    class Files(torch_data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return {"x": torch.full((2,), index), "name": f"file{index}"}

    for workers in (0, 1):
        loader = torch_data.DataLoader(Files(), batch_size=None, shuffle=True, num_workers=workers)
        shards = shard(loader, seed=1)
        parts = read_all(shards, 2)
        assert [batch.data["x"].item() for batch in parts[1]] == order.permutation(5, 1, 0)
        assert [batch.data["name"] for batch in parts[0]] == [f"file{i}" for i in order.permutation(5, 1, 0)]
        assert steps_per_epoch(shards, 2) == 5
    bulk = torch_data.BatchSampler(torch_data.SequentialSampler(range(5)), 2, drop_last=False)
    loader = torch_data.DataLoader(torch.arange(5), sampler=bulk, batch_size=None)
    assert [values(batch.data) for batch in read(shard(loader))] == [[0, 1], [2, 3], [4]]
    iterable = torch_data.DataLoader([torch.arange(3)], batch_size=None)
    assert samples(read_all(shard(iterable), 2)) == [0, 1, 2]


def test_lengths_of_streams():
    class Sized(Counting):
        def __len__(self):
            return self.n

    loader = torch_data.DataLoader(Sized(10), batch_size=4)
    assert steps_per_epoch(shard(loader), 2) == 3
    assert steps_per_epoch(shard(loader, remainder="drop"), 2) == 2
    assert steps_per_epoch(shard(loader, per_rank=True), 2) == 2
    assert steps_per_epoch(shard(stream(10, 4)), 2) is None


def test_windows_of_a_stream():
    windows = read_all(shard(stream(10, 4), window=2), 2)
    assert [[len(window) for window in one] for one in windows] == [[2, 1], [2, 1]]
    assert samples([members(one) for one in windows]) == list(range(10))


def test_loaders_with_an_iteration_of_their_own_are_streams():
    class Doubling(torch_data.DataLoader):
        def __iter__(self):
            return ([2 * column for column in batch] for batch in super().__iter__())

    assert samples([read(shard(Doubling(numbers(3), batch_size=2)))]) == [0, 2, 4]
    endless = shard(Doubling(Counting(3), batch_size=2, collate_fn=lambda rows: [torch.tensor(rows)]))
    assert samples([read(endless)]) == [0, 2, 4]
    assert steps_per_epoch(endless, 1) is None


def test_a_stream_that_drops_by_itself_cannot_keep():
    class Own(torch_data.DataLoader):
        pass

    shards = shard(Own(Counting(5), batch_size=2, drop_last=True))
    assert samples([read(shards)]) == [0, 1, 2, 3]
    with pytest.raises(LoaderError, match="make the loader with drop_last=False"):
        read(shards, remainder="keep")


def test_batches_that_cannot_be_cut_name_their_columns():
    with pytest.raises(LoaderError, match="x: 3, y: 2"):
        read(shard([{"x": torch.ones(3), "y": torch.ones(2)}]), 0, 2)
