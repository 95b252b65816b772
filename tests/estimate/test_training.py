"""Estimates of training against the live storages of real ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.estimate.models import (
    GPT,
    GPT2,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Checkpointed,
    EverySecond,
    Joined,
    Llama,
    Parallel,
    Perceptron,
    Shrinking,
    loss_fn,
    peak_of,
    step_of,
    tokens_of,
)  # fmt: skip
from tests.estimate.models import ROWS as ROWS_OF_BATCH

LLAMA_PLAN = {
    "*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise",
    "*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise",
}  # fmt: skip
ROWS = [
    (1, "local", GPT, {}),
    (1, "local", GPT, {"remat": True}),
    (1, "local", GPT, {"precision": "bf16", "accumulate": 3}),
    (1, "local", Perceptron, {}),
    (1, "local", Llama, {"precision": "bf16", "remat": True}),
    (1, "local", GPT2, {"precision": fa.transforms.Precision(param="bf16", compute="bf16")}),
    (1, "fsdp", GPT, {}),
    (2, "ddp", GPT, {}),
    (2, "ddp", Llama, {"precision": "bf16", "remat": True}),
    (2, "ddp", GPT2, {"accumulate": 2}),
    (2, "fsdp", GPT, {"precision": "bf16"}),
    (2, "fsdp", Llama, {"remat": True}),
    (2, "fsdp", Perceptron, {}),
    (2, "fsdp", GPT, {"accumulate": 2}),
    (2, fa.tensor(2, LLAMA_PLAN), Llama, {}),
    (4, "ddp", GPT, {"precision": "bf16"}),
    (4, "fsdp", GPT, {"remat": True}),
    (4, "fsdp", Llama, {"precision": "bf16", "remat": True}),
    (4, "fsdp(reshard_after_forward=False)", GPT2, {"precision": "bf16"}),
    (4, "hsdp(2, 2)", GPT, {"precision": "bf16", "remat": True}),
    (4, "hsdp(2, 2)", Llama, {}),
    (4, fa.fsdp(2) * fa.tensor(2, LLAMA_PLAN), Llama, {"remat": True}),
    (2, "pipeline(2)", GPT, {"accumulate": 4}),
    (2, "pipeline(2)", GPT, {"accumulate": 2, "precision": "bf16", "remat": True}),
    (2, "pipeline(2, schedule='gpipe')", GPT, {"accumulate": 4}),
    (2, "pipeline(2, schedule='interleaved', virtual=2)", GPT, {"accumulate": 4}),
    (2, "pipeline(2, schedule='zero_bubble', virtual=2)", GPT, {"accumulate": 4}),
    (2, "pipeline(2)", Llama, {"accumulate": 4}),
    (2, "pipeline(2)", GPT2, {"accumulate": 3}),
    (4, "pipeline(4)", GPT, {"accumulate": 8}),
    (4, "pipeline(2) * ddp(2)", GPT, {"accumulate": 2}),
    (4, "pipeline(2) * fsdp(2)", GPT, {"accumulate": 2}),
    (4, fa.pipeline(2) * fa.tensor(2, LLAMA_PLAN), Llama, {"accumulate": 4}),
]


@pytest.mark.long_except(
    r"1-local-.*GPT'>-{}|2-fsdp-.*bf16|4-hsdp.*Llama|2-pipeline.2.-.*GPT'>-.*: 4|zero_bubble"
)
@pytest.mark.parametrize(("ranks", "strategy", "model", "options"), ROWS, ids=str)
def test_it_is_what_the_largest_rank_holds(pools, ranks, strategy, model, options):
    step, optimizer = step_of(**options), fa.adamw(1e-3)
    held = max(pools.run(ranks, peak_of, step, model, strategy, optimizer))
    estimate = fa.estimate.training(
        step, model=fa.distribute(model, strategy), optimizer=optimizer, batch=tokens_of("meta"), ranks=ranks
    )
    assert estimate.total == pytest.approx(held, rel=0.05)


def test_stages_wait_and_send():
    def estimated(strategy, micro_batches):
        return fa.estimate.training(
            fa.accumulate(loss_fn, micro_batches),
            model=fa.distribute(GPT, strategy),
            optimizer=fa.adamw(1e-3),
            batch=tokens_of("meta"),
            ranks=4,
        )

    few, many = estimated("pipeline(4)", 2), estimated("pipeline(4)", 8)
    whole = estimated("ddp", 8)
    assert few.idle == pytest.approx(3 / 5)
    assert many.idle == pytest.approx(3 / 11)
    assert "ranks wait 27% of the time" in str(many)
    rates = fa.estimate.Rates(flops=1e9, link=1e12, network=1e12)
    least = fa.estimate.least_time(many, rates)
    assert least.compute == pytest.approx(many.work.flops / 1e9 * 11 / 8)
    assert many.work.flops < whole.work.flops / 2
    activation = ROWS_OF_BATCH // 8 * LENGTH * WIDTH * 4
    sent = many.work.sizes["pp", "send"]
    assert sent in (8 * activation, 16 * activation), "stages between send activations on and gradients back"
    assert many.work.counts["pp", "send"] == sent // activation
    assert estimated("pipeline(4, schedule='gpipe')", 8).total > many.total


def test_a_stage_with_a_tied_head_counts_both():
    def estimated(model):
        return fa.estimate.training(
            fa.accumulate(loss_fn, 2),
            model=fa.distribute(model, "pipeline(2)"),
            optimizer=fa.sgd(1e-3),
            batch=tokens_of("meta"),
            ranks=2,
        )

    class Tied(GPT):
        def __init__(self):
            super().__init__()
            self.head.weight = self.embed.weight

    last = {"parameters", "gradients"}
    tied, own = estimated(Tied), estimated(GPT)
    assert {kind: tied.peak.kinds[kind] for kind in last} == {kind: own.peak.kinds[kind] for kind in last}


@pytest.mark.parametrize(
    ("step", "optimizer", "frozen"),
    [
        (fa.clip_norm(loss_fn, 1.0), fa.sgd(0.1, momentum=0.9), ()),
        (fa.with_ema(loss_fn, 0.9), fa.adamw(1e-3), ()),
        (loss_fn, fa.sgd(0.1), ("embed.*", "blocks.0.*")),
    ],
    ids=["clip", "ema", "frozen"],
)
def test_transforms(pools, step, optimizer, frozen):
    held = pools.run(1, _peak_of_frozen, step, optimizer, frozen)[0]
    estimate = fa.estimate.training(
        step, model=fa.distribute(GPT, "local"), optimizer=optimizer, batch=tokens_of("meta"), frozen=frozen
    )
    assert estimate.total == pytest.approx(held, rel=0.05)


OPTIONS = {
    "fp16": (1, "local", fa.with_precision(loss_fn, "fp16"), fa.adamw(1e-3)),
    "matmuls": (1, "local", fa.remat(loss_fn, save="matmuls"), fa.adamw(1e-3)),
    "adafactor": (1, "local", loss_fn, fa.optim.adafactor(1e-3)),
    "adamw8bit": (1, "local", loss_fn, fa.optim.adamw8bit(1e-3)),
    "rmsprop": (2, "fsdp", loss_fn, fa.optim.from_torch(torch.optim.RMSprop, lr=1e-3)),
    "bf16 accumulated": (2, "fsdp", fa.accumulate(fa.with_precision(loss_fn, "bf16"), 2), fa.adamw(1e-3)),
    "each reduced": (2, "fsdp", fa.accumulate(loss_fn, 2, sync="each"), fa.adamw(1e-3)),
    "whole model gathered": (2, fa.fsdp(units=None), loss_fn, fa.adamw(1e-3)),
    "ignored": (2, fa.fsdp(ignore="embed.*"), loss_fn, fa.adamw(1e-3)),
    "bf16 hook": (2, fa.ddp(hook="bf16"), fa.remat(loss_fn), fa.adamw(1e-3)),
    "part of the ranks": (4, fa.fsdp(reshard_after_forward=2), loss_fn, fa.adamw(1e-3)),
}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "strategy", "step", "optimizer"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_strategies_and_optimizers(pools, ranks, strategy, step, optimizer):
    held = max(pools.run(ranks, peak_of, step, GPT, strategy, optimizer))
    estimate = fa.estimate.training(
        step, model=fa.distribute(GPT, strategy), optimizer=optimizer, batch=tokens_of("meta"), ranks=ranks
    )
    assert estimate.total == pytest.approx(held, rel=0.05)


@pytest.mark.long_except(r"^fsdp-64$")
@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", fa.fsdp(backward_prefetch=2)], ids=str)
def test_it_is_what_the_whole_engine_holds(ranks, strategy):
    """All blocks, with values. 64 ranks divide the rows of few of the parameters."""
    step, optimizer = step_of(remat=True), fa.adamw(1e-3)
    with fa.simulate(ranks=ranks):
        held = peak_of(step, GPT, strategy, optimizer)
    estimate = fa.estimate.training(
        step, model=fa.distribute(GPT, strategy), optimizer=optimizer, batch=tokens_of("meta"), ranks=ranks
    )
    assert estimate.total == pytest.approx(held, rel=1e-3)


class Narrow(nn.Module):
    """A layer whose rows 64 ranks do not divide. They share its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.narrow = nn.Embedding(VOCABULARY, 512), nn.Linear(512, 4, bias=False)

    def forward(self, tokens):
        return self.narrow(self.embed(tokens)).repeat(1, 1, VOCABULARY // 4)


def test_columns_that_are_shared():
    optimizer = fa.adamw(1e-3)
    with fa.simulate(ranks=64):
        held = peak_of(loss_fn, Narrow, "fsdp", optimizer)
    estimate = fa.estimate.training(
        loss_fn, model=fa.distribute(Narrow, "fsdp"), optimizer=optimizer,
        batch=tokens_of("meta"), ranks=64,
    )  # fmt: skip
    assert [each.part for each in estimate.footprint.placed if each.name == "narrow.weight"] == [(4, 8)]
    assert estimate.total == pytest.approx(held, rel=0.02)


def test_the_number_of_blocks_and_of_ranks_costs_nothing():
    """What it traces is the same, and the bytes are linear in the blocks."""

    def estimated(blocks, ranks):
        return fa.estimate.training(
            fa.remat(loss_fn), model=fa.distribute(lambda: GPT(blocks), "fsdp"), optimizer=fa.adamw(1e-3),
            batch=tokens_of("meta"), ranks=ranks,
        )  # fmt: skip

    few, more, most = (estimated(blocks, 2) for blocks in (8, 12, 16))
    assert (few.left_out, more.left_out, most.left_out) == (4, 8, 12)
    assert most.total - more.total == more.total - few.total
    assert estimated(8, 16).total < few.total


def test_mistakes():
    model, optimizer = fa.distribute(GPT, "fsdp(4)"), fa.adamw(1e-3)
    with pytest.raises(errors.AxisProductError, match="and the world has 2"):
        fa.estimate.training(loss_fn, model=model, optimizer=optimizer, batch=tokens_of("meta"), ranks=2)
    for wrong, message in [
        ({"ranks": 0}, "0 ranks can't train"),
        ({"ranks": 8, "per_machine": 3}, "8 ranks do not make machines of 3"),
        ({"ranks": 4, "frozen": "*"}, "no parameter is left to train"),
    ]:
        with pytest.raises(errors.ArgumentError, match=message):
            fa.estimate.training(
                loss_fn,
                model=fa.distribute(GPT, "fsdp"),
                optimizer=optimizer,
                batch=tokens_of("meta"),
                **wrong,
            )
    with pytest.raises(errors.CapabilityError, match="the step fails on tensors without values: "):
        fa.estimate.training(
            loss_fn,
            model=fa.distribute(GPT, "local"),
            optimizer=optimizer,
            batch=torch.ones(2, 8, device="meta"),
        )
    with pytest.raises(errors.ArgumentError, match="a built module was given"):
        fa.estimate.training(
            loss_fn, model=fa.distribute(GPT(1), "local"), optimizer=optimizer, batch=tokens_of("meta")
        )
    with (
        fa.simulate(ranks=2),
        pytest.raises(errors.CapabilityError, match="needs a process group of its own"),
    ):
        fa.estimate.training(
            loss_fn, model=fa.distribute(Llama, fa.tensor(2, LLAMA_PLAN)), optimizer=optimizer,
            batch=tokens_of("meta"), ranks=2,
        )  # fmt: skip


@pytest.mark.long_except(r"Joined-True|Shrinking-False")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("model", [Shrinking, Parallel, Checkpointed, Joined])
def test_blocks_that_are_not_called_one_after_the_other(pools, model, remat, capfd):
    step, optimizer = step_of(remat=remat), fa.adamw(1e-3)
    held = pools.run(1, peak_of, step, model, "local", optimizer)[0]
    capfd.readouterr()
    estimate = fa.estimate.training(
        step, model=fa.distribute(model, "local"), optimizer=optimizer, batch=tokens_of("meta")
    )
    assert estimate.total == pytest.approx(held, rel=0.01)
    assert capfd.readouterr() == ("", "")


def test_blocks_of_which_some_are_not_called():
    def estimated(model):
        return fa.estimate.training(
            loss_fn, model=fa.distribute(model, "local"), optimizer=fa.sgd(0.1), batch=tokens_of("meta")
        )

    some, all_of_them = estimated(EverySecond), estimated(GPT)
    assert (some.left_out, all_of_them.left_out) == (0, 3)
    assert 0.5 < some.work.flops / all_of_them.work.flops < 0.7


class Numbered(GPT):
    """A model that counts on the number of its blocks."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for number in range(7):
            x = self.blocks[number](x)
        return self.head(self.norm(x))


class Choosing(nn.Module):
    """A model whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 8)
        self.head = nn.Linear(8, 400)

    def forward(self, tokens):
        return self.head(self.embed(tokens)) + tokens.nonzero().float().mean()


