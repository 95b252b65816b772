"""Collectives in a loss: gradients are those of one process, whatever rows each rank has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import ArgumentError, RankMismatchError
from fnaccel.world.world import current
from tests.tiny_models import whole_params


class Clip(nn.Module):
    """Two encoders, into one space (Radford et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(5, 4), nn.Linear(3, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, batch):
        images, texts = batch
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)


def whole_loss(images, texts, scale):
    """The sum over pairs: each image among all texts, each text among all images."""
    logits, own = scale.exp() * images @ texts.T, torch.arange(len(images))
    return (
        F.cross_entropy(logits, own, reduction="sum") + F.cross_entropy(logits.T, own, reduction="sum")
    ) / 2


def of_own_rows(model, batch, *, info):
    """This rank's rows among the rows of all. A row finds its pair by its number."""
    images, texts = model(batch)
    rows = {"image": images, "text": texts, "row": info.rows}
    everyone = fa.gather(rows, valid=info.valid.sum(), gradient=True)
    own = (info.rows[:, None] == everyone["row"]).int().argmax(1)
    scale = model.scale.exp()
    total = F.cross_entropy(scale * images @ everyone["text"].T, own, reduction="none")
    total = total + F.cross_entropy(scale * texts @ everyone["image"].T, own, reduction="none")
    return fa.Mean(total[info.valid].sum() / 2, weight=info.valid.sum())


def computed_whole(model, batch, *, info):
    """The loss of all rows on each rank, with the weight of all rows."""
    images, texts = model(batch)
    everyone = fa.gather({"image": images, "text": texts}, valid=info.valid.sum(), gradient=True)
    total = whole_loss(everyone["image"], everyone["text"], model.scale)
    return fa.Mean(total, weight=len(everyone["image"]))


def variance(model, batch, *, info):
    """Of an embedding over all rows, by two sums over ranks: VICReg (Bardes et al. 2022)."""
    rows = torch.cat(model(batch), 1)[info.valid] * model.scale
    sums = {"sum": rows.sum(0), "square": (rows**2).sum(0), "rows": torch.tensor(float(len(rows)))}
    found = fa.reduce(sums, gradient=True)
    mean = found["sum"] / found["rows"]
    spread = found["square"] / found["rows"] - mean**2
    return fa.Mean(F.relu(1 - spread).sum() * found["rows"], weight=found["rows"])


def whole_variance(images, texts, scale):
    rows = torch.cat([images, texts], 1) * scale
    return F.relu(1 - rows.var(0, unbiased=False)).sum() * len(rows)


def pairs(rows):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def compiled(loss_fn):
    """Two graphs, and the collective between them."""
    return fa.compile(loss_fn, scope="loss", backend="eager")


def trained(step, strategy, micro_batches, rows=19):
    model = fa.distribute(Clip, strategy)
    step = fa.accumulate(step, micro_batches)
    train_step = fa.train_step(step, model=model, optimizer=fa.sgd(0.5))
    state, losses = train_step.init(seed=0), []
    shards = fa.shard(DataLoader(TensorDataset(*pairs(rows)), batch_size=8))
    for _, (state, metrics) in zip(range(6), fa.scan(train_step, state, shards, epochs=2), strict=False):
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)


def raw(loss, cuts, rows=19):
    """Plain torch in one process. `cuts` are the rows of micro-batches, each with its own negatives."""
    torch.manual_seed(0)
    model = Clip()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    images, texts = pairs(rows)
    for _ in range(2):
        for begin in range(0, rows, 8):
            batch = range(begin, min(begin + 8, rows))
            parts = [[batch[at] for at in cut if at < len(batch)] for cut in cuts]
            total = sum(loss(*model((images[part], texts[part])), model.scale) for part in parts if part)
            total = total / len(batch)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            losses.append(total.item())
    return losses, dict(model.named_parameters())


ORACLES = {of_own_rows: whole_loss, computed_whole: whole_loss, variance: whole_variance}


@pytest.mark.parametrize("loss_fn", ORACLES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3)])
def test_gradients_are_those_of_one_process(pools, strategy, ranks, loss_fn):
    """The last batch of an epoch has 3 rows, and the third rank of three has none of it."""
    losses, params = raw(ORACLES[loss_fn], [range(8)])
    for found, values in pools.run(ranks, trained, loss_fn, strategy, 1):
        assert found == pytest.approx(losses, abs=1e-6)
        assert fa.tree.allclose(values, params, rtol=1e-5, atol=1e-6)


def test_a_compiled_loss_calls_it_between_graphs(pools):
    losses, params = raw(whole_loss, [range(8)])
    for found, values in pools.run(2, trained, compiled(of_own_rows), "ddp", 1):
        assert found == pytest.approx(losses, abs=1e-6)
        assert fa.tree.allclose(values, params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_fn", [of_own_rows, computed_whole])
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_each_micro_batch_has_its_own_negatives(pools, strategy, ranks, loss_fn):
    """Of 8 rows on 2 ranks, the first micro-batch has the first two of each rank."""
    cuts = {1: [[0, 1, 2, 3], [4, 5, 6, 7]], 2: [[0, 1, 4, 5], [2, 3, 6, 7]]}[ranks]
    losses, params = raw(whole_loss, cuts, rows=16)
    for found, values in pools.run(ranks, trained, loss_fn, strategy, 2, 16):
        assert found == pytest.approx(losses[: len(found)], abs=1e-6)
        assert fa.tree.allclose(values, params, rtol=1e-5, atol=1e-6)


def mixed_kinds():
    """Integers, 0-d tensors, bf16, means and factors, against the sums of what every rank passed."""
    rank = current().rank
    leaf = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    half = torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)
    tree = {"rows": leaf * 1, "number": torch.arange(2), "scalar": half * 1}
    found = fa.gather(tree, gradient=True)
    assert found["rows"].tolist() == [1.0, 2.0, 2.0, 2.0]
    assert not found["number"].requires_grad
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1)
    ((found["rows"] * weights).sum() + found["scalar"].sum()).backward()
    assert leaf.grad.tolist() == [[3.0, 6.0], [9.0, 12.0]][rank]  # of both ranks' losses
    assert (half.grad.item(), half.grad.dtype) == (2.0, torch.bfloat16)
    leaf.grad = None
    (fa.reduce(leaf * 1, "mean", scale=3.0, gradient=True) * (rank + 1)).sum().backward()
    assert leaf.grad.tolist() == [4.5, 4.5]
    with torch.no_grad():
        assert not fa.gather(leaf, gradient=True).requires_grad


def test_kinds_of_leaves_and_of_sums(pools):
    pools.run(2, mixed_kinds)


def refused():
    rank = current().rank
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"In a loss: fa\.gather\(\.\.\., gradient=True\)"):
        fa.gather(leaf * 1)
    with pytest.raises(ArgumentError, match="valid is a tensor of rows"):
        fa.gather(leaf * 1, valid=torch.ones(2, dtype=torch.bool), gradient=True)
    with pytest.raises(ArgumentError, match="the max over ranks has no gradient here"):
        fa.reduce(leaf * 1, "max", gradient=True)
    with pytest.raises(RankMismatchError):
        fa.gather(leaf * 1 if rank == 0 else torch.ones(2), gradient=True)


def test_a_gradient_that_only_one_rank_takes_is_refused(pools):
    pools.run(2, refused)
