"""Losses, metrics and schedules that return what can't be used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import Net, batch_of, program, whole_params


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def mean(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


other = Net()
LOSSES = {
    "another model": (lambda m, b: mean(other, b), "no trainable parameter got a gradient"),
    "complex": (lambda m, b: mean(m, b) * 1j, "the loss is complex"),
    "text in aux": (
        lambda m, b: (mean(m, b), {"name": "a"}),
        "a str says nothing of how it combines|aux holds str",
    ),
    "a scalar in Concat": (
        lambda m, b: (mean(m, b), {"a": fa.Concat(mean(m, b))}),
        "Concat holds a 0-d tensor",
    ),
    "a text in Concat": (lambda m, b: (mean(m, b), {"a": fa.Concat("ab")}), "Concat holds str"),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("scope", [None, "step"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_used_is_named(name, scope, micro_batches):
    loss_fn, said = LOSSES[name]
    step = fa.accumulate(loss_fn, micro_batches)
    if scope is not None:
        step = fa.compile(step, scope, backend="eager")
    train_step = program(step)
    state = train_step.init()
    with pytest.raises(errors.LossError, match=said):
        train_step(state, batch_of(4))
    assert train_step.live_state is state
    train_step.close()


@pytest.mark.parametrize("strategy", ["local", "ddp", "ddp(hook='bf16', unused_parameters=True)", "fsdp"])
def test_a_loss_that_reaches_one_parameter_is_fine(strategy):
    train_step = program(lambda m, b: m.out(torch.ones(1, 6)).sum(), strategy=strategy)
    _, metrics = train_step(train_step.init(), batch_of(4))
    assert float(metrics["loss"]) != 0.0
    train_step.close()


@pytest.mark.parametrize(
    "schedule",
    [lambda _: None, lambda _: "x", lambda _: -0.1, lambda _: float("nan"), lambda _: torch.ones(2)],
)
@pytest.mark.parametrize("group", [False, True])
def test_a_schedule_that_gives_no_rate_is_named(schedule, group):
    optimizer = fa.sgd(0.1, groups={"out.*": {"lr": schedule}}) if group else fa.sgd(schedule)
    with pytest.raises(errors.ArgumentError, match="for update 0, not a rate"):
        program(optimizer=optimizer).init()


@pytest.mark.parametrize("made", [3, None, torch.optim.lr_scheduler.StepLR])
def test_what_is_no_scheduler_is_not_said_to_need_a_metric(made):
    with pytest.raises(errors.ArgumentError, match="which is no scheduler"):
        fa.schedules.from_torch_scheduler(lambda _: made, lr=0.1)


class TestMeansThatAreDivided:
    def test_of_a_mean_equals_a_sum(self):
        def divided(model, batch):
            x, y = batch
            return fa.Mean.of((model(x) - y).square().mean(), weight=y.numel())

        def total(model, batch):
            x, y = batch
            return fa.Mean((model(x) - y).square().sum(), weight=y.numel())

        runs = []
        for loss in (divided, total):
            step = program(fa.accumulate(loss, 3))
            state, metrics = step(step.init(seed=0), batch_of(7))
            runs.append((float(metrics["loss"]), whole_params(state)))
        assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)
        for name, value in runs[0][1].items():
            assert torch.allclose(value, runs[1][1][name], atol=1e-7)

    @pytest.mark.parametrize(("shift", "weight"), [(True, 3), (False, 4)])
    def test_of_tokens_counts_labels(self, shift, weight):
        labels = torch.tensor([[-100, 5, 6, -100], [7, 8, -100, -100]])
        logits = torch.randn(2, 4, 9)
        seen, wanted = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
        mean = F.cross_entropy(seen.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss = fa.Mean.of_tokens(mean, labels, shift=shift)
        assert int(loss.weight) == weight
        summed = F.cross_entropy(seen.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
        assert torch.allclose(loss.total, summed)

    @pytest.mark.parametrize(
        ("total", "raises"),
        [
            (lambda out, y: (out - y).square().mean(), "MeanBackward0"),
            (F.mse_loss, "MseLossBackward0"),
            (lambda out, y: F.cross_entropy(out, y.argmax(-1)), "NllLossBackward0"),
            (lambda out, y: F.mse_loss(out, y, reduction="sum"), ""),
            (lambda out, y: F.mse_loss(out, y) * y.numel(), ""),
            (lambda out, y: (out - y).square().sum().reshape(1).mean(), ""),  # of one element
        ],
    )
    @pytest.mark.parametrize("strategy", ["local", "ddp"])
    def test_a_mean_with_a_weight_is_named(self, strategy, total, raises):
        def loss(model, batch):
            x, y = batch
            return fa.Mean(total(model(x), y), weight=y.numel())

        step = program(loss, strategy=strategy)
        state = step.init()
        if raises:
            with pytest.raises(errors.LossError, match=r"a mean[\s\S]*fa\.Mean\.of"):
                step(state, batch_of(8))
        else:
            step(state, batch_of(8))

    def test_a_mean_of_weight_one_is_a_loss_of_its_own(self):
        step = program(lambda model, batch: fa.Mean((model(batch[0]) - batch[1]).square().mean(), weight=1))
        step(step.init(), batch_of(8))


def weighted_by_the_batch(captured):
    """The loss of one step whose weight comes from the batch: a weight of the loss counts for nothing."""

    def loss(model, batch):
        x, y = batch
        return fa.Mean(F.mse_loss(model(x), y, reduction="sum"), weight=7 * y.numel())

    step = fa.with_weight(loss, lambda batch: len(batch[0]))
    step = fa.compile(step, "step", backend="aot_eager") if captured else step
    train_step = program(step, strategy="ddp")
    return float(train_step(train_step.init(seed=0), batch_of(8))[1]["loss"])


@pytest.mark.long
def test_a_weight_of_the_batch_is_treated_alike_in_a_graph(pools):
    eager, captured = (pools.run(2, weighted_by_the_batch, captured) for captured in (False, True))
    assert captured == pytest.approx(eager, rel=1e-6)


NO_LOSSES = {
    "clip_norm": lambda: fa.clip_norm(program(), 1.0),
    "compile": lambda: fa.compile(program()),
    "accumulate": lambda: fa.accumulate(program(), 2),
    "chain": lambda: fa.chain(fa.clip_norm(1.0))(program()),
    "with_precision": lambda: fa.with_precision(program(), "bf16"),
    "train_step": lambda: program(program()),
    "a pure update": lambda: fa.clip_norm(fa.pure(program()), 1.0),
    "a module": lambda: fa.with_ema(Net(), 0.9),
}


@pytest.mark.parametrize("name", NO_LOSSES)
def test_a_transform_goes_around_a_loss_and_nothing_else(name):
    """Around a train step it was dropped without a word."""
    with pytest.raises(
        errors.ArgumentError, match=r"is no loss function[\s\S]*fa\.train_step\(fa\.clip_norm"
    ):
        NO_LOSSES[name]()
