"""A state that `adopt` can't take leaves the live one as it was: every check comes before the first change."""

from __future__ import annotations

import attrs
import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.state import Position, Seed
from tests.tiny_models import batch_of, loss_fn, program, whole_params


def refused(train_step, state, changed, match, error=errors.TreeMismatchError):
    """Adopting `changed` raises, and `state` trains on from the values that it had."""
    before = whole_params(state)
    with pytest.raises(error, match=match):
        train_step.adopt(changed)
    assert train_step.live_state is state
    assert fa.tree.allclose(before, whole_params(state), rtol=0, atol=0)
    state, _ = train_step(state, batch_of(4))
    return state


def with_first(state, change):
    name, value = next(iter(state.params.items()))
    return attrs.evolve(state, params={**state.params, name: change(value)})


def on_ranks(strategy, what):
    train_step = program(strategy=strategy)
    state = train_step.init(seed=0)
    shards = hasattr(next(iter(state.params.values())), "placements")
    if what == "whole values":
        values = {name: value + 1 for name, value in whole_params(state).items()}
        state = train_step.adopt(attrs.evolve(state, params=values))
        assert fa.tree.allclose(values, whole_params(state), rtol=0, atol=0)
    elif shards:
        other = fa.snapshot(program(strategy="ddp").init(seed=1))
        state = train_step.adopt(other)
        assert fa.tree.allclose(whole_params(other), whole_params(state), rtol=0, atol=0)
    else:
        cut = fa.snapshot(program(strategy="fsdp").init(seed=0))
        refused(train_step, state, cut, "is cut over ranks, not whole")
    return True


@pytest.mark.parametrize("what", ["whole values", "another layout"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp(2, 1)"])
def test_values_laid_out_in_another_way(pools, strategy, what):
    strategy = fa.hsdp(2, 1) if strategy.startswith("hsdp") else strategy
    assert pools.run(2, on_ranks, strategy, what) == [True] * 2


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


COUNTS = {
    "step": lambda state: attrs.evolve(state, step=4.5),
    "a whole float": lambda state: attrs.evolve(state, step=4.0),
    "negative": lambda state: attrs.evolve(state, step=-1),
    "bool": lambda state: attrs.evolve(state, step=True),
    "updates": lambda state: attrs.evolve(state, updates=2.5),
    "samples": lambda state: attrs.evolve(state, data=Position(0, 1.5)),
    "epoch": lambda state: attrs.evolve(state, data=Position(None, 0)),
    "seed": lambda state: attrs.evolve(state, rng=Seed(0.5)),
    "no data": lambda state: attrs.evolve(state, data=None),
    "no seed": lambda state: attrs.evolve(state, rng=None),
    "a mean of states": lambda state: fa.tree.map(
        lambda a, b: (a + b) / 2, state, attrs.evolve(state, step=9)
    ),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("make", COUNTS.values(), ids=COUNTS)
def test_a_count_that_is_no_whole_number(make):
    train_step = program()
    state = train_step.init(seed=0)
    refused(train_step, state, make(state), "step|updates|data|rng", errors.ArgumentError)


@pytest.mark.usefixtures("world")
def test_values_without_values():
    train_step = program()
    state = train_step.init(seed=0)
    state = refused(train_step, state, with_first(state, lambda x: x.to("meta")), "inp.* is without values")
    refused(
        train_step, state, with_first(state, lambda x: x.detach().to_sparse()), "inp.* is torch.sparse_coo"
    )


@pytest.mark.usefixtures("world")
def test_states_of_transforms():
    def count(params, own, info):
        return {"calls": own["calls"] + 1}

    init = lambda params: {"calls": torch.zeros(())}  # noqa: E731
    step = fa.Transform("count", fa.Phase.UPDATE, apply=count, init=init)(loss_fn)
    train_step = program(step)
    state = train_step.init(seed=0)
    state = refused(
        train_step, state, attrs.evolve(state, transforms={}), "transforms/count/calls is missing"
    )
    longer = attrs.evolve(state, transforms={"count": {"calls": torch.zeros(3)}})
    state = refused(train_step, state, longer, r"transforms/count/calls is \[3\]")
    unknown = attrs.evolve(state, transforms={**state.transforms, "other": 1.0})
    state = refused(train_step, state, unknown, "transforms/other is unknown")
    kept = fa.snapshot(state)
    train_step(state, batch_of(4))
    state = train_step.adopt(kept)
    assert float(state.transforms["count"]["calls"]) == float(kept.transforms["count"]["calls"])
    assert state.transforms["count"]["calls"] is not kept.transforms["count"]["calls"]


@pytest.mark.usefixtures("world")
def test_a_number_of_numpy_is_a_count():
    numpy = pytest.importorskip("numpy")
    train_step = program()
    state = train_step.adopt(attrs.evolve(train_step.init(seed=0), step=numpy.int64(3)))
    assert type(state.step) is int
    assert state.step == 3
