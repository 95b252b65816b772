"""`fa.layout`: the table says what this rank holds, and a list of blocks says which ranks hold each."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import _torch
from fnaccel.checkpoint.format.boxes import Box, blocks_of, make_up
from fnaccel.errors import ArgumentError, StaleStateError, UnknownNameError
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, program

PLAN = {"blocks.*.mix": "colwise", "out": "rowwise"}


class Pair(nn.Module):
    """A packed layer and its row layer, sizes that two ranks do not divide, and ten blocks."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 24)
        self.back = nn.Linear(24, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 3) for _ in range(11))

    def forward(self, x):
        return self.back(self.qkv(x)) + sum(block(x).sum(-1, keepdim=True) for block in self.blocks)


def packed():
    return fa.fsdp(-1) * fa.tensor(2, {"qkv": "packed_colwise:3", "back": "rowwise"})


def checked(strategy, model):
    """Each rank compares its line of the table, and the blocks of its number, with its tensors."""
    train_step = program(strategy=strategy() if callable(strategy) else strategy, model=model)
    state = train_step.init()
    rank = current().rank
    shown = fa.layout(state)
    assert [row.name for row in shown.rows] == list(state.params)
    for row in shown.rows:
        value = state.params[row.name]
        local = _torch.local_of(value)
        assert (row.shape, row.part, row.size) == (tuple(value.shape), tuple(local.shape), local.nbytes)
        blocks = fa.layout(state, row.name).blocks
        boxes = {Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)): ranks for box, ranks in blocks}
        assert make_up(list(boxes), Box((0,) * value.dim(), tuple(value.shape)))
        mine = {box for box, ranks in boxes.items() if rank in ranks}
        assert mine == {box for box in blocks_of(value, rank) if box.numel}
    train_step.close()
    return str(shown), str(fa.layout({"x": torch.ones(2)}, "x"))


@pytest.mark.parametrize(
    ("ranks", "strategy", "model"),
    [
        (1, "local", Net),
        (2, "ddp", Net),
        (2, "fsdp", Pair),
        (2, packed, Pair),
        pytest.param(4, "hsdp(2, 2)", Pair, marks=pytest.mark.long),
        pytest.param(4, packed, Pair, marks=pytest.mark.long),
        pytest.param(3, "fsdp", Net, marks=pytest.mark.long),
    ],
)
def test_it_is_what_ranks_hold(pools, ranks, strategy, model):
    pools.run(ranks, checked, strategy, model)


def test_blocks_of_ranks_that_do_not_exist():
    with fa.simulate(ranks=8, rank=3):
        train_step = program(strategy=fa.hsdp(2, 2) * fa.tensor(2, PLAN))
        state = train_step.init()
        assert str(fa.layout(state, "out.weight")) == OUT
        assert str(fa.layout(train_step, "blocks.0.mix.weight")) == MIX
        table = fa.layout(state)
        line = "blocks.0.mix.weight  [6, 6]  float32  dim 0 over tp, dim 1 over dp_shard  [3, 3]     36 B"
        assert line in str(table)
        assert str(table).startswith("8 parameters, 460 B: this rank holds 128 B\nparameter ")
        assert "<td>dim 0 over tp, dim 1 over dp_shard</td>" in table._repr_html_()
        assert "<td>ranks 0, 4</td>" in fa.layout(state, "blocks.0.mix.weight")._repr_html_()


OUT = """\
out.weight: float32 [1, 6], dim 1 over tp, dim 0 over dp_shard
block     held by
0:1, 0:3  ranks 0, 4
0:1, 3:6  ranks 1, 5"""
MIX = """\
blocks.0.mix.weight: float32 [6, 6], dim 0 over tp, dim 1 over dp_shard
block     held by
0:3, 0:3  ranks 0, 4
0:3, 3:6  ranks 2, 6
3:6, 0:3  ranks 1, 5
3:6, 3:6  ranks 3, 7"""


def test_many_ranks_are_shortened():
    with fa.simulate(ranks=256):
        state = program(strategy="hsdp(16, 16)", model=functools.partial(nn.Linear, 4, 64)).init()
        lines = str(fa.layout(state, "weight")).splitlines()
    assert lines[2] == "0:4, 0:4    ranks 0, 16, 32, 48, ... 240"
    assert lines[-1].startswith("60:64, 0:4  ")


def test_models_by_name_and_other_trees():
    with fa.start(device="cpu"):
        train_step = fa.train_step(
            lambda models, batch: fa.Mean(
                models["a"](batch[0]).sum() + models["b"](batch[0]).sum(), weight=4
            ),
            model=fa.distribute({"a": Net, "b": Net}, "local"),
            optimizer={"a": fa.adamw(0.1), "b": fa.sgd(0.1)},
        )
        state = train_step.init()
        assert "whole" in str(fa.layout(state, "a/inp.weight"))
        assert (
            fa.layout(state.opt, "a/inp.weight/exp_avg").title
            == "a/inp.weight/exp_avg: float32 [6, 3], whole"
        )


def test_mistakes_name_the_way():
    with fa.start(device="cpu"):
        train_step = program()
        with pytest.raises(ArgumentError, match="no live state"):
            fa.layout(train_step)
        state = train_step.init()
        with pytest.raises(UnknownNameError, match=r"did you mean .inp\.weight"):
            fa.layout(state, "inp.wieght")
        with pytest.raises(ArgumentError, match="holds no tensors"):
            fa.layout(train_step.plan)
        train_step(state, batch_of(4))
        with pytest.raises(StaleStateError):
            fa.layout(state)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](self.embed(x))))


def summarised(strategy, trains):
    model = fa.distribute(Tied, strategy)
    step = fa.with_ema(fa.compile(lambda m, b: m(b).mean(), scope="block", backend="eager"), 0.9)
    optimizer = fa.adamw(0.1) if trains else None
    train_step = fa.train_step(
        step if trains else step.loss_fn, model=model, optimizer=optimizer, frozen=["blocks.0.*"][:trains]
    )
    state = train_step.init()
    found = train_step.summary()
    sizes = [_torch.local_of(value).numel() for value in state.params.values()]
    train_step.close()
    return (
        [(row.path, row.kind, row.parameters, row.trained) for row in found.rows],
        found.rows[0].held,
        sum(sizes),
        found.memory,
        str(found),
    )


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_summary_counts_layers_and_the_memory_of_a_rank(pools, strategy, ranks):
    for rows, held, own, memory, text in pools.run(ranks, summarised, strategy, True):
        assert rows == [
            ("model", "Tied", 132, 90),
            ("embed", "Embedding", 48, 48),
            ("blocks", "ModuleList", 84, 42),
            ("blocks.0", "Linear", 42, 0),
            ("blocks.1", "Linear", 42, 42),
        ]  # a tied weight counts once
        assert held == own
        assert memory["parameters"] == 4 * own
        assert memory["averages"] == memory["gradients"] == memory["slots of the optimizer"] // 2
        assert memory["buffers"] == 12
        assert "  1     Linear      weight [6, 6], bias [6]" in text


def test_a_model_that_is_only_looked_at_has_a_summary():
    with fa.start():
        rows, *_, memory, _ = summarised("local", False)
    assert rows[0] == ("model", "Tied", 132, 0)
    assert memory["gradients"] == memory["slots of the optimizer"] == 0
    with fa.start(), pytest.raises(fa.errors.OwnershipError):
        program().summary()
