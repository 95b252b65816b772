"""Parameters whose rows the ranks do not divide, such as few experts: another dimension is sharded, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError
from fnaccel.testing import assert_close, oracle_run
from fnaccel.world.world import current
from tests.estimate.models import LENGTH, VOCABULARY, peak_of, tokens_of
from tests.estimate.models import loss_fn as token_loss

STEPS, ROWS, WIDTH = 3, 4, 64


class Experts(nn.Module):
    """A row goes through all experts, weighted by a router. The weights have three dimensions."""

    def __init__(self, experts=2, width=WIDTH, inner=96):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, inner, width) / 16)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / 16)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        inner = torch.einsum("...w,eiw->...ei", x, self.up).relu()
        return torch.einsum("...ei,ewi,...e->...w", inner, self.down, gates) * 1.0


class Net(nn.Module):
    """Blocks of experts. `conv` has a kernel of three dimensions, which is none of experts."""

    def __init__(self, experts=2):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.blocks = nn.ModuleList(Experts(experts) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = x + self.conv(x[:, None]).sum(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def three():
    return Net(3)


def rank_batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(ROWS - rank % 2, WIDTH, generator=generator)
    return x, x[:, :1].sin()


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def begun(strategy, step=loss_fn, optimizer=None, model=Net):
    train_step = fa.train_step(
        step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.sgd(0.02, momentum=0.9)
    )
    return train_step, train_step.init(seed=0)


def trained(strategy, compiled=False, folder=None, optimizer=None, model=Net):
    """Losses and whole parameters. With a folder, the state is saved."""
    world = current()
    step = fa.compile(loss_fn, backend="eager") if compiled else loss_fn
    train_step, state = begun(strategy, step, optimizer, model)
    losses = []
    for number in range(STEPS):
        data = rank_batch(number, world.rank) if world.size > 1 else [torch.cat(c) for c in zip(*map(rank_batch, [number] * 4, range(4)), strict=True)]  # fmt: skip
        state, metrics = train_step(state, data)
        losses.append(float(metrics["loss"]))
    params = {name: fa.tree.whole(value).detach().clone() for name, value in state.params.items()}
    if folder is not None:
        fa.save(folder, state)
    train_step.close()
    return losses, params


def parts(strategy, model=Net, compiled=False):
    """The elements of each parameter on this rank, and the dimension that is sharded."""
    step = fa.compile(loss_fn, backend="eager") if compiled else loss_fn
    train_step, state = begun(strategy, step, model=model)
    held = {
        name: (value.to_local().numel(), [p.dim for p in value.placements if not p.is_replicate()])
        for name, value in state.params.items()
    }
    notes = train_step.plan.notes
    train_step.close()
    return held, notes


CASES = [  # on 4 ranks: 2 experts and 3 experts
    ("fsdp", False, Net),
    ("fsdp", True, Net),
    ("hsdp(2, 2)", False, three),
    ("hsdp(2, 2)", True, three),
    ("fsdp(reshard_after_forward=False)", False, three),
    ("fsdp(reshard_after_forward=2)", False, Net),
]


@pytest.mark.long_except(r"False|fsdp-True-Net")
@pytest.mark.parametrize(("strategy", "compiled", "model"), CASES)
def test_equals_the_raw_loop(pools, strategy, compiled, model):
    batches = [[rank_batch(step, rank) for rank in range(4)] for step in range(STEPS)]
    oracle = oracle_run(model, loss_fn, batches, lr=0.02, optimizer="sgd", momentum=0.9)
    for losses, params in pools.run(4, trained, strategy, compiled, None, None, model):
        assert_close(losses, oracle.losses)
        assert_close(params, oracle.params)


def test_each_rank_holds_its_part_of_experts(pools):
    every = pools.run(4, parts, "fsdp")
    for held, notes in every:
        assert held["blocks.0.up"] == (2 * 96 * WIDTH // 4, [1])
        assert held["blocks.0.down"] == (2 * 96 * WIDTH // 4, [1])
        assert held["blocks.0.router.weight"][1] == [0], "it saves less than 1 %"
        assert held["conv.weight"][1] == [0], "no dimension divides"
        text = "4 ranks do not divide the rows of blocks.0.up, blocks.0.down, blocks.1.up, blocks.1.down: "
        assert f"fsdp: {text}sharded along another dimension" in notes
    assert all(
        held["blocks.0.up"][1] == [0] for held, _ in pools.run(4, parts, "fsdp(reshard_after_forward=2)")
    )
    assert all(held["blocks.0.up"][1] == [1] for held, _ in pools.run(2, parts, "fsdp", three))


def wide(rows, inner=256, model=None):
    """The dimension of a layer with some output features beside a square one, over 4 ranks."""

    def made():
        return nn.Sequential(nn.Linear(64, inner), nn.Linear(inner, rows)) if model is None else model()

    sizes = fa.strategies.footprint(made, "fsdp(4)", 4)
    weight = next(
        one for one in sizes.placed if one.name in ("1.weight", "0.weight") and one.shape[0] == rows
    )
    return [dim for dim in range(len(weight.cut)) if weight.part[dim] != weight.cut[dim]]


@pytest.mark.parametrize(
    ("rows", "dims"),
    [(1, [1]), (2, [1]), (3, [1]), (5, [1]), (6, [1]), (13, [0]), (15, [0]), (8, [0])],
)
def test_matrices_leave_dimension_0_if_a_quarter_is_padding(rows, dims):
    """13 rows over 4 ranks are 16: less than a quarter. Below, memory decides."""
    assert wide(rows) == dims


def test_experts_leave_dimension_0_if_it_does_not_divide():
    """15 over 4 ranks are 16, which is little. A kernel of a convolution is no expert."""
    sizes = fa.strategies.footprint(lambda: nn.Sequential(Experts(15), nn.Conv1d(15, 15, 4)), "fsdp(4)", 4)
    parts = {one.name: one.part for one in sizes.placed}
    assert parts["0.up"] == (15, 24, WIDTH)
    assert parts["1.weight"] == (4, 15, 4)


def test_matrices_that_save_little_stay():
    assert wide(2, 4096) == [1]
    assert wide(3, model=lambda: nn.Sequential(nn.Linear(64, 3), nn.Linear(3, 4000))) == [0]


def handed_on(strategy, folder, compiled=False):
    """A state as it was restored, whole, and saved again."""
    train_step, state = begun(strategy, fa.compile(loss_fn, backend="eager") if compiled else loss_fn)
    state = fa.restore(folder, like=state)
    trees = {"params": dict(state.params), "opt": dict(state.opt)}
    found = fa.tree.map(lambda leaf: fa.tree.whole(leaf).detach().clone(), trees)
    fa.save(folder, state)
    train_step.close()
    return found


@pytest.mark.long
def test_any_layout_restores_any_other(pools, tmp_path):
    """Bit for bit, one after the other."""
    pools.run(4, trained, "fsdp", False, tmp_path)
    with fa.start():
        expected = handed_on("local", tmp_path)
    for ranks, strategy, compiled in (
        (4, "hsdp(2, 2)", False),
        (4, "fsdp", True),
        (2, "ddp", False),
        (4, "fsdp", False),
    ):
        for found in pools.run(ranks, handed_on, strategy, tmp_path, compiled):
            assert_close(found, expected, precision="fp64")


def test_footprints_know_the_dimension(pools):
    sizes = fa.strategies.footprint(Net, "fsdp(4)", 4, optimizer=fa.adamw(0.1))
    held = [4 * sum(count for count, _ in each.values()) for each, _ in pools.run(4, parts, "fsdp")]
    assert sizes.parameters == max(held)
    whole = 4 * sum(math.prod(one.shape) for one in sizes.placed)
    assert sizes.parameters < 1.02 * whole / 4


class Mixture(nn.Module):
    """Experts over tokens, large enough that the copies of a shard along another dimension count."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Experts(2, WIDTH, 1600) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        assert tokens.shape[1] == LENGTH
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.long
def test_estimates_know_the_dimension(pools):
    held = max(pools.run(4, peak_of, token_loss, Mixture, "fsdp", fa.adamw(1e-3)))
    estimate = fa.estimate.training(
        token_loss,
        model=fa.distribute(Mixture, "fsdp"),
        optimizer=fa.adamw(1e-3),
        batch=tokens_of("meta"),
        ranks=4,
    )
    assert estimate.total == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("codes", ["8bit", "4bit", "fp8"])
