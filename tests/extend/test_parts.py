"""An axis whose ranks compute parts of one loss, as context parallelism does: the ground under it.

Ranks along `cp` read the same rows and hold the same parameters. The loss function takes this rank's part of
each row.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.errors import LossError
from fnaccel.strategies import Axis, maker
from fnaccel.testing import oracle_run
from fnaccel.world.world import current
from tests.tiny_models import whole_params

STEPS, LENGTH = 3, 6


@attrs.frozen
class Parts(Axis):
    mesh_axis: ClassVar[str] = "cp"
    maker: ClassVar[str] = "tests.extend.test_parts:parts"
    degree: int = -1

    def apply(self, built, mesh):
        """The loss function does it all."""


@maker
def parts(degree=-1):
    return fa.strategies.Strategy((Parts(degree),))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.inp(x)))


def batch_of(step, rank, rows=None):
    """Sequences of `LENGTH` tokens. Ragged: another number of rows on each part of the batch."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(rows or 2 + rank, LENGTH, 3, generator=generator)
    return x, x.sum(-1, keepdim=True).sin()


def whole_loss(model, batch):
    x, y = batch
    return fa.Mean(F.mse_loss(model(x), y, reduction="sum"), weight=y.shape[0] * y.shape[1])


class Cut:
    """The loss of this rank's tokens. Uneven parts: the first has 4 of 6."""

    def __init__(self, mesh=None):
        self.mesh = mesh
        self.draws = []

    def __call__(self, model, batch):
        place = slice(0, 4) if self.mesh[0].coordinate("cp") == 0 else slice(4, 6)
        self.draws.append(float(torch.rand(())))
        return whole_loss(model, tuple(part[:, place] for part in batch))


def trained(strategy, clip=0.1, weigh=False, compiled=False):
    holder = []
    cut = Cut(holder)

    def loss_fn(model, batch):
        return cut(model, batch)

    step = loss_fn
    if weigh:  # the weight of this rank's part, known before the forward
        step = fa.with_weight(step, lambda b: b[0].shape[0] * (4 if holder[0].coordinate("cp") == 0 else 2))
    step = fa.clip_norm(fa.accumulate(step, 2), clip)
    if compiled:
        step = fa.compile(step, "step", backend="aot_eager")
    train_step = fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.3))
    mesh = train_step.mesh
    holder.append(mesh)
    state = train_step.init(seed=0)
    losses, norms = [], []
    for number in range(STEPS):
        state, metrics = train_step(state, batch_of(number, mesh.batch_rank))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        assert float(metrics["weight"]) == sum(2 + rank for rank in range(mesh.batch_size)) * LENGTH
    loader = [batch_of(9, 0, rows=4)]
    score = fa.evaluate(train_step, state, lambda m, b: cut(m, b), fa.shard(loader))
    params = whole_params(state)
    return losses, norms, params, float(score), cut.draws[:2], (mesh.batch_rank, mesh.coordinate("cp"))


ROWS = [
    ("parts(2)", 2, {}), ("parts(2)", 2, {"weigh": True}), ("parts(2)", 2, {"compiled": True}),
    ("ddp(2) * parts(2)", 4, {}), ("ddp(2) * parts(2)", 4, {"weigh": True}),
    ("fsdp(2) * parts(2)", 4, {}), ("fsdp(2) * parts(2)", 4, {"weigh": True}), ("fsdp(1) * parts(2)", 2, {"compiled": True}),
    ("hsdp(2, 2) * parts(2)", 8, {}),
]  # fmt: skip


@pytest.mark.long_except(r"^(?!fsdp\(1|hsdp)")
@pytest.mark.parametrize(("strategy", "ranks", "options"), ROWS)
def test_parts_of_a_loss_are_one_loss(pools, strategy, ranks, options):
    """Losses, norms that clip, weights, scores and parameters are those of one process."""
    full = strategy.replace("parts", "tests.extend.test_parts:parts")
    copies = ranks // 2
    expected = oracle_run(
        Net, whole_loss, [[batch_of(number, rank) for rank in range(copies)] for number in range(STEPS)],
        lr=0.3, clip=0.1,
    )  # fmt: skip
    model = Net()
    for losses, norms, params, score, draws, (batch, part) in pools.run(ranks, trained, full, **options):
        assert losses == pytest.approx(expected.losses, abs=1e-5)
        assert norms == pytest.approx(expected.grad_norms, abs=1e-5)
        for name, value in expected.params.items():
            torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-5)
        model.load_state_dict(params)
        with torch.no_grad():
            whole = whole_loss(model, batch_of(9, 0, rows=4))
        assert score == pytest.approx(float(whole.total / whole.weight), abs=1e-5)
        assert (batch, part) in {(b, p) for b in range(copies) for p in range(2)}


