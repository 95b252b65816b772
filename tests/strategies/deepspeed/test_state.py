"""State under DeepSpeed: any ZeRO stage on any ranks restores any other strategy's, and goes on the same."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import fnaccel as fa
from fnaccel.checkpoint import restore, save
from fnaccel.errors import CapabilityError, StaleStateError
from tests.checkpoint.training import check_restores_any, gathered, make, train, unequal, written_by_all

ZERO = [(f"deepspeed_zero{stage}", ranks) for stage in (0, 1, 2, 3) for ranks in (1, 2)]
LAYOUTS = [("local", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3), *ZERO, ("deepspeed_zero3", 3)]


def plain(layout):
    return make(layout, transform=lambda step: step)


def write(layout, directory):
    step = plain(layout)
    state = train(step, step.init(seed=3), 0, 2)
    save(directory, state)
    return gathered(state), gathered(train(step, state, 2, 2))


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    return written_by_all(pools, write, LAYOUTS, tmp_path_factory.mktemp("zero"))


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_restores_any_other(pools, saved, layout):
    check_restores_any(pools, plain, layout, saved)


def back(layout):
    step = plain(layout)
    state = train(step, step.init(seed=3), 0, 1)
    kept = fa.snapshot(state)
    first = gathered(state)
    assert unequal(gathered(kept), first) == []
    state = train(step, state, 1, 1)
    second = gathered(state)
    assert unequal(second, first) != []
    state = step.adopt(kept)
    assert unequal(gathered(state), first) == []
    return unequal(gathered(train(step, state, 1, 1)), second)


PARTED = "deepspeed(stage=3, config={'zero_optimization': {'stage3_param_persistence_threshold': 0}})"  # else small parameters stay whole


@pytest.mark.long_except("zero3$|persistence")
@pytest.mark.parametrize("layout", ["deepspeed_zero0", "deepspeed_zero2", "deepspeed_zero3", PARTED])
def test_a_snapshot_goes_back(pools, layout):
    for rank, later in enumerate(pools.run(2, back, layout)):
        assert [path for path in later if rank == 0 or not path.startswith("buffers/")] == []


def leaves(layout):
    step = plain(layout)
    state = step.init(seed=0)
    weight = state.params["first.weight"]
    text = repr(weight)
    norm = float(weight.norm())
    whole = weight.full_tensor()
    with torch.no_grad():
        weight.copy_(torch.ones(5, 7))
        weight.mul_(3.0)
        weight[0] = 0.0
        torch.nn.init.ones_(state.params["first.bias"])
    sums = [float(state.params[name].full_tensor().sum()) for name in ("first.weight", "first.bias")]
    with pytest.raises(CapabilityError, match="can't be pickled"):
        pickle.dumps(weight)
    copied = copy.deepcopy(weight)
    step.close()
    with pytest.raises(StaleStateError, match="closed"):
        weight.norm()
    return text, norm, float(whole.norm()), [*sums, float(copied.full_tensor().sum())]


@pytest.mark.parametrize("layout", ["deepspeed_zero1", "deepspeed_zero3"])
def test_what_states_show(pools, layout):
    for text, norm, direct, sums in pools.run(2, leaves, layout):
        assert text == "Remote(params/first.weight, [5, 7], torch.float32)"
        assert norm == pytest.approx(direct)
        assert sums == [84.0, 5.0, 84.0]


def half(stage, directory):
    from tests.parity.rows import Net, loss_fn, rank_batch

    step = fa.train_step(
        fa.with_precision(loss_fn, "bf16"),
        model=fa.distribute(Net, fa.deepspeed(stage)),
        optimizer=fa.adamw(1e-2),
    )
    state = step.init(seed=3)
    plainly = fa.train_step(loss_fn, model=fa.distribute(Net, "ddp"), optimizer=fa.adamw(1e-2))
    exact = unequal(gathered(state.params), gathered(plainly.init(seed=3).params))
    for number in range(2):
        state, _ = step(state, rank_batch(number, step.mesh.world.rank))
    save(directory, state)
    kept = gathered(state)
    after, _ = step(state, rank_batch(2, step.mesh.world.rank))
    went = gathered(after)
    state = restore(directory, like=step.init(seed=4))
    again = unequal(gathered(state), kept)
    state, _ = step(state, rank_batch(2, step.mesh.world.rank))
    return exact, again, unequal(gathered(state), went)


@pytest.mark.long_except("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_half_precision_keeps_fp32_values(pools, stage, tmp_path):
    """What is shown and saved is what is updated: never the rounded copy."""
    assert pools.run(2, half, stage, tmp_path) == [([], [], [])] * 2


def averages(layout):
    step = make(layout)
    return gathered(train(step, step.init(seed=3), 0, 3).ema)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_averages_of_whole_parameters(pools, stage):
    """`with_ema` below stage 3, in fp32: the averages are those of ddp."""
    expected = pools.run(2, averages, "ddp")[0]
    for found in pools.run(2, averages, f"deepspeed_zero{stage}"):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])


def behind(layout, directory):
    step = plain(layout)
    state = train(step, step.init(seed=3), 0, 1)
    kept = gathered(state)
    saving = fa.save_async(directory, state)
    state = train(step, state, 1, 1)
    saving.wait()
    return unequal(gathered(restore(directory, like=state)), kept)


@pytest.mark.long_except("zero3")
@pytest.mark.parametrize("layout", ["deepspeed_zero2", "deepspeed_zero3"])
def test_a_save_in_the_background(pools, layout, tmp_path):
    for rank, later in enumerate(pools.run(2, behind, layout, tmp_path)):
        assert [path for path in later if rank == 0 or not path.startswith("buffers/")] == []
