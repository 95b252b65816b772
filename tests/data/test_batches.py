"""Batch classes of the user's, rows of different lengths, batches that stay where they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fnaccel as fa
from fnaccel import errors
from tests.data.reading import numbers, read
from tests.tiny_models import program


class Sentences:
    """A batch that is no pytree and no sequence."""

    def __init__(self, words):
        self.words = words


fa.data.register_batch(
    Sentences,
    rows=lambda batch: len(batch.words),
    cut=lambda batch, start, stop: Sentences(batch.words[start:stop]),
)


def ragged(n=5):
    """Tensors of 1, 2, ... elements, whose sum is known."""
    return [torch.arange(1.0, length + 2) for length in range(n)]


def as_rows(samples):
    return fa.data.Rows(samples)


def as_sentences(samples):
    return Sentences(samples)


def as_record(samples):
    return {"texts": fa.data.Rows(samples), "labels": torch.zeros(len(samples), 1), "scale": 2.0}


def total(model, batch):
    words = (
        batch.words if isinstance(batch, Sentences) else batch["texts"] if isinstance(batch, dict) else batch
    )
    x = torch.stack([word.sum() * torch.ones(3) for word in words])
    return fa.Mean(model(x).square().sum(), weight=len(words))


def losses(collate, n=1, **options):
    loader = DataLoader(ragged(), batch_size=4, collate_fn=collate)
    step = fa.accumulate(total, n) if n > 1 else total
    train_step = program(step, strategy="ddp")
    state, found = train_step.init(seed=0), []
    for state, metrics in fa.scan(train_step, state, fa.shard(loader, **options), epochs=2):
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("collate", [as_rows, as_sentences, as_record])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"dispatch": True}], ids=["read", "dispatched"])
def test_rows_of_any_kind_are_cut_between_ranks(pools, collate, ranks, options):
    """A batch of 4 rows, then of 1, on any number of ranks, cut in two micro-batches as well."""
    expected = pools.run(1, losses, as_rows)[0]
    for found in pools.run(ranks, losses, collate, **options):
        assert found == pytest.approx(expected, rel=1e-5)
    if ranks == 2:
        for found in pools.run(ranks, losses, collate, 2, **options):
            assert found == pytest.approx(expected, rel=1e-5)


def test_tensors_of_rows_move_with_the_batch():
    rows = fa.data.Rows([torch.ones(2), torch.ones(3)])
    moved = fa.tree.to({"x": rows}, "meta")
    assert type(moved["x"]) is fa.data.Rows
    assert [one.device.type for one in moved["x"]] == ["meta", "meta"]
    assert fa.data.rows_of({"x": rows, "y": torch.ones(2)}) == 2


def test_rows_are_joined_and_others_say_how():
    joined = fa.data.join([fa.data.Rows([1]), fa.data.Rows([2, 3])])
    assert joined == fa.data.Rows([1, 2, 3])
    with pytest.raises(errors.LoaderError, match="nothing says how"):
        fa.data.join([Sentences([1]), Sentences([2])])


@dataclasses.dataclass
class Plain:
    x: torch.Tensor


@pytest.mark.parametrize("given", [{"kind": 3, "cut": len}, {"kind": Plain, "cut": 3}])
def test_what_register_batch_refuses(given):
    with pytest.raises(errors.ArgumentError):
        fa.data.register_batch(**given)


def nothing_for_five(samples):
    return None if any(len(sample) == 6 for sample in samples) else as_record(samples)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_none_of_a_collate_function_raises_by_name(pools, workers):
    with pytest.raises(errors.LoaderError, match=r"returned None for the samples 4, 5") as caught:
        pools.run(2, train_on, nothing_for_five, workers)
    assert "leave them out of the data set" in str(caught.value)


def train_on(collate, workers):
    loader = DataLoader(ragged(8), batch_size=4, collate_fn=collate, num_workers=workers)
    train_step = program(total, strategy="ddp")
    list(fa.scan(train_step, train_step.init(), fa.shard(loader, shuffle=False), steps=4))


@pytest.mark.parametrize("place", [True, False])
def test_batches_stay_where_the_loader_made_them(place):
    loader = DataLoader(numbers(4), batch_size=2)
    shards = fa.shard(loader, device_placement=place)
    found = list(fa.data.open_epoch(shards, rank=0, ranks=1, device=torch.device("meta")))
    assert {batch.data[0].device.type for batch in found} == {"meta" if place else "cpu"}


def test_a_loader_with_a_place_of_its_own_is_refused():
    loader = StatefulDataLoader(numbers(8), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    saved = loader.state_dict()
    fresh = StatefulDataLoader(numbers(8), batch_size=2)
    assert len(read(fa.shard(fresh))) == 4
    fresh.load_state_dict(saved)
    with pytest.raises(errors.LoaderError, match="load_state_dict gave it"):
        fa.shard(fresh)


def test_a_stream_of_datasets_with_a_place_is_refused():
    import datasets

    stream = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset()
    assert len(list(fa.shard(DataLoader(stream, batch_size=2)).loader)) == 4
    iterator = iter(stream)
    next(iterator)
    saved = stream.state_dict()
    stream.load_state_dict(saved)
    with pytest.raises(errors.LoaderError, match="load_state_dict gave it"):
        fa.shard(DataLoader(stream, batch_size=2))
