"""A tree that was read from a state: its values are those of the state, or reading it raises."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections import ChainMap, OrderedDict

import attrs
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import fnaccel as fa
from fnaccel import errors
from fnaccel.loop.scanning import _next_epoch
from fnaccel.state import Position
from tests.tiny_models import batch_of, program


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def taken(**held):
    return held


READS = {
    "item": lambda tree: tree["inp.weight"],
    "get": lambda tree: tree.get("inp.weight"),
    "dict": dict,
    "unpacked": lambda tree: {**tree},
    "keywords": lambda tree: taken(**tree),
    "items": lambda tree: tree.items(),
    "values": lambda tree: list(tree.values()),
    "keys": lambda tree: tree.keys(),
    "loop": list,
    "reversed": lambda tree: list(reversed(tree)),
    "length": len,
    "member": lambda tree: "inp.weight" in tree,
    "equal": lambda tree: tree == {},
    "union": lambda tree: tree | {},
    "union from the right": lambda tree: {} | tree,
    "updated": lambda tree: {}.update(tree),
    "copy": copy.copy,
    "own copy": lambda tree: tree.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda tree: torch.save(tree, io.BytesIO()),
    "json": json.dumps,
    "fa.tree.leaves": fa.tree.leaves,
    "fa.tree.map": lambda tree: fa.tree.map(torch.clone, [tree]),
    "fa.tree.items": lambda tree: list(fa.tree.items(tree)),
    "torch pytree": torch_pytree.tree_leaves,
    "sorted": sorted,
    "OrderedDict": OrderedDict,
    "ChainMap": lambda tree: dict(ChainMap(tree)),
}


def start(step=None, **options):
    train_step = program(fa.with_ema(step or loss, 0.9), **options)
    return train_step, train_step.init(seed=0)


def loss(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_tree_of_a_donated_state_raises(read):
    train_step, state = start()
    held = state.params
    if read is not READS["json"]:  # which takes no tensors
        read(held)
    state, _ = train_step(state, batch_of(4))
    with pytest.raises(errors.StaleStateError, match="donated"):
        read(held)
    assert "donated" in repr(held)
    assert isinstance(held, dict)


def test_a_view_of_a_dict_shows_no_new_values():
    train_step, state = start()
    view = state.params.items()
    train_step(state, batch_of(4))
    assert list(view) == [("donated", None)]


def test_every_tree_and_nested_ones_raise():
    train_step, state = start(fa.with_precision(loss, "fp16"), optimizer=fa.adam(0.1))
    held = [state.params, state.buffers, state.opt, state.scale, state.ema]
    state, _ = train_step(state, batch_of(4))
    nested = next(iter(state.opt.values()))
    assert list(nested)
    train_step(state, batch_of(4))
    for tree in [*held, nested]:
        with pytest.raises(errors.StaleStateError):
            list(tree)


def test_an_average_over_held_parameters_is_an_error_not_the_last_value():
    train_step, state = start()
    kept = []
    for index in range(3):
        state, _ = train_step(state, batch_of(4, seed=index))
        kept.append(state.params)
    with pytest.raises(errors.StaleStateError, match="clone"):
        fa.tree.map(lambda *values: sum(values) / 3, *kept)


@pytest.mark.parametrize("how", ["adopt", "restore", "close", "init", "next epoch"])
def test_whatever_donates_a_state_takes_its_trees(how, tmp_path):
    train_step, state = start()
    held = state.params
    assert state.params is held  # made once
    if how == "adopt":
        train_step.adopt(fa.snapshot(state))
    elif how == "restore":
        fa.save(tmp_path, state)
        new = fa.restore(tmp_path, like=state)
        assert len(new.params) > 0
        assert new.params is not held
    elif how == "close":
        train_step.close()
    elif how == "init":
        train_step.init(seed=1)
    else:
        state = train_step.adopt(attrs.evolve(state, data=Position(0, 4)))
        held = state.params
        assert len(_next_epoch(state).params) > 0
    with pytest.raises(errors.StaleStateError):
        held["inp.weight"]


def test_a_step_that_fails_before_it_changes_anything_leaves_trees_alone():
    def fails(model, batch):
        raise ValueError("no")

    train_step, state = start(fails)
    held = state.params
    with pytest.raises(ValueError, match="no"):
        train_step(state, batch_of(4))
    assert held["inp.weight"] is state.params["inp.weight"]


def test_extras_and_transforms_are_values_and_stay():
    counted = fa.Transform(
        "count", fa.Phase.UPDATE, apply=lambda params, own, info: own + 1, init=lambda params: torch.zeros(())
    )
    step = counted(loss)
    train_step = program(step)
    state = train_step.init(seed=0, extras={"best": torch.ones(2)})
    extras, transforms = state.extras, state.transforms
    train_step(state, batch_of(4))
    assert float(extras["best"].sum()) == 2.0
    assert float(transforms["count"]) == 0.0


def test_a_tree_of_a_dead_state_inside_extras_is_named_at_the_save(tmp_path):
    train_step = program(loss)
    state = train_step.init(seed=0, extras={"runs": [{}]})
    state.extras["runs"][0]["best"] = state.params
    fa.save(tmp_path / "live", state)  # alive, it is values
    state, _ = train_step(state, batch_of(4))
    with pytest.raises(errors.StaleStateError, match="extras/runs/0/best"):
        fa.save(tmp_path / "dead", state)


def test_a_state_made_from_the_live_one_is_adopted_with_its_trees():
    train_step, state = start()
    before = fa.snapshot(state)
    changed = attrs.evolve(state, step=7)
    state = train_step.adopt(changed)
    assert state.step == 7
    assert fa.tree.allclose(state.params, before.params, rtol=0, atol=0)
    late = attrs.evolve(state, step=9)
    state, _ = train_step(state, batch_of(4))
    with pytest.raises(errors.StaleStateError):
        train_step.adopt(late)
    state, _ = train_step(state, batch_of(4))  # the live one is unharmed


def test_a_copy_keeps_its_values():
    train_step, state = start()
    kept = {name: value.clone() for name, value in state.params.items()}
    copied = fa.snapshot(state).params
    train_step(state, batch_of(4))
    assert fa.tree.allclose(copied, kept, rtol=0, atol=0)


def test_torch_func_takes_the_parameters_of_a_state():
    _, state = start()
    norm = torch.func.grad(lambda params: sum(value.square().sum() for value in params.values()))
    grads = norm(state.params)
    assert torch.equal(grads["inp.weight"], 2 * state.params["inp.weight"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_held_trees_on_ranks(pools, strategy):
    assert pools.run(2, _held, strategy) == [True] * 2


def _held(strategy):
    train_step = program(fa.with_ema(loss, 0.9), strategy=strategy)
    state = train_step.init(seed=0)
    held = [state.params, state.opt, state.ema]
    state, _ = train_step(state, batch_of(4))
    for tree in held:
        with pytest.raises(errors.StaleStateError):
            list(tree)
    return True
