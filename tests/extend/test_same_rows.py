"""Ranks along an axis that splits no rows must read the same ones: the first batch of each epoch shows it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.engine.same_rows import checksum, sum_on_device
from fnaccel.errors import RankMismatchError
from fnaccel.testing import count_collectives
from fnaccel.world.world import current
from tests.tiny_models import batch_of, program


def made(strategy="extending_page:copies(2)"):
    train_step = program(strategy=strategy)
    return train_step, train_step.init(seed=0)


def by_hand():
    """Batches without a position: the first call compares them, and later calls do not."""
    train_step, state = made()
    rank = current().rank
    with pytest.raises(RankMismatchError) as raised:
        train_step(state, batch_of(4, seed=rank))
    state, _ = train_step(state, batch_of(4))  # step 0 also compares the cut model with the whole one
    state = train_step.adopt(fa.snapshot(state))
    counts = []
    for _ in range(2):
        with count_collectives() as counter:
            state, _ = train_step(state, batch_of(4))
        counts.append(counter.result.total)
    kept = fa.snapshot(state)
    state = train_step.adopt(kept)
    with pytest.raises(RankMismatchError, match="the first batch of epoch 0"):
        train_step(state, batch_of(4, seed=rank))
    state, _ = train_step(state, batch_of(4))
    return str(raised.value), state.step, counts


def test_a_loop_by_hand_that_gives_copies_other_rows_raises(pools):
    for text, step, counts in pools.run(2, by_hand):
        assert text.startswith("ranks that share part 0 of each batch got different rows: rank 0 got")
        assert "; rank 1 got float32[4, 3], float32[4, 1], checksum " in text
        assert "fa.shard(loader).on(train_step.mesh)" in text
        assert step == 4
        assert counts == [1, 0]  # one exchange in the epoch, and copies average nothing


def one_of_four(kind):
    """Only rank 3 differs from its copy, rank 2."""
    train_step, state = made("ddp(2) * extending_page:copies(2)")
    x, y = batch_of(4, seed=train_step.mesh.batch_rank)
    if current().rank == 3:
        x, y = {
            "values": lambda: (x + 1e-7, y),
            "order": lambda: (x.flip(0), y.flip(0)),
            "rows": lambda: (x[:3], y[:3]),
            "dtype": lambda: (x, y.double()),
        }[kind]()
    try:
        train_step(state, (x, y))
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["values", "order", "rows", "dtype"])
def test_every_rank_raises_if_one_differs(pools, kind):
    said = pools.run(4, one_of_four, kind)
    assert len(set(said)) == 1
    assert "part 1 of each batch got different rows: rank 2 got" in said[0]
    assert "; rank 3 got" in said[0]


class Drifting(TensorDataset):
    """Rows that differ on rank 1 from the second epoch on."""

    passes = 0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x + current().rank if self.passes > 8 else x), y

    def __getitems__(self, indices):
        self.passes += len(indices)
        return [self[index] for index in indices]


def scanned(strategy, window):
    train_step, state = made(strategy)
    shards = fa.shard(DataLoader(Drifting(*batch_of(8)), batch_size=4), window=window, prefetch=0)
    steps = []
    try:
        for state, _ in fa.scan(train_step, state, shards, epochs=2):
            steps.append(state.step)
    except RankMismatchError as error:
        return steps, str(error), train_step.live_state.step
    return steps, "", state.step


@pytest.mark.parametrize(("window", "steps"), [(None, [1, 2]), (2, [1])])
def test_each_epoch_is_compared_again(pools, window, steps):
    for taken, text, live in pools.run(2, scanned, "extending_page:copies(2)", window):
        assert taken == steps
        assert "the first batch of epoch 1" in text
        assert live == steps[-1]


def test_ranks_with_rows_of_their_own_compare_nothing(pools):
    for steps, text, _ in pools.run(2, scanned, "ddp(2)", None):
        assert (steps, text) == ([1, 2, 3, 4], "")


def restored(directory):
    train_step, state = made()
    state, _ = train_step(state, batch_of(4))
    fa.save(directory, state)
    state = fa.restore(directory, like=state)
    with pytest.raises(RankMismatchError):
        train_step(state, batch_of(4, seed=current().rank))
    return train_step(state, batch_of(4))[0].step


def test_the_first_call_after_a_restore_is_compared(pools, tmp_path):
    assert pools.run(2, restored, tmp_path) == [2, 2]


def test_the_checksum_covers_paths_shapes_dtypes_and_bytes():
    x = torch.arange(6.0).view(2, 3)
    base = {"x": x, "name": "a", "n": 1, "other": object()}
    others = [
        {**base, "x": x + 1e-6}, {**base, "x": x.flip(0)}, {**base, "x": x.view(3, 2)}, {**base, "name": "b"},
        {**base, "x": x.view(torch.int32)}, {**base, "n": 2}, {"y": x, "name": "a", "n": 1, "other": object()},
    ]  # fmt: skip
    assert checksum(base) == checksum({**base, "x": x.clone(), "other": object()})
    assert checksum(base) == checksum({**base, "x": x.t().contiguous().t()})
    assert len({checksum(tree) for tree in [base, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
)
def test_sums_on_a_device_see_values_and_their_order(dtype):
    x = torch.tensor([0, 1, 1, 0, 0, 1]).to(dtype)
    changed = x.clone()
    changed[0] = 1
    assert len({int(sum_on_device(each)) for each in (x, x.flip(0), changed)}) == 3
    assert int(sum_on_device(x)) == int(sum_on_device(x.clone()))
    assert int(sum_on_device(x[:0])) == 0
