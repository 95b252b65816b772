"""Checkpoints of replicas that train apart: each one's slots, other numbers of replicas, other strategies."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from tests.strategies.replicas.raw import loss_fn, rows
from tests.tiny_models import program, whole, whole_params


def made(strategy, step=loss_fn):
    return program(step, strategy=strategy, optimizer=fa.adamw(0.02, weight_decay=0.1))


def stepped(train_step, state, steps):
    inner = train_step.mesh.gradient_size
    while state.step < steps:
        batch = rows("ragged", state.step, train_step.mesh.batch_rank, inner)
        state, _ = train_step(state, batch)
    return state


def slots_of(state):
    return {path: whole(value) for path, value in fa.tree.items(state.opt)}


def run(strategy, steps, save=None, resume=None, at=None):
    """Parameters and slots after some steps, of a run that may be saved at one, or resumed."""
    train_step = made(strategy)
    state = train_step.init(seed=0)
    if resume is not None:
        state = fa.restore(resume, like=state)
    first = whole_params(state), slots_of(state)
    if at is not None:
        state = stepped(train_step, state, at)
        fa.save(save, state)
    state = stepped(train_step, state, steps)
    found = whole_params(state), slots_of(state), fa.tree.map_tensors(whole, dict(state.transforms))
    train_step.close()
    return found, first


def equal(first, second):
    return fa.tree.allclose(first, second, rtol=0, atol=0)


PRODUCTS = [
    ("local_sgd(2, every=3)", 2),
    ("local_sgd(2, every=3) * fsdp(2)", 4),
    ("diloco(2, every=3)", 2),
    ("diloco(2, every=3) * fsdp(2)", 4),
    ("local_sgd(2, every=3, slots='average')", 2),
]


@pytest.mark.parametrize(("strategy", "ranks"), PRODUCTS)
def test_on_as_many_replicas_a_run_goes_on_to_the_bit(pools, tmp_path, strategy, ranks):
    straight = pools.run(ranks, run, strategy, 10, tmp_path, None, 6)
    resumed = pools.run(ranks, run, strategy, 10, None, tmp_path)
    for (found, _), (again, _) in zip(straight, resumed, strict=True):
        assert all(equal(one, other) for one, other in zip(found, again, strict=True))
    if "average" not in strategy:
        assert not equal(resumed[0][1][1], resumed[-1][1][1])  # slots differ between replicas


def resumed(strategy, folder):
    train_step = made(strategy)
    state = fa.restore(folder, like=train_step.init(seed=3))
    found = whole_params(state), slots_of(state), fa.tree.map_tensors(whole, dict(state.transforms))
    state = stepped(train_step, state, state.step + 1)  # and it trains
    train_step.close()
    return found


OTHERS = [
    ("local_sgd(4, every=2)", 4),
    ("diloco(2, every=3) * fsdp(2)", 4),
    ("ddp", 3),
    ("fsdp", 2),
    ("local", 1),
]


@pytest.mark.parametrize("saved", ["local_sgd(2, every=3)", "diloco(2, every=3)"])
@pytest.mark.parametrize(("strategy", "ranks"), OTHERS)
def test_any_other_layout_goes_on_with_the_mean_of_slots(pools, tmp_path, saved, strategy, ranks):
    one, other = (found for found, _ in pools.run(2, run, saved, 6, tmp_path, None, 6))
    same = strategy.startswith("diloco")  # two replicas, each with its own again
    for rank, (params, slots, transforms) in enumerate(pools.run(ranks, resumed, strategy, tmp_path)):
        assert equal(params, one[0])
        replica = (one, other)[rank // 2][1] if same else None
        for path, value in slots.items():
            wanted = (one[1][path] + other[1][path]) / 2 if replica is None else replica[path]
            assert torch.allclose(value, wanted, rtol=1e-6, atol=0), path
        if strategy.startswith("diloco") and saved.startswith("local"):
            assert transforms["diloco"]["updates"] == 0
            assert equal(transforms["diloco"]["anchor"], params)
        assert set(transforms) == {strategy.partition("(")[0]} & {"local_sgd", "diloco"}


@pytest.mark.parametrize("strategy", ["local_sgd(2, every=3)", "diloco(2, every=3)"])
@pytest.mark.parametrize("saved", ["ddp", "local_sgd(2, every=2)"])
def test_replicas_go_on_from_another_strategy(pools, tmp_path, saved, strategy):
    before = pools.run(2, run, saved, 4, tmp_path, None, 4)[0][0]
    for params, slots, transforms in pools.run(2, resumed, strategy, tmp_path):
        assert equal(params, before[0])
        if saved == "ddp":
            assert equal(slots, before[1])
        if strategy.startswith("diloco"):
            assert equal(transforms["diloco"]["anchor"], params)


def fine_tuned(folder):
    """DiLoCo whose parameters alone come from a checkpoint."""
    train_step = made("diloco(2, every=3)")
    state = stepped(train_step, train_step.init(seed=3), 4)
    state = fa.restore(folder, like=state, only="params")
    return whole_params(state), state.transforms["diloco"]


def test_an_anchor_follows_parameters_that_are_restored_alone(pools, tmp_path):
    pools.run(2, run, "ddp", 4, tmp_path, None, 4)
    for params, own in pools.run(2, fine_tuned, tmp_path):
        assert equal(own["anchor"], params)
        assert own["updates"] == 0


def refused(folder):
    train_step = made("diloco(2, every=3)")
    state = stepped(train_step, train_step.init(seed=0), 4)
    with pytest.raises(fa.errors.CheckpointError) as error:
        fa.save(folder, state)
    return str(error.value)


def test_a_save_between_two_averages_names_the_next(pools, tmp_path):
    for text in pools.run(2, refused, tmp_path):
        assert "after step 4" in text
        assert "train on to step 6" in text
    assert not any(tmp_path.iterdir())


def renumbered(folder, number, resume):
    """Parameters after four steps and after seven, of a state that is saved between averages by another number."""
    train_step = made("local_sgd(2, every=3)")
    state = train_step.init(seed=0)
    if resume:
        state = fa.restore(folder, like=state)
        assert state.step == 4
    else:
        state = stepped(train_step, state, 4)
        fa.save(folder, state, step=number, between=True)
    first = whole_params(state)
    return first, whole_params(stepped(train_step, state, 7))


@pytest.mark.parametrize("number", [6, 100])
def test_the_number_of_a_checkpoint_does_not_say_where_its_state_is(pools, tmp_path, number):
    saved = pools.run(2, renumbered, tmp_path, number, False)
    for one, other in zip(saved, pools.run(2, renumbered, tmp_path, number, True), strict=True):
        assert equal(one, other)


def adopted(strategy):
    """Parameters after seven steps, and again after a snapshot between two averages was adopted."""
    train_step = made(strategy)
    state = stepped(train_step, train_step.init(seed=0), 4)
    kept = fa.snapshot(state)
    first = whole_params(state := stepped(train_step, state, 7))
    again = whole_params(stepped(train_step, train_step.adopt(kept), 7))
    train_step.close()
    return first, again


@pytest.mark.parametrize("strategy", ["local_sgd(2, every=3)", "diloco(2, every=3)"])
def test_a_snapshot_that_is_adopted_goes_on_with_the_same_bits(pools, strategy):
    for first, again in pools.run(2, adopted, strategy):
        assert equal(first, again)


def both(folder, resume):
    """The slots of two models in one tree, saved or restored."""
    steps = [made("local_sgd(2, every=3)"), made("local_sgd(2, every=3, weighting='rows')")]
    states = {name: step.init(seed=0) for name, step in zip("ab", steps, strict=True)}
    states["mark"] = torch.zeros(2)
    if resume:
        states = fa.restore(folder, like=states)
        assert states.pop("mark").tolist() == [1, 2]
    else:
        states = {name: stepped(step, states[name], 3) for name, step in zip("ab", steps, strict=True)}
        fa.save(folder, {**states, "mark": torch.tensor([1.0, 2.0])})
    return [slots_of(state) for state in states.values()]


def test_two_states_in_one_tree_keep_the_slots_of_each_replica(pools, tmp_path):
    saved = pools.run(2, both, tmp_path, False)
    assert not equal(saved[0], saved[1])
    assert all(
        equal(one, other) for one, other in zip(saved, pools.run(2, both, tmp_path, True), strict=True)
    )
