"""States of a pipeline: whole on every rank, and carried to any other number of stages and any strategy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.testing import assert_close
from tests.strategies.pipeline import models
from tests.strategies.pipeline.models import loss_fn, rows_of
from tests.tiny_models import whole


def made(strategy, model=models.TiedGPT):
    step = fa.with_ema(fa.clip_norm(fa.accumulate(loss_fn, 2), 0.5), 0.9)
    optimizer = fa.adamw(0.01, groups={"blocks.3.*": {"lr": 0.003}, "*.bias": {"weight_decay": 0.0}})
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer)
    return train_step, train_step.init(seed=0)


def values_of(state):
    trees = {"params": state.params, "opt": state.opt, "ema": state.ema, "buffers": state.buffers}
    return {path: whole(leaf) for path, leaf in fa.tree.items(trees) if isinstance(leaf, torch.Tensor)}


def went_on(strategy, steps, start=None, end=None, model=models.TiedGPT):
    """Losses and values after some steps from a checkpoint. All ranks of a step read the same rows in all."""
    train_step, state = made(strategy, model)
    if start is not None:
        state = fa.restore(start, like=state)
    losses = []
    for number in range(state.step, state.step + steps):
        parts = train_step.mesh.batch_size
        rows = rows_of(number, 0, rows=12).chunk(parts)[train_step.mesh.batch_rank]
        state, metrics = train_step(state, rows)
        losses.append(float(metrics["loss"]))
    if end is not None:
        fa.save(end, state)
    return losses, values_of(state)


CHAIN = [
    (2, "pipeline(2)"),
    (4, "pipeline(4)"),
    (2, "pipeline(2, schedule='interleaved', virtual=2)"),
    (2, "pipeline(2, schedule='zero_bubble', virtual=2)"),
    (3, "fsdp(3)"),
    (4, "pipeline(2) * fsdp(2)"),
    (4, "pipeline(2, split=('blocks.3',)) * ddp(2)"),
    (1, "local"),
]


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long_except("Moving")
@pytest.mark.parametrize("model", [models.TiedGPT, models.Moving])
def test_a_checkpoint_goes_through_any_stages_and_strategies_bit_for_bit(pools, tmp_path, model):
    ((_, expected),) = pools.run(1, went_on, "local", 2, None, tmp_path / "first", model)
    ((losses, further),) = pools.run(1, went_on, "local", 2, tmp_path / "first", None, model)
    start = tmp_path / "first"
    for number, (ranks, strategy) in enumerate(CHAIN):
        end = tmp_path / str(number)
        for _, found in pools.run(ranks, went_on, strategy, 0, start, end, model):
            assert equal(found, expected), strategy
        if model is models.TiedGPT:  # statistics of a batch are those of the rows of a rank
            for now, found in pools.run(ranks, went_on, strategy, 2, start, None, model):
                assert_close(now, losses)
                assert_close(
                    {n: x for n, x in found.items() if n.startswith(("params", "ema"))},
                    {n: x for n, x in further.items() if n.startswith(("params", "ema"))},
                )
        start = end


@pytest.mark.parametrize(("ranks", "strategy"), CHAIN[:2])
def test_a_run_that_goes_on_is_the_run_to_the_bit(pools, tmp_path, ranks, strategy):
    straight = pools.run(ranks, went_on, strategy, 4)
    pools.run(ranks, went_on, strategy, 2, None, tmp_path / "two")
    for one, other in zip(straight, pools.run(ranks, went_on, strategy, 2, tmp_path / "two"), strict=True):
        assert one[0][2:] == other[0]
        assert equal(one[1], other[1])


def held(strategy):
    """What one rank holds, and what functions of a state give."""
    train_step, state = made(strategy)
    own = {
        name: value.to_local().numel() if hasattr(value, "to_local") else -1
        for name, value in state.params.items()
    }
    shown = {name: tuple(value.shape) for name, value in state.params.items()}
    half = fa.tree.map(lambda value: 0.5 * value, dict(state.params))
    moved = fa.tree.axpy(-0.5, dict(state.params), dict(state.params))
    same = fa.tree.allclose(half, moved)
    sums = float(sum(value.square().sum() for value in state.params.values()).sqrt())
    laid = fa.tree.laid_out(fa.tree.map(fa.tree.whole, half), like=dict(state.params))
    copied = fa.snapshot(state)
    deep = copy.deepcopy(state.params["head.weight" if "head.weight" in shown else "embed.weight"])
    state, _ = train_step(state, rows_of(0, 0, rows=6))
    state = train_step.adopt(copied)
    again = values_of(state)
    table = str(fa.layout(state))
    return {
        "own": own,
        "shown": shown,
        "same": same and fa.tree.allclose(laid, half),
        "norms": (sums, float(fa.tree.norm(state.params))),
        "deep": whole(deep),
        "adopted": {
            name.removeprefix("params/"): x for name, x in again.items() if name.startswith("params/")
        },
        "table": table,
    }


def test_a_rank_holds_its_own_layers_and_shows_all(pools):
    (alone,) = pools.run(1, held, "local")
    ranks = pools.run(4, held, "pipeline(4)")
    for rank, found in enumerate(ranks):
        assert found["shown"] == alone["shown"]
        for name, count in found["own"].items():
            home = (
                int(name.split(".")[1]) if name.startswith("blocks") else 3 if name.startswith("norm") else 0
            )
            assert count == (alone["adopted"][name].numel() if home == rank else 0), name
        assert found["same"]
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        assert torch.equal(found["deep"], alone["deep"])
        assert equal(found["adopted"], alone["adopted"])
        assert "on rank 3 of pp" in found["table"]


def looked(strategy):
    """Outputs of the model outside of a step, on each rank."""
    train_step, state = made(strategy, models.Experts)
    rows = rows_of(0, 0, rows=6)
    by_hand = train_step.look(state, lambda model: model(rows)[0] + model(rows[:3])[0].sum())
    shards = fa.shard(DataLoader(rows_of(1, 0, rows=10), batch_size=4))
    score = fa.evaluate(train_step, state, lambda model, batch: {"mean": model(batch)[0].mean()}, shards)
    loss = train_step.look(state, train_step.as_loss(loss_fn), rows)
    return by_hand, float(score["mean"]), float(loss.total)


def test_look_and_evaluate_give_each_rank_the_output(pools):
    (alone,) = pools.run(1, looked, "local")
    for ranks, strategy in CHAIN[:3]:
        for output, *numbers in pools.run(ranks, looked, strategy):
            assert_close(output, alone[0])
            assert numbers == pytest.approx(alone[1:], rel=1e-6)