def test_ranks_of_other_parts_draw_other_numbers(pools):
    found = pools.run(4, trained, "ddp(2) * tests.extend.test_parts:parts(2)")
    assert len({tuple(draws) for *_, draws, _ in found}) == 4


def rows_returned(compiled):
    """The errors of a step and of `fa.evaluate` that return rows, and the results of those that add up."""
    holder = []
    cut = Cut(holder)

    def returning(kind):
        def loss_fn(model, batch):
            loss = cut(model, batch)
            return fa.Mean(loss.total, loss.weight, aux={"seen": kind(loss.total.detach().view(1))})

        return loss_fn

    def made(kind):
        step = returning(kind)
        step = fa.compile(step, "step", backend="aot_eager") if compiled else step
        model = fa.distribute(Net, "ddp(2) * tests.extend.test_parts:parts(2)")
        train_step = fa.train_step(step, model=model, optimizer=fa.sgd(0.1))
        holder[:] = [train_step.mesh]
        return train_step, train_step.init(seed=0)

    batch = batch_of(0, 0)
    train_step, state = made(fa.Concat)
    with pytest.raises(LossError) as training:
        train_step(state, batch)
    score = returning(fa.Concat)
    with pytest.raises(LossError) as scoring:
        fa.evaluate(train_step, state, lambda m, b: score(m, b).aux, fa.shard([batch_of(9, 0, rows=4)]))
    train_step, state = made(lambda rows: fa.Sum(rows.sum()))
    _, metrics = train_step(state, batch)
    sums = float(metrics["seen"]) - float(metrics["loss"] * metrics["weight"])
    return str(training.value), str(scoring.value), sums


@pytest.mark.long_except(r"False")
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_which_ranks_have_parts_are_not_put_together(pools, compiled):
    """A rank has some tokens of each row, so `fa.Concat` would return each row twice, cut short."""
    for training, scoring, difference in pools.run(4, rows_returned, compiled):
        assert training.startswith("aux holds fa.Concat, and each row is split over ranks")
        assert scoring.startswith("the result of the metric function holds fa.Concat")
        assert "where: fa.evaluate" in scoring
        assert "return fa.Sum or fa.Mean" in training
        assert difference == pytest.approx(0, abs=1e-4)


def axes():
    mesh = fa.train_step(
        whole_loss,
        model=fa.distribute(Net, "ddp(2) * tests.extend.test_parts:parts(2)"),
        optimizer=fa.sgd(0.1),
    ).mesh
    loss, batch = mesh["loss"], mesh["batch"]
    return (
        current().rank,
        (loss.size, loss.rank),
        (batch.size, batch.rank),
        fa.collectives.gather_objects(1, over=batch),
    )


def test_the_derived_axes(pools):
    for rank, loss, batch, ones in pools.run(4, axes):
        assert loss == (4, rank)
        assert batch == (2, rank // 2)
        assert ones == [1, 1]


def saved(strategy, folder, optimizer, like=None):
    train_step = fa.train_step(whole_loss, model=fa.distribute(Net, strategy), optimizer=optimizer)
    state = train_step.init(seed=0)
    if like is not None:
        state = fa.restore(like, like=state)
    else:
        state, _ = train_step(state, batch_of(0, 0))
        fa.save(folder, state)
    slots = fa.tree.map_tensors(
        lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t, dict(state.opt)
    )
    return whole_params(state), slots


@pytest.mark.parametrize("other", ["local", "fsdp(3)"])
def test_shards_over_both_go_to_any_layout(pools, tmp_path, other):
    strategy, optimizer = "fsdp(2) * tests.extend.test_parts:parts(2)", fa.adamw(0.1)
    params, slots = pools.run(4, saved, strategy, tmp_path / "a", optimizer)[0]
    ranks = 3 if "3" in other else 1
    for restored, found in pools.run(ranks, saved, other, None, optimizer, tmp_path / "a"):
        assert fa.tree.allclose(restored, params, rtol=0, atol=0)
        assert fa.tree.allclose(found, slots, rtol=0, atol=0)
    params, slots = pools.run(ranks, saved, other, tmp_path / "b", optimizer)[0]
    for restored, found in pools.run(4, saved, strategy, None, optimizer, tmp_path / "b"):
        assert fa.tree.allclose(restored, params, rtol=0, atol=0)
        assert fa.tree.allclose(found, slots, rtol=0, atol=0)