def test_quantized_moments_of_experts(pools, codes):
    """Blocks lie within the part of a row that a rank has."""
    optimizer = fa.optim.adamw8bit(0.01, codes=codes)
    with fa.start():
        losses, params = trained("local", optimizer=optimizer)
    # a sum over ranks rounds otherwise, and a moment at the edge of two codes may take the other one
    for found, values in pools.run(4, trained, "fsdp", False, None, optimizer):
        torch.testing.assert_close(found, losses, rtol=1e-3, atol=1e-3)
        for name, value in values.items():
            torch.testing.assert_close(value, params[name], rtol=0, atol=0.02)
            assert (value - params[name]).abs().mean() < 1e-4


ASKED = "fsdp(dims={'blocks.*.up': 2, 'blocks.0.down': 1, 'blocks.0.*': 1, 'head.weight': 1})"


def narrow():
    """Experts whose router has a bias-free weight of two dimensions: all of them divide by 2."""
    return Net(2)


@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [
        (ASKED, False),
        (ASKED, True),
        (ASKED.replace("fsdp(", "fsdp(reshard_after_forward=False, "), False),
    ],
)
def test_dimensions_that_were_asked_for(pools, strategy, compiled):
    batches = [[rank_batch(step, rank) for rank in range(2)] for step in range(STEPS)]
    oracle = oracle_run(narrow, loss_fn, batches, lr=0.02, optimizer="sgd", momentum=0.9)
    for losses, params in pools.run(2, trained_on_two, strategy, compiled):
        assert_close(losses, oracle.losses)
        assert_close(params, oracle.params)
    for held, notes in pools.run(2, parts, strategy, narrow, compiled):
        dims = {name: dim for name, (_, dim) in held.items()}
        assert (dims["blocks.0.up"], dims["blocks.0.down"]) == ([2], [1]), "the first pattern counts"
        assert (dims["blocks.0.router.weight"], dims["head.weight"]) == ([1], [1])
        assert (dims["blocks.1.router.weight"], dims["head.bias"]) == ([0], [0])
        assert not any("do not divide the rows of blocks" in note for note in notes)


