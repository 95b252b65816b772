"""Data that ranks have split already: recognised, and read by each rank for itself with `presplit=True`."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

import fnaccel as fa
from fnaccel.errors import ArgumentError, LoaderError
from fnaccel.state import Position
from fnaccel.world.world import current

LENGTHS = (7, 4, 5)


class Numbers(IterableDataset):
    """A stream of one rank's own numbers."""

    def __init__(self, rank, lengths=LENGTHS):
        self.first, self.length = 100 * rank, lengths[rank]

    def __iter__(self):
        return (torch.tensor([float(self.first + at)]) for at in range(self.length))


class Rows(torch.utils.data.Dataset):
    """The same as a map-style data set."""

    def __init__(self, rank, lengths=LENGTHS):
        self.first, self.length = 100 * rank, lengths[rank]

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        return torch.tensor([float(self.first + at)])


KINDS = {"stream": Numbers, "map-style": Rows}


def own_shards(kind, remainder, **options):
    loader = DataLoader(KINDS[kind](current().rank), batch_size=2)
    return fa.shard(loader, presplit=True, remainder=remainder, **options)


def seen(batches):
    """(rows that count, where the data stands) of each batch."""
    return [
        (batch.data.view(-1)[: batch.valid].tolist(), (batch.position.epoch, batch.position.samples))
        for batch in batches
    ]


def read(kind, remainder):
    return seen(own_shards(kind, remainder))


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_reads_its_own_part_whole(pools, kind):
    ranks = pools.run(3, read, kind, "keep")
    for rank, batches in enumerate(ranks):
        assert [row for rows, _ in batches for row in rows] == [
            100.0 * rank + at for at in range(LENGTHS[rank])
        ]
    assert [len(batches) for batches in ranks] == [4, 4, 4]
    assert [place for _, place in ranks[0]] == [(0, 6), (0, 12), (0, 15), (1, 0)]
    assert ranks[1][2:] == [([], (0, 15)), ([], (1, 0))], "rows that stand in do not count"