@pytest.mark.long
def test_models_that_can_not_be_shortened_or_traced():
    def estimated(model):
        return fa.estimate.training(
            loss_fn, model=fa.distribute(model, "local"), optimizer=fa.sgd(0.1), batch=tokens_of("meta")
        )

    assert estimated(Numbered).left_out == 0
    assert estimated(Numbered).total == estimated(GPT).total
    with pytest.raises(errors.CapabilityError, match="an operation of the model needs values") as caught:
        estimated(Choosing)
    assert "fix: estimate a variant of the model without it" in str(caught.value)


@pytest.mark.long
def test_offloaded_bytes_are_on_the_host():
    def estimated(strategy):
        return fa.estimate.training(
            loss_fn,
            model=fa.distribute(GPT, strategy),
            optimizer=fa.adamw(1e-3),
            batch=tokens_of("meta"),
            ranks=2,
        )

    plain, offloaded = estimated("fsdp"), estimated(fa.fsdp(offload=True))
    assert plain.on_device == plain.total == offloaded.total
    kinds = offloaded.peak.kinds
    host = kinds["parameters"] + kinds["optimizer"] + kinds.get("gradients", 0)
    assert offloaded.on_device == offloaded.total - host
    assert "of it on the device" in str(offloaded)


def _peak_of_frozen(step, optimizer, frozen):
    train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=optimizer, frozen=frozen)
    state, tokens = train_step.init(seed=0), tokens_of()
    state, _ = train_step(state, tokens)
    with fa.estimate.LiveStorages(arguments=True) as storages:
        state, _ = train_step(state, tokens)
        storages.begin()
        state, _ = train_step(state, tokens)
    return storages.peak


@functools.cache
def table():
    """What a library would keep for the process."""
    return tuple(torch.linspace(0.0, 1.0, 5).tolist())


class FromTable(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["codes"] = torch.zeros_like(param) + torch.tensor(table()).sum()
        return super().step(closure)


def test_tables_that_libraries_keep_have_their_values():
    """torchao's map of 8-bit codes had ones only, and training after an estimate was wrong."""
    fa.estimate.training(
        loss_fn,
        model=fa.distribute(Perceptron, "local"),
        optimizer=fa.optim.from_torch(FromTable, lr=0.1),
        batch=tokens_of("meta"),
    )
    assert table() == (0.0, 0.25, 0.5, 0.75, 1.0)
