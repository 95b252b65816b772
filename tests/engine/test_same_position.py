"""A loop by hand in which one rank skips a batch: no update mixes the rows of two batches without an error."""

from __future__ import annotations

import warnings

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import batch_of, loss_fn, program, whole_params

COMPILED = {"eager": lambda: loss_fn, "captured": lambda: fa.compile(loss_fn, scope="step", backend="eager")}
COMPILED["micro-batches"] = lambda: fa.compile(fa.accumulate(loss_fn, 2), scope="step", backend="eager")
COMPILED["weighted"] = lambda: fa.with_weight(loss_fn, lambda batch: len(batch[0]))
COMPILED["aux"] = lambda: with_aux


def with_aux(model, batch):
    mean = loss_fn(model, batch)
    return fa.Mean(mean.total, mean.weight, aux={"table": fa.Sum(torch.ones(2, 2)), "one": mean})


def loader(rows=96):
    return DataLoader(TensorDataset(*batch_of(rows)), batch_size=6)


def looped(strategy, how, skips, unwrapped=()):
    """The error of a loop in which ranks skip batches, the steps made, and whether all positions are equal.

    Args:
        skips: the batch that a rank skips, by rank.
        unwrapped: the ranks that take the data out of each batch.
    """
    rank = current().rank
    train_step = program(COMPILED[how](), strategy=strategy)
    state = train_step.init()
    error, before = None, None
    try:
        for index, batch in enumerate(fa.shard(loader())):
            if index == skips.get(rank):
                continue
            before = whole_params(state), state.step
            state, _ = train_step(state, batch.data if rank in unwrapped else batch)
    except errors.RankMismatchError as raised:
        error = str(raised)
    kept = (
        error is None
        or how in ("captured", "micro-batches")
        or all(torch.equal(whole, before[0][name]) for name, whole in whole_params(state).items())
    )
    train_step.close()
    return error, state.step, kept


@pytest.mark.long_except(r"2-ddp|2-fsdp-eager")
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (3, "ddp"), (2, "fsdp")])
def test_a_rank_that_skips_a_batch_raises_on_all(pools, ranks, strategy, how):
    # the captured step holds its update, so the error comes as the next one begins
    steps = 3 if how in ("captured", "micro-batches") else 2
    for error, step, kept in pools.run(ranks, looped, strategy, how, {1: 2}):
        assert "rank 0 is at epoch 0, sample 18; rank 1 is at epoch 0, sample 24" in error
        assert step == steps
        assert kept  # the state is live, and as it was before the step that raised


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_rank_that_is_at_the_mean_of_the_others_raises_too(pools, how):
    skips = {0: 5, 2: 2}  # before batch 5 the ranks are at 3, 3 and 4
    assert all(error for error, *_ in pools.run(3, looped, "ddp", how, skips))


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_rank_that_feeds_data_without_its_position_raises(pools, how):
    for error, *_ in pools.run(2, looped, "ddp", how, {}, (1,)):
        assert "rank 1 is at a batch without a position" in error


@pytest.mark.long_except(r"nothing")
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("unwrapped", [(), (0, 1)])
def test_ranks_that_agree_go_on(pools, how, unwrapped):
    for error, step, _ in pools.run(2, looped, "ddp", how, {0: 3, 1: 3}, unwrapped):
        assert error is None
        assert step == 15


def far_apart(rows):
    """Three ranks at positions whose mean is that of one of them."""
    train_step = program(strategy="ddp")
    state = train_step.init()
    position = fa.state.Position(current().rank, 1_048_573 * 5)
    batch = fa.data.Batch(data=batch_of(rows), valid=rows, rows=rows, position=position)
    try:
        train_step(state, batch)
    except errors.RankMismatchError as raised:
        return str(raised)
    return None


def test_squares_tell_ranks_apart_whose_mean_is_one_of_them(pools):
    for error in pools.run(3, far_apart, 4):
        assert "rank 1 is at epoch 1" in error


def collectives(wrapped):
    """All-reduces of a step on two ranks, with and without positions."""
    train_step = program(strategy="ddp")
    state = train_step.init()
    counted = []
    reduce, gather = dist.all_reduce, dist.all_gather_object
    for index, batch in enumerate(fa.shard(loader())):
        if index == 2:
            dist.all_reduce = lambda *args, **options: (counted.append("reduce"), reduce(*args, **options))[1]
            dist.all_gather_object = lambda *args, **options: (
                counted.append("gather"),
                gather(*args, **options),
            )[1]
        try:
            state, _ = train_step(state, batch if wrapped else batch.data)
        finally:
            if index == 2:
                dist.all_reduce, dist.all_gather_object = reduce, gather
    train_step.close()
    return counted


@pytest.mark.parametrize("wrapped", [True, False])
def test_it_takes_no_collective_of_its_own(pools, wrapped):
    assert pools.run(2, collectives, wrapped) == [["reduce"]] * 2


def saved(directory, feed):
    """The warnings of three saves in a loop by hand, and the position of the state."""
    train_step = program()
    state = train_step.init()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, batch in enumerate(fa.shard(loader())):
            state, _ = train_step(state, feed(batch))
            if index in (1, 2, 3):
                fa.save(directory, {"own": state} if index == 1 else state, step=state.step)
    return [str(warning.message) for warning in caught], state.data


FEEDS = {
    "data": (lambda batch: batch.data, 1),
    "rollout": (lambda batch: tuple(part * 1 for part in batch.data), 1),
    "batch": (lambda batch: batch, 0),
    "evolved": (lambda batch: attrs.evolve(batch, data=tuple(part * 1 for part in batch.data)), 0),
}


@pytest.mark.parametrize("feed", FEEDS)
def test_a_save_says_once_that_the_position_was_lost(tmp_path, feed):
    change, count = FEEDS[feed]
    with fa.start(device="cpu"):
        messages, position = saved(tmp_path, change)
    assert len(messages) == count
    assert (position == fa.state.Position()) == bool(count)
    assert all("after 2 steps the position in the data is still the beginning" in text for text in messages)


def test_a_save_of_own_data_says_nothing(tmp_path):
    with fa.start(device="cpu"):
        train_step = program()
        state, _ = train_step(train_step.init(), batch_of(4))
        fa.save(tmp_path, state)
