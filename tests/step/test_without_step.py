"""Transforms that are called without a step: frozen records, decorators, `fa.chain`."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, RepeatedTransformError
from tests.tiny_models import Net


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean(nn.functional.cross_entropy(model(x), y, reduction="sum"), weight=len(y))


def rows_of(batch):
    return len(batch[1])


WITHOUT = {
    "accumulate": lambda: fa.accumulate(4),
    "accumulate, each": lambda: fa.accumulate(4, sync="each"),
    "attention": lambda: fa.transforms.attention("math"),
    "cast_layers": lambda: fa.transforms.cast_layers("bf16", compute="fp32"),
    "chunked_head": lambda: fa.transforms.chunked_head("head", rows=64),
    "clip_norm": lambda: fa.clip_norm(1.0),
    "clip_norm, by name": lambda: fa.clip_norm(max_norm=1.0),
    "clip_value": lambda: fa.clip_value(0.5),
    "compile": lambda: fa.compile(),
    "compile, a scope": lambda: fa.compile("loss", backend="eager"),
    "momentum_teacher": lambda: fa.transforms.momentum_teacher(decay=0.9),
    "on_spike": lambda: fa.transforms.on_spike(do="skip"),
    "per_example": lambda: fa.per_example(clip=1.0),
    "per_example, noise": lambda: fa.per_example(clip=1.0, noise=1.1),
    "perturb": lambda: fa.perturb(rows_of),
    "remat": lambda: fa.remat(units=("Block",), save="attention"),
    "skip_nonfinite": lambda: fa.skip_nonfinite(),
    "sync_batch_norm": lambda: fa.transforms.sync_batch_norm(),
    "with_ema": lambda: fa.with_ema(0.9),
    "with_precision": lambda: fa.with_precision("bf16"),
    "with_precision, fp8": lambda: fa.with_precision("fp8"),
    "with_weight": lambda: fa.with_weight(rows_of),
    "with_weight, by name": lambda: fa.with_weight(weight_fn=rows_of),
}  # fmt: skip
WITH = {
    "accumulate": lambda: fa.accumulate(loss_fn, 4),
    "accumulate, each": lambda: fa.accumulate(loss_fn, 4, sync="each"),
    "attention": lambda: fa.transforms.attention(loss_fn, "math"),
    "cast_layers": lambda: fa.transforms.cast_layers(loss_fn, "bf16", compute="fp32"),
    "chunked_head": lambda: fa.transforms.chunked_head(loss_fn, "head", rows=64),
    "clip_norm": lambda: fa.clip_norm(loss_fn, 1.0),
    "clip_norm, by name": lambda: fa.clip_norm(loss_fn, max_norm=1.0),
    "clip_value": lambda: fa.clip_value(loss_fn, 0.5),
    "compile": lambda: fa.compile(loss_fn),
    "compile, a scope": lambda: fa.compile(loss_fn, "loss", backend="eager"),
    "momentum_teacher": lambda: fa.transforms.momentum_teacher(loss_fn, decay=0.9),
    "on_spike": lambda: fa.transforms.on_spike(loss_fn, do="skip"),
    "per_example": lambda: fa.per_example(loss_fn, clip=1.0),
    "per_example, noise": lambda: fa.per_example(loss_fn, clip=1.0, noise=1.1),
    "perturb": lambda: fa.perturb(loss_fn, rows_of),
    "remat": lambda: fa.remat(loss_fn, units=("Block",), save="attention"),
    "skip_nonfinite": lambda: fa.skip_nonfinite(loss_fn),
    "sync_batch_norm": lambda: fa.transforms.sync_batch_norm(loss_fn),
    "with_ema": lambda: fa.with_ema(loss_fn, 0.9),
    "with_precision": lambda: fa.with_precision(loss_fn, "bf16"),
    "with_precision, fp8": lambda: fa.with_precision(loss_fn, "fp8"),
    "with_weight": lambda: fa.with_weight(loss_fn, rows_of),
    "with_weight, by name": lambda: fa.with_weight(loss_fn, weight_fn=rows_of),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_it_is_applied_later(name):
    record = WITHOUT[name]()
    assert isinstance(record, fa.Transform | fa.transforms.Chain)
    assert record(loss_fn) == WITH[name]()


def test_every_transform_is_here():
    makers = {
        name
        for room in (fa, fa.transforms)
        for name in dir(room)
        if inspect.isfunction(value := getattr(room, name))
        and next(iter(inspect.signature(value).parameters), "") == "step"
    }
    assert makers - {"train_step"} == {name.partition(",")[0] for name in WITHOUT}


def test_a_decorator():
    @fa.clip_norm(1.0)
    @fa.accumulate(2)
    def loss(model, batch):
        return loss_fn(model, batch)

    assert [t.name for t in loss.transforms] == ["accumulate", "clip_norm"]
    with fa.start(device="cpu"):
        train_step = fa.train_step(loss, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.1))
        batch = torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)
        _, metrics = train_step(train_step.init(), batch)
    assert "grad_norm" in metrics


def test_a_chain_applies_from_left_to_right():
    chain = fa.chain(fa.with_precision("bf16"), fa.clip_norm(1.0))
    assert chain(loss_fn) == fa.clip_norm(fa.with_precision(loss_fn, "bf16"), 1.0)
    longer = fa.chain(chain, fa.with_ema(0.9))
    assert [t.name for t in longer(loss_fn).transforms] == ["with_precision", "clip_norm", "with_ema"]
    assert longer == fa.chain(fa.with_precision("bf16"), fa.clip_norm(1.0), fa.with_ema(0.9))
    assert fa.chain()(loss_fn) == fa.Step(loss_fn)
    assert hash(chain) == hash(fa.chain(fa.with_precision("bf16"), fa.clip_norm(1.0)))
    assert repr(chain) == "chain(with_precision, clip_norm)"


def test_a_chain_takes_functions_of_a_step():
    def careful(step):
        return fa.clip_norm(fa.skip_nonfinite(step), 1.0)

    chain = fa.chain(
        fa.remat, careful, fa.Transform("own", fa.Phase.UPDATE, apply=lambda params, own, info: own)
    )
    assert [t.name for t in chain(loss_fn).transforms] == ["remat", "skip_nonfinite", "clip_norm", "own"]


def test_what_can_not_be_in_a_chain():
    with pytest.raises(ArgumentError, match=r"fa\.chain got 1\.0"):
        fa.chain(fa.with_ema(0.9), 1.0)
    with pytest.raises(ArgumentError, match=r"lambda.* returned float, not a step"):
        fa.chain(lambda step: 1.0)(loss_fn)
    with pytest.raises(RepeatedTransformError):
        fa.chain(fa.clip_norm(1.0), fa.clip_norm(2.0))(loss_fn)
    with pytest.raises(ArgumentError, match="needs more than a step: max_norm"):
        fa.chain(fa.clip_norm)


@pytest.mark.parametrize(
    "step",
    [
        lambda: fa.clip_norm(1.0),
        lambda: fa.chain(fa.clip_norm(1.0)),
        lambda: fa.clip_norm,
        lambda: functools.partial(fa.clip_norm, max_norm=1.0),
        lambda: fa.Transform("own", fa.Phase.FORWARD, apply=lambda fn: fn),
    ],
    ids=["record", "chain", "function", "partial", "own"],
)
@pytest.mark.parametrize("use", ["train_step", "transform", "chain"])
def test_a_transform_is_no_loss(step, use):
    uses = {
        "train_step": lambda: fa.train_step(step(), model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.1)),
        "transform": lambda: fa.accumulate(step(), 4),
        "chain": lambda: fa.chain(fa.accumulate(4))(step()),
    }
    with fa.start(device="cpu"), pytest.raises(ArgumentError, match="without a step"):
        uses[use]()


def test_a_class_is_no_step():
    with pytest.raises(ArgumentError, match=r"Linear is a class[^$]*units=Linear"):
        fa.remat(nn.Linear)


def test_bad_options_raise_at_once():
    for make, text in (
        (lambda: fa.clip_norm(-1.0), "clipped to -1.0"),
        (lambda: fa.accumulate(0), "accumulated over 0"),
        (lambda: fa.with_precision("bf17"), "bf17"),
        (lambda: fa.with_weight(3), "can't be called"),
        (lambda: fa.accumulate(None, 4), "not NoneType"),
        (lambda: fa.skip_nonfinite(5), "not int"),
    ):
        with pytest.raises(fa.errors.FnaccelError, match=text):
            make()
    with pytest.raises(TypeError, match="max_norm"):
        fa.clip_norm()
    with pytest.raises(TypeError, match="typo"):
        fa.clip_norm(loss_fn, 1.0, typo=1)
    for make in (lambda: fa.clip_norm(typo=1), lambda: fa.compile("loss", typo=1)):
        with pytest.raises(TypeError, match="typo"):
            make()


def test_signatures_show_the_step():
    assert list(inspect.signature(fa.clip_norm).parameters) == ["step", "max_norm"]
    assert inspect.signature(fa.clip_norm).return_annotation == "Step"
    assert inspect.getdoc(fa.clip_norm).startswith("Clip the global gradient norm")
