"""A CNN with batch norms in each precision on each strategy: the numbers of PyTorch's autocast in a loop by hand."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import CapabilityError
from fnaccel.testing import assert_close, count_collectives
from fnaccel.world.world import current

STEPS, ROWS = 3, (8, 4, 6, 4)
SCALE = 256.0  # of fp16's losses: no gradient overflows, so no update is left out
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
STRATEGIES = {
    "local": 1, "ddp": 2, "fsdp": 2, "fsdp(reshard_after_forward=False)": 2, "fsdp(units=None)": 2,
    "fsdp(init='rank0')": 2, "hsdp(2, 2)": 4,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = norm(8, affine=True, track_running_stats=True)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Norms in blocks, which fsdp shards as units, and as a child of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(nn.BatchNorm2d), Block(nn.BatchNorm2d))
        self.instances = nn.ModuleList([Block(nn.InstanceNorm2d), Block(nn.InstanceNorm2d)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        for block in self.instances:
            x = block(x)
        return self.head(x.mean((2, 3)))


def rows(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(ROWS[rank], 3, 8, 8, generator=generator)
    return x, x.mean((1, 2, 3))[:, None].sin()


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean((model(x).float() - y).square().sum(), weight=len(y))


def step_of(precision, micros, synced):
    policy = fa.transforms.Precision(compute=precision, init_scale=SCALE)
    step = fa.accumulate(fa.with_precision(loss_fn, policy), micros)
    return fa.transforms.sync_batch_norm(step) if synced else step


def run(strategy, precision, micros, synced, folder):
    """Losses and tensors, the scores before a save and after its restore, and the notes of the plan."""
    train_step = fa.train_step(
        step_of(precision, micros, synced), model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.03)
    )
    try:
        state, losses = train_step.init(seed=0), []
        for number in range(STEPS):
            state, metrics = train_step(state, rows(number, current().rank))
            losses.append(float(metrics["loss"]))
        named = {**state.params, **state.buffers}
        tensors = {name: fa.tree.whole(value).detach().clone() for name, value in named.items()}
        shards = fa.shard(DataLoader(TensorDataset(*rows(9, 0)), batch_size=4))
        scores = [float(fa.evaluate(train_step, state, loss_fn, shards))]
        fa.save(folder, state)
        state, _ = train_step(state, rows(STEPS, current().rank))
        state = fa.restore(folder, like=state)
        scores.append(float(fa.evaluate(train_step, state, loss_fn, shards)))
        return losses, tensors, scores, train_step.plan.notes
    finally:
        train_step.close()


@functools.cache
def by_hand(ranks, precision, micros, synced):
    """The same in PyTorch alone: buffers are those of the first rank, or of the rows of all."""
    torch.manual_seed(0)
    model, losses = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    scale = SCALE if precision == "fp16" else 1.0
    for number in range(STEPS):
        parts = [
            list(zip(*(x.chunk(micros) for x in rows(number, rank)), strict=True)) for rank in range(ranks)
        ]
        if synced:
            parts = [[tuple(map(torch.cat, zip(*micro, strict=True))) for micro in zip(*parts, strict=True)]]
        total, kept = 0.0, None
        for micro_batches in parts:
            for batch in micro_batches:
                with torch.autocast("cpu", DTYPES[precision] or torch.bfloat16, enabled=precision != "fp32"):
                    part = loss_fn(model, batch).total
                (scale * part).backward()
                total += float(part.detach())
            kept = kept or copy.deepcopy(dict(model.named_buffers()))
        model.load_state_dict(kept, strict=False)
        for param in model.parameters():
            param.grad /= scale * sum(ROWS[:ranks])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / sum(ROWS[:ranks]))
    with torch.no_grad():
        score = loss_fn(model.eval(), rows(9, 0))
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    return losses, tensors, float(score.total / score.weight)


@pytest.mark.long_except(r"bf16-(local|ddp|fsdp)-|fp16-fsdp-one|bf16-fsdp\(init.*-one")
@pytest.mark.parametrize(
    ("micros", "synced"), [(1, False), (2, False), (2, True)], ids=["one", "two", "synced"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", DTYPES)
def test_equals_autocast_by_hand(pools, tmp_path, precision, strategy, micros, synced):
    ranks = STRATEGIES[strategy]
    losses, tensors, score = by_hand(ranks, precision, micros, synced)
    for result in pools.run(ranks, run, strategy, precision, micros, synced, str(tmp_path)):
        assert_close(result[0], losses, precision=precision)
        if synced:  # the rows of all ranks are those of batch norms only
            result[1].update(
                (name, tensors[name]) for name in tensors if "instances" in name and "running" in name
            )
        assert_close(result[1], tensors, precision=precision)
        assert result[2][0] == result[2][1] == pytest.approx(score, abs=0.02)
        if "sdp" in strategy:
            note = "3 BatchNorm2d and 2 InstanceNorm2d: parameters stay whole on each rank"
            assert any(note in text for text in result[3])


class Custom(nn.Module):
    """A batch norm that is none of torch's classes."""

    def __init__(self, width, **_) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, self.weight, training=self.training)


def custom():
    return nn.Sequential(Block(Custom), Block(Custom))


def of_custom(strategy):
    """The loss of a step, whose batch has as many channels as the blocks."""

    def loss(model, x):
        return fa.Mean(model(x).float().square().sum(), weight=len(x))

    train_step = fa.train_step(
        fa.with_precision(loss, "bf16"), model=fa.distribute(custom, strategy), optimizer=fa.sgd(0.1)
    )
    try:
        _, metrics = train_step(
            train_step.init(seed=0), torch.ones(4, 8, 6, 6).cumsum(0) * (1 + current().rank)
        )
        return float(metrics["loss"])
    finally:
        train_step.close()


def test_a_norm_of_another_class_raises_and_names_the_way_out(pools):
    with pytest.raises(CapabilityError, match=r"gathered in bf16(.|\n)*ignore=\(.\*\.norm\.\*.,\)"):
        pools.run(2, of_custom, "fsdp")
    whole, ddp = (pools.run(2, of_custom, strategy) for strategy in ("fsdp(ignore='*.norm.*')", "ddp"))
    assert_close(whole, ddp, precision="bf16")


def sent(strategy):
    """The collectives of a step, and the bytes of this rank's parameters."""
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    for number in range(3):  # after the first two ranks compare the buffers that moved
        with count_collectives() as counted:
            state, _ = train_step(state, rows(number, current().rank))
    held = sum(
        getattr(value, "to_local", lambda value=value: value)().nbytes for value in state.params.values()
    )
    train_step.close()
    return dict(counted.counts), held


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("hsdp(2, 2)", 4)])
def test_a_footprint_counts_them(pools, strategy, ranks):
    sizes = fa.strategies.footprint(Net, strategy, ranks)
    expected = Counter()
    for row in sizes.traffic:
        expected[row.kind] += row.count
    results = pools.run(ranks, sent, strategy)
    assert all({name: counts[name] for name in expected} == dict(expected) for counts, _ in results)
    assert max(held for _, held in results) == sizes.parameters
