"""Streams of Hugging Face datasets: an epoch that is taken up again has the order that it began with."""

from __future__ import annotations

import pytest
import torch.utils.data as torch_data

from fnaccel.data import shard
from fnaccel.state import Position

from .reading import counted, read_all

datasets = pytest.importorskip("datasets")


def rows(shards):
    for at in shards:
        yield from ({"x": 6 * at + row} for row in range(6))


def generated(shards):
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(shards))})


def plain(shards):
    table = datasets.Dataset.from_dict({"x": list(range(6 * shards))})
    return table.to_iterable_dataset(num_shards=shards)


def shuffled(stream):
    return stream.shuffle(seed=3, buffer_size=5)


def doubled(stream):
    return stream.map(lambda row: {"x": row["x"] + 1})


STREAMS = {
    "shuffled": lambda make, shards: shuffled(make(shards)),
    "in order": lambda make, shards: make(shards),  # epochs have other orders of the shards
    "map before": lambda make, shards: shuffled(doubled(make(shards))),
    "map after": lambda make, shards: doubled(shuffled(make(shards))),
    "filtered": lambda make, shards: shuffled(make(shards)).filter(lambda row: row["x"] % 5 != 2),
}


@pytest.mark.long_except("plain-1|generated-4")
@pytest.mark.parametrize("options", [{}, {"per_rank": True}, {"dispatch": True}], ids=str)
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("make", [plain, generated])
@pytest.mark.parametrize("kind", STREAMS)
def test_an_epoch_goes_on_in_its_order(kind, make, shards, options):
    def source():
        stream = STREAMS[kind](make, shards)
        return shard(torch_data.DataLoader(stream, batch_size=2, collate_fn=collated), **options)

    for ranks in (1,) if "dispatch" in options else (1, 2):
        for epoch in (0, 2):
            whole = read_all(source().at(Position(epoch)), ranks)
            done = min(2, len(whole[0]) - 1)
            rest = read_all(source().at(whole[0][done - 1].position), ranks)
            left = [one[done:] for one in whole] if done else whole
            assert [list(map(counted, one)) for one in rest] == [list(map(counted, one)) for one in left]


def collated(rows):
    return torch_data.default_collate([row["x"] for row in rows])
