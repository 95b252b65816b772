from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.utils.data as torch_data

from fnaccel import tree
from fnaccel.data import Batch, Window, open_epoch, shard
from fnaccel.data.dispatch import pack, unpack
from fnaccel.errors import LoaderError
from fnaccel.state import Position
from fnaccel.world import world as worlds

from .reading import CPU, counted, numbers, samples

RANKS = (1, 2, 3)


class OnlyOnRankZero(torch_data.IterableDataset):
    """A queue, as it were: nothing but rank 0 may read it."""

    def __init__(self, n, fail_at=None):
        self.n = n
        self.fail_at = fail_at

    def __iter__(self):
        assert worlds.current().is_main
        for i in range(self.n):
            if i == self.fail_at:
                raise OSError("the disk is gone")
            yield {"x": torch.full((3,), float(i)), "id": i, "name": f"row{i}", "flag": i % 2 == 0}


def read_here(shards, **options):
    world = worlds.current()
    return list(open_epoch(shards, rank=world.rank, ranks=world.size, device=CPU, **options))


def dispatched_stream(n, batch_size, start=None):
    shards = shard(torch_data.DataLoader(OnlyOnRankZero(n), batch_size=batch_size), dispatch=True)
    rows = []
    for batch in read_here(shards.at(start or Position())):
        data = {name: column[: batch.valid] for name, column in batch.data.items()}
        assert batch.data["x"].dtype == torch.float32
        assert batch.data["flag"].dtype == torch.bool
        assert data["name"] == [f"row{i}" for i in data["id"].tolist()]
        assert data["x"][:, 0].long().tolist() == data["id"].tolist()
        rows.append((data["id"].tolist(), batch.rows, batch.position))
    return rows


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_gets_its_rows(pools, ranks):
    parts = pools.run(ranks, dispatched_stream, 10, 4)
    assert [[one[0] for one in step] for step in zip(*parts, strict=True)] == {
        1: [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]]],
        2: [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]],
        3: [[[0, 1], [2], [3]], [[4, 5], [6], [7]], [[8], [9], []]],
    }[ranks]
    assert [one[2] for one in parts[-1]] == [Position(0, 4), Position(0, 8), Position(1, 0)]
    rest = pools.run(ranks, dispatched_stream, 10, 4, Position(0, 4))
    assert rest == [one[1:] for one in parts]


def dispatched_numbers(n, shuffle, window):
    shards = shard(
        torch_data.DataLoader(numbers(n), batch_size=4, shuffle=shuffle), dispatch=True, window=window, seed=3
    )
    read = read_here(shards)
    assert all(isinstance(one, Window if window else Batch) for one in read)
    batches = [batch for one in read for batch in one] if window else read
    return [(counted(batch), batch.position) for batch in batches], [len(one) for one in read if window]


@pytest.mark.parametrize("ranks", RANKS)
def test_map_style_loaders_are_dispatched_too(pools, ranks):
    for n, window in ((99, None), (9, 2)):
        parts = pools.run(ranks, dispatched_numbers, n, True, window)
        seen = [row for rows, _ in parts for one, _ in rows for row in one]
        assert sorted(seen) == list(range(n))
        assert len({len(rows) for rows, _ in parts}) == 1
        assert all(sizes == ([2, 1] if window else []) for _, sizes in parts)


def failing(n, batch_size, fail_at):
    shards = shard(torch_data.DataLoader(OnlyOnRankZero(n, fail_at), batch_size=batch_size), dispatch=True)
    seen = 0
    try:
        for _ in open_epoch(shards, rank=dist.get_rank(), ranks=dist.get_world_size(), device=CPU):
            seen += 1
    except OSError as error:
        return seen, str(error)
    return seen, None


@pytest.mark.parametrize("fail_at", [0, 9])
def test_an_error_on_rank_0_is_raised_everywhere(pools, fail_at):
    answers = pools.run(3, failing, 12, 3, fail_at)
    assert len({seen for seen, _ in answers}) == 1
    assert all("the disk is gone" in (text or "") for _, text in answers)


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError


def unpicklable():
    def broken():
        yield torch.ones(2)
        raise UnpicklableError("secret")

    try:
        read_here(shard(broken(), dispatch=True))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_errors_that_cannot_travel_become_words(pools):
    first, second = pools.run(2, unpicklable)
    assert first == ("UnpicklableError", "secret")
    assert second[0] == "LoaderError"
    assert "rank 0 failed to read: UnpicklableError: secret" in second[1]


def uncuttable():
    with pytest.raises(LoaderError, match="x: 3, y: 2"):
        read_here(shard([{"x": torch.ones(3), "y": torch.ones(2)}], dispatch=True))
    return True


def test_batches_that_cannot_be_cut_raise_everywhere(pools):
    assert pools.run(2, uncuttable) == [True, True]


def disagreeing_sampler():
    class OfTheRank(torch_data.Sampler):
        def __iter__(self):
            return iter([(one + 5 * dist.get_rank()) % 9 for one in range(9)])

    shards = shard(torch_data.DataLoader(numbers(9), batch_size=4, sampler=OfTheRank()))
    return [list(one) for one in ([counted(batch) for batch in read_here(shards)])]


def test_ranks_agree_on_the_sampler_of_rank_0(pools):
    parts = pools.run(2, disagreeing_sampler)
    assert [row for step in zip(*parts, strict=True) for part in step for row in part] == list(range(9))


def failing_sampler():
    class Broken(torch_data.Sampler):
        def __iter__(self):
            if dist.get_rank() == 0:
                raise OSError("no index file")
            return iter(range(4))

    try:
        read_here(shard(torch_data.DataLoader(numbers(4), batch_size=2, sampler=Broken())))
    except OSError as error:
        return str(error)
    return None


def test_an_error_in_a_sampler_is_raised_everywhere(pools):
    assert pools.run(2, failing_sampler) == ["no index file", "no index file"]


def hand_loop():
    return [counted(batch) for batch in shard(torch_data.DataLoader(numbers(5), batch_size=4))]


def test_a_hand_loop_reads_its_part_of_the_world(pools):
    assert pools.run(2, hand_loop) == [[[0, 1], [4]], [[2, 3], []]]


def test_parcels_come_back_equal():
    data = {
        "flags": torch.tensor([True, False, True]),
        "strided": torch.arange(6).reshape(2, 3).T,
        "half": torch.ones(1, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "scalar": torch.tensor(3),
        "empty": torch.ones(0, 2),
        "words": ["a", ("b", None)],
    }
    batch = Batch(data=data, valid=3, rows=3, position=Position(1, 2))
    back = unpack(pack(batch))
    assert tree.allclose(back.data, data)
    assert [x.dtype for x in tree.leaves(back.data) if isinstance(x, torch.Tensor)] == [
        x.dtype for x in tree.leaves(data) if isinstance(x, torch.Tensor)
    ]
    assert (back.valid, back.position) == (3, Position(1, 2))


def test_one_rank_needs_no_messages():
    shards = shard(torch_data.DataLoader(numbers(5), batch_size=4), dispatch=True)
    assert samples([list(open_epoch(shards, rank=0, ranks=1, device=CPU))]) == list(range(5))