@pytest.mark.parametrize("kind", KINDS)
def test_drop_ends_with_the_shortest_part(pools, kind):
    ranks = pools.run(3, read, kind, "drop")
    assert [[len(rows) for rows, _ in batches] for batches in ranks] == [[2, 2]] * 3
    assert ranks[2][-1] == ([202.0, 203.0], (1, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_wrap_begins_shorter_parts_again(pools, kind):
    ranks = pools.run(3, read, kind, "wrap")
    assert [[len(rows) for rows, _ in batches] for batches in ranks] == [[2, 2, 2, 2]] * 3
    assert [row for rows, _ in ranks[1] for row in rows] == [100, 101, 102, 103, 100, 101, 102, 103]
    assert [row for rows, _ in ranks[0] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 0]


def resume(kind, remainder):
    shards = own_shards(kind, remainder)
    whole = list(shards)
    parts = [list(shards.at(batch.position)) for batch in whole[:-1]]
    return [seen(whole[at + 1 :]) == seen(part) for at, part in enumerate(parts)]


@pytest.mark.parametrize("remainder", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_position_is_found_again(pools, kind, remainder):
    for goes_on in pools.run(3, resume, kind, remainder):
        assert goes_on
        assert all(goes_on)


def loss_fn(model, batch):
    return fa.Mean((model(batch) - 1).square().sum(), weight=len(batch))


def build():
    return fa.train_step(loss_fn, model=fa.distribute(lambda: nn.Linear(1, 1), "ddp"), optimizer=fa.sgd(1e-5))


def trained(folder, kind, stop):
    train_step = build()
    state = fa.resume_or_init(folder, train_step, seed=0)
    shards = own_shards(kind, "keep")
    weights = []
    for state, metrics in fa.scan(train_step, state, shards, steps=stop):
        weights.append(float(metrics["weight"]))
    fa.save(folder, state)
    return weights, [param.tolist() for param in state.params.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_scan_goes_on_from_a_checkpoint(pools, tmp_path, kind):
    whole = pools.run(3, trained, str(tmp_path / "whole"), kind, 6)
    first = pools.run(3, trained, str(tmp_path / "parts"), kind, 3)
    second = pools.run(3, trained, str(tmp_path / "parts"), kind, 6)
    assert whole[0][0] == [6, 6, 3, 1, 6, 6]
    assert first[0][0] + second[0][0] == whole[0][0]
    assert second[0][1] == whole[0][1]


def test_another_number_of_ranks_raises(pools, tmp_path):
    pools.run(3, trained, str(tmp_path), "stream", 2)
    with pytest.raises(LoaderError, match=r"it was saved on 3 ranks, and here are 2"):
        pools.run(2, trained, str(tmp_path), "stream", 4)


def misplaced():
    return list(own_shards("stream", "keep").at(Position(0, 99)))


def test_a_position_behind_the_end_raises(pools):
    with pytest.raises(LoaderError, match="the parts of 3 ranks have 16 samples"):
        pools.run(3, misplaced)


def with_an_empty_part(kind):
    lengths = (4, 0, 4)
    loader = DataLoader(KINDS[kind](current().rank, lengths), batch_size=2) if kind == "stream" else [
        torch.ones(2, 1)
    ] * (lengths[current().rank] // 2)  # fmt: skip
    try:
        list(fa.shard(loader, presplit=True))
    except LoaderError as error:
        return str(error)
    return None


def test_an_empty_part_raises_on_every_rank(pools):
    said = pools.run(3, with_an_empty_part, "stream")
    assert "the loader holds nothing" in said[1]
    assert "the part of rank 1 holds no batch" in said[0]
    assert "the part of rank 1 holds no batch" in said[2]


def rows_of_evaluation(kind):
    train_step = build()
    state = train_step.init()
    return fa.evaluate(train_step, state, lambda model, batch: fa.Concat(batch), own_shards(kind, "drop"))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_sees_every_row_once(pools, kind):
    gathered = pools.run(3, rows_of_evaluation, kind)
    expected = sorted(100.0 * rank + at for rank in range(3) for at in range(LENGTHS[rank]))
    assert all(sorted(rows.view(-1).tolist()) == expected for rows in gathered)


def distributed_sampler():
    data = TensorDataset(torch.arange(12.0)[:, None])
    world = current()
    sampler = DistributedSampler(data, world.size, world.rank, shuffle=True)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    shards = fa.shard(loader, presplit=True)
    return [
        [row for batch in shards.at(Position(epoch)) for row in batch.data[0].view(-1).tolist()]
        for epoch in (0, 1)
    ]


def test_a_distributed_sampler_splits_by_itself(pools):
    ranks = pools.run(2, distributed_sampler)
    for epoch in (0, 1):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(12))
    assert ranks[0][0] != ranks[0][1], "set_epoch was called"


def sampled_for(ranks):
    data = TensorDataset(torch.arange(12.0)[:, None])
    sampler = DistributedSampler(data, ranks, current().rank)
    shards = fa.shard(DataLoader(data, batch_size=2, sampler=sampler), presplit=True)
    with pytest.raises(
        LoaderError, match=f"gives part {current().rank} of {ranks} to rank {current().rank} of 2"
    ):
        next(iter(shards))


def test_a_part_for_another_number_of_ranks_raises(pools):
    pools.run(2, sampled_for, 4)


# data that is split, where nothing said so


@attrs.define
class Split:
    """The attributes by which a sampler of another library says that it splits."""

    num_replicas: int = 2
    rank: int = 0

    def __iter__(self):
        return iter([0])

    def __len__(self):
        return 1


def test_a_sampler_of_another_library_is_recognised():
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2, sampler=Split())
    with pytest.raises(LoaderError, match=r"has a Split[\s\S]*presplit=True"):
        fa.shard(loader)
    assert fa.shard(loader, presplit=True).presplit
    assert fa.shard(DataLoader(TensorDataset(torch.ones(4, 1)), sampler=Split(num_replicas=1)))


@pytest.mark.parametrize("option", ["dispatch", "per_rank"])
def test_options_that_exclude_each_other(option):
    with pytest.raises(ArgumentError, match="presplit=True"):
        fa.shard([1], presplit=True, **{option: True})


def test_shuffle_does_not_replace_a_sampler_that_splits():
    data = TensorDataset(torch.ones(4, 1))
    loader = DataLoader(data, sampler=DistributedSampler(data, 2, 0))
    with pytest.raises(LoaderError, match="would replace the sampler that splits"):
        fa.shard(loader, presplit=True, shuffle=True)


def test_the_description_says_so():
    assert "presplit=True" in repr(fa.shard([torch.ones(1)], presplit=True))


def hugging_face(style, presplit):
    """What two ranks read of 16 samples that `split_dataset_by_node` has split."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    world = current()
    data = Dataset.from_dict({"x": list(range(16))})
    data = data.to_iterable_dataset(num_shards=2) if style == "stream" else data
    part = split_dataset_by_node(data, rank=world.rank, world_size=world.size).with_format("torch")
    loader = DataLoader(part, batch_size=4)
    try:
        batches = list(fa.shard(loader, presplit=presplit))
    except LoaderError as error:
        return str(error)
    return [row for batch in batches for row in batch.data["x"][: batch.valid].tolist()]


@pytest.mark.parametrize("style", ["stream", "map-style"])
def test_what_split_dataset_by_node_has_split(pools, style):
    pytest.importorskip("datasets")
    for said in pools.run(2, hugging_face, style, False):
        assert "split already" in said or "is split between ranks already" in said
        assert "fa.shard(loader, presplit=True)" in said
    first, second = pools.run(2, hugging_face, style, True)
    assert sorted(first + second) == list(range(16))
    assert len(first) == len(second) == 8


def whole_hugging_face():
    from datasets import Dataset

    loader = DataLoader(Dataset.from_dict({"x": list(range(16))}).with_format("torch"), batch_size=4)
    return [row for batch in fa.shard(loader) for row in batch.data["x"].tolist()]


def test_whole_data_sets_are_read_as_before(pools):
    pytest.importorskip("datasets")
    first, second = pools.run(2, whole_hugging_face)
    assert sorted(first + second) == list(range(16))


def subsets(same):
    world = current()
    indices = range(8) if same else range(world.rank, 8, world.size)
    loader = DataLoader(Subset(TensorDataset(torch.arange(8.0)[:, None]), indices), batch_size=4)
    try:
        return [row for batch in fa.shard(loader) for row in batch.data[0].view(-1).tolist()]
    except LoaderError as error:
        return str(error)


def test_subsets_that_differ_between_ranks(pools):
    first, second = pools.run(2, subsets, True)
    assert sorted(first + second) == list(range(8))
    for said in pools.run(2, subsets, False):
        assert "the data differs between ranks (4 samples on rank 0, 4 samples on rank 1)" in said
