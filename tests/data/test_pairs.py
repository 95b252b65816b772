"""Collate functions that make two rows of a sample, as TRL's do of a chosen and a rejected answer."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.utils.data as torch_data
from torch import nn

import fnaccel as fa
from fnaccel.testing import assert_close

from .reading import read_all

RATE, STEPS, SAMPLES = 0.3, 3, 8


def samples():
    generator = torch.Generator().manual_seed(0)
    return torch_data.TensorDataset(*torch.randn(2, STEPS * SAMPLES, 3, generator=generator))


def pairs(rows):
    chosen, rejected = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"x": torch.cat([chosen, rejected]), "name": ["chosen"] * len(rows) + ["rejected"] * len(rows)}


def margin(model, batch):
    chosen, rejected = model(batch["x"]).chunk(2)
    assert batch["name"] == ["chosen"] * len(chosen) + ["rejected"] * len(rejected)
    return -nn.functional.logsigmoid(chosen - rejected).sum(), len(chosen)


def loss_fn(model, batch):
    total, weight = margin(model, batch)
    return fa.Mean(total, weight=weight)


class Pairs(torch_data.IterableDataset):
    def __iter__(self):
        return iter(samples())


def loader(kind):
    return torch_data.DataLoader(
        samples() if kind == "map" else Pairs(), batch_size=SAMPLES, collate_fn=pairs
    )


def trained(strategy, kind, count, options):
    train_step = fa.train_step(
        fa.accumulate(loss_fn, count),
        model=fa.distribute(lambda: nn.Linear(3, 1), strategy),
        optimizer=fa.sgd(RATE),
    )
    state = train_step.init(seed=0)
    shards = fa.shard(loader(kind), rows_per_sample=2, **options)
    for batch in shards:
        state, _ = train_step(state, batch)
    assert state.step == STEPS
    return {name: fa.tree.whole(value).detach().clone() for name, value in state.params.items()}


@pytest.mark.parametrize("options", [{}, {"dispatch": True}], ids=str)
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
@pytest.mark.parametrize("count", [1, 2])
def test_equals_the_raw_loop(pools, strategy, kind, count, options):
    ranks = 1 if strategy == "local" else 2
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in loader("map"):
        optimizer.zero_grad()
        total, weight = margin(model, batch)
        (total / weight).backward()
        optimizer.step()
    for params in pools.run(ranks, trained, strategy, kind, count, options):
        assert_close(params, dict(model.named_parameters()))


def stepped(shards, count=2):
    with fa.start(device="cpu"):
        train_step = fa.train_step(
            fa.accumulate(
                lambda model, batch: fa.Mean(model(batch["x"]).sum(), weight=len(batch["x"])), count
            ),
            model=fa.distribute(lambda: nn.Linear(3, 1), "local"),
            optimizer=fa.sgd(RATE),
        )
        state = train_step.init(seed=0)
        for batch in shards:
            state, _ = train_step(state, batch)
        return str(train_step.plan)


def test_rows_that_are_cut_one_by_one_warn_once_and_stand_in_the_plan():
    with pytest.warns(UserWarning, match=r"8 samples made 16 rows.*rows_per_sample=2") as caught:
        plan = stepped(fa.shard(loader("map")))
    assert len(caught) == 1
    assert plan.count("8 samples made 16 rows") == 1
    with pytest.warns(UserWarning, match="8 samples made 16 rows"):
        read_all(fa.shard(loader("stream")), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(fa.shard(loader("map"), rows_per_sample=2))
        stepped(fa.shard(loader("map")), count=1)


def test_numbers_that_do_not_divide_raise():
    for wrong, text in ((3, "16 rows has not 3"), (4, "16 rows of 8 samples has not 4")):
        with pytest.raises(fa.errors.LoaderError, match=rf"{text} rows for each sample(?s:.*)fa\.data\.Rows"):
            stepped(fa.shard(loader("map"), rows_per_sample=wrong))
    for options in ({"rows_per_sample": 0}, {"rows_per_sample": 2, "remainder": "wrap"}):
        with pytest.raises(fa.errors.ArgumentError, match="rows_per_sample="):
            fa.shard(loader("map"), **options)