def trained_on_two(strategy, compiled=False, folder=None):
    world = current()
    step = fa.compile(loss_fn, backend="eager") if compiled else loss_fn
    train_step, state = begun(strategy, step, None, narrow)
    losses = []
    for number in range(STEPS):
        state, metrics = train_step(state, rank_batch(number, world.rank))
        losses.append(float(metrics["loss"]))
    params = {name: fa.tree.whole(value).detach().clone() for name, value in state.params.items()}
    if folder is not None:
        fa.save(folder, state)
    train_step.close()
    return losses, params


def restored_from(strategy, folder):
    train_step, state = begun(strategy, model=narrow)
    state = fa.restore(folder, like=state)
    params = {name: fa.tree.whole(value).detach().clone() for name, value in state.params.items()}
    moments = {name: fa.tree.whole(slots["momentum_buffer"]).clone() for name, slots in state.opt.items()}
    train_step.close()
    return params, moments


@pytest.mark.parametrize(("saved", "restored"), [(ASKED, "fsdp"), ("fsdp", ASKED)])
def test_checkpoints_go_to_other_dimensions(pools, tmp_path, saved, restored):
    _, expected = pools.run(2, trained_on_two, saved, False, tmp_path)[0]
    params, moments = pools.run(2, restored_from, restored, tmp_path)[0]
    assert_close(params, expected, precision="fp64")
    (_, same) = pools.run(2, restored_from, saved, tmp_path)[0]
    assert_close(moments, same, precision="fp64")


def test_dimensions_beside_tensor_and_in_estimates():
    plan = {"0": "colwise", "1": "rowwise"}
    strategy = fa.fsdp(2, dims={"0.weight": 1, "1.weight": 1}) * fa.tensor(2, plan)

    def model():
        return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))

    with fa.simulate(ranks=4):
        train_step = fa.train_step(loss_fn, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.1))
        shown = {row.name: (row.axes, row.part) for row in fa.layout(train_step.init()).rows}
    assert shown["0.weight"] == ("dim 0 over tp, dim 1 over dp_shard", (6, 4))
    assert shown["1.weight"] == ("dim 1 over tp, dim 1 over dp_shard", (8, 3))
    placed = {each.name: each.part for each in fa.strategies.footprint(model, strategy, 4).placed}
    assert (placed["0.weight"], placed["1.weight"]) == ((6, 4), (8, 3))
    assert fa.strategy(str(strategy)) == strategy


def failing(dims):
    with pytest.raises(ArgumentError) as caught:
        begun(fa.fsdp(dims=dims), model=narrow)
    return str(caught.value)


def test_dimensions_that_can_not_be(pools):
    (message, _) = pools.run(2, failing, {"blocks.0.upp": 1})
    assert "the pattern 'blocks.0.upp' matches no parameter" in message
    assert "did you mean 'blocks.0.up'" in message
    (message, _) = pools.run(2, failing, {"conv.weight": 2})
    assert "conv.weight has 3 elements along dimension 2, which 2 ranks do not divide" in message
    (message, _) = pools.run(2, failing, {"head.*": 1})
    assert "head.bias has the shape [1], without elements along a dimension 1" in message
    for dims in ("head", {"head.weight": -1}, {"head.weight": "1"}, {"head.weight": True}, {1: 1}, None, 1):
        with pytest.raises(ArgumentError, match="does not say along which dimension"):
            fa.fsdp(dims=dims)
    with pytest.raises(ArgumentError, match="with a dimension other than 0"):
        fa.fsdp(dims={"head.weight": 1}, reshard_after_forward=2)
