"""The graph of a total shows whether it is a mean, and a loss is called once an update."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.step.loss import read_loss
from fnaccel.step.total_graph import check_total
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

TEMPERATURE = 0.1
NOT_CHECKED = "is a mean was not checked"


def sequence():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def rows_of(batch):
    return len(batch[0])


def squared(model, batch):
    x, y = batch
    return (model(x) - y).square()


def smooth(model, batch):
    x, y = batch
    return F.cross_entropy(torch.cat([model(x), -model(x)], dim=1), (y[:, 0] > 0).long(), label_smoothing=0.1)


def penalty(model):
    return sum(
        p.square().sum() for p in (model.inp.weight, model.inp.bias)
    )  # the root's are whole under fsdp


# each trained with gradients that were too small or too large by the number of rows
WRONG = {
    "label smoothing": lambda m, b: fa.Mean(smooth(m, b), weight=rows_of(b)),
    "a mean and L2": lambda m, b: fa.Mean(squared(m, b).mean() + 0.01 * penalty(m), weight=rows_of(b)),
    "two means": lambda m, b: fa.Mean(squared(m, b).mean() + m(b[0]).abs().mean(), weight=rows_of(b)),
    "a sum by its rows": lambda m, b: fa.Mean(squared(m, b).sum() / rows_of(b), weight=rows_of(b)),
    "a mean for each of 16 times": lambda m, b: fa.Mean(
        sum(F.mse_loss(m(time * b[0]), b[1]) for time in range(16)), weight=rows_of(b)
    ),
    "half a mean of tokens": lambda m, b: fa.Mean(0.5 * squared(m, b).mean(dim=1).mean(), 3 * rows_of(b)),
    "a loss for each row": lambda m, b: fa.Mean(
        torch.stack([loss[0] for loss in squared(m, b)]).mean(), weight=rows_of(b)
    ),
}


def contrastive(model, batch):
    z = F.normalize(torch.cat([model(batch[0]), batch[1]], dim=1), dim=1)
    logits = z @ z.T / TEMPERATURE
    return fa.Mean(F.cross_entropy(logits, torch.arange(len(z)), reduction="sum"), weight=len(z))


def pairs(model, batch):
    out = model(batch[0])
    return fa.Mean(torch.cdist(out, out + 1.0).sum(), weight=len(out))


def hinge(model, batch):
    x, y = batch
    return fa.Mean((1.0 - y.sign() * model(x)).clamp(min=0).sum(), weight=len(y))


def gradient_penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return fa.Mean((squared(model, batch).sum() + slope.square().sum()), weight=len(x))


RIGHT = {
    "a sum": loss_fn,
    "contrastive": contrastive,
    "pairs": pairs,
    "hinge": hinge,
    "a gradient penalty": gradient_penalty,
    "a mean of weight 1": lambda m, b: fa.Mean(squared(m, b).mean(), weight=1),
    "a bare mean": lambda m, b: squared(m, b).mean(),
    "a mean times its rows": lambda m, b: fa.Mean.of(squared(m, b).mean(), rows_of(b)),
    "a sum and a large L2": lambda m, b: fa.Mean(squared(m, b).sum() + 100.0 * penalty(m), weight=rows_of(b)),
    "zero": lambda m, b: fa.Mean(0.0 * squared(m, b).sum(), weight=rows_of(b)),
    "means of two heads": lambda m, b: fa.Mean.of(
        torch.stack([squared(m, b).mean(), m(b[0]).abs().mean()]).sum(), rows_of(b)
    ),
}


# right, or not to be told from its graph
UNKNOWN = {
    "a mean times its tokens": lambda m, b: fa.Mean(squared(m, b).mean() * 24, weight=rows_of(b)),
    "a learned weight": lambda m, b: fa.Mean(squared(m, b).mean() * m.out.bias.exp().sum(), rows_of(b)),
    "half a sum of two rows": lambda m, b: fa.Mean(squared(m, b)[:2].sum() / 2, weight=2),
    "a root": lambda m, b: fa.Mean(squared(m, b).sum().sqrt(), weight=rows_of(b)),
    "a mean for each row": lambda m, b: fa.Mean(
        sum(F.mse_loss(m(x), y) for x, y in zip(*b, strict=True)), rows_of(b)
    ),
    "two means for each row": lambda m, b: fa.Mean(
        sum(F.mse_loss(m(x), y) + m(x).abs().mean() for x, y in zip(*b, strict=True)), rows_of(b)
    ),
    "a sum and a mean": lambda m, b: fa.Mean(squared(m, b).sum() + m(b[0]).mean(), weight=rows_of(b)),
    "weights that sum to one": lambda m, b: fa.Mean.of(
        (squared(m, b) * torch.softmax(b[1], dim=0)).sum(), rows_of(b)
    ),
}


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def first_step(loss, **options):
    train_step = program(loss, **options)
    state = train_step.init()
    return train_step(state, batch_of(8)), train_step


def logits_and_labels():
    layer = nn.Linear(4, 3)
    x, labels, probabilities = torch.randn(8, 4), torch.arange(8) % 3, torch.rand(8, 3)
    return layer, layer(x), labels, probabilities.softmax(1)


# the result of each is a mean over 8 rows of 3 logits, or a sum
MEANS = {
    "cross entropy": lambda m, z, y, t: F.cross_entropy(z, y),
    "with smoothing": lambda m, z, y, t: F.cross_entropy(z, y, label_smoothing=0.1),
    "of probabilities": lambda m, z, y, t: F.cross_entropy(z, t),
    "squares": lambda m, z, y, t: F.mse_loss(z, t),
    "squares by hand": lambda m, z, y, t: (z - t).square().mean(),
    "a sum by its rows": lambda m, z, y, t: F.cross_entropy(z, y, reduction="sum") / len(y),
    "binary": lambda m, z, y, t: F.binary_cross_entropy_with_logits(z, t),
    "with L2": lambda m, z, y, t: F.cross_entropy(z, y) + 0.01 * m.weight.square().sum(),
    "with a norm": lambda m, z, y, t: F.cross_entropy(z, y) + 0.01 * m.weight.norm(),
    "two": lambda m, z, y, t: F.cross_entropy(z, y) + F.mse_loss(z, t),
    "of rows": lambda m, z, y, t: F.cross_entropy(z, y, reduction="none").mean(),
    "huber": lambda m, z, y, t: F.smooth_l1_loss(z, t),
    "l1": lambda m, z, y, t: F.l1_loss(z, t),
    "of a batch": lambda m, z, y, t: F.kl_div(z.log_softmax(1), t, reduction="batchmean"),
    "in another dtype": lambda m, z, y, t: F.cross_entropy(z, y).double(),
    "over two dimensions": lambda m, z, y, t: z.square().mean((0, 1)),
    "a difference": lambda m, z, y, t: 1 - z.sigmoid().mean(),
}
SUMS = {
    "cross entropy": lambda m, z, y, t: F.cross_entropy(z, y, reduction="sum"),
    "with smoothing": lambda m, z, y, t: F.cross_entropy(z, y, label_smoothing=0.1, reduction="sum"),
    "a mean times its rows": lambda m, z, y, t: F.cross_entropy(z, y) * len(y),
    "its rows times a mean": lambda m, z, y, t: torch.tensor(8.0) * F.cross_entropy(z, y),
    "squares": lambda m, z, y, t: F.mse_loss(z, t, reduction="sum"),
    "means of rows": lambda m, z, y, t: (z - t).square().mean(-1).sum(),
    "binary": lambda m, z, y, t: F.binary_cross_entropy_with_logits(z, t, reduction="sum"),
    "a mean by hand times its rows": lambda m, z, y, t: F.mse_loss(z, t, reduction="sum") / len(y) * len(y),
    "a tenth": lambda m, z, y, t: 0.1 * F.mse_loss(z, t, reduction="sum"),
}


class TestGraphs:
    @pytest.mark.parametrize("name", MEANS)
    def test_a_mean_is_seen(self, name):
        parts = read_loss(fa.Mean(MEANS[name](*logits_and_labels()), weight=8), "here")
        with pytest.raises(errors.LossError, match=r"this one is a mean .*8 times too small"):
            check_total(parts, "here")

    @pytest.mark.parametrize("name", SUMS)
    def test_a_sum_is_seen(self, name):
        assert check_total(read_loss(fa.Mean(SUMS[name](*logits_and_labels()), weight=8), "here"), "here")

    def test_a_long_sum_takes_little(self):
        _, z, y, _ = logits_and_labels()
        many = sum(F.cross_entropy(z, y, reduction="sum") for _ in range(3000))
        assert not check_total(read_loss(fa.Mean(many, weight=8), "here"), "here")


class TestLosses:
    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
    @pytest.mark.parametrize("name", WRONG)
    def test_a_mean_that_is_given_as_a_total_is_named(self, name, strategy):
        train_step = program(WRONG[name], strategy=strategy)
        state = train_step.init()
        before = whole_params(state)
        with pytest.raises(errors.LossError, match=r"is a mean[\s\S]*fa\.Mean\.of\(mean, weight"):
            train_step(state, batch_of(8))
        assert fa.tree.allclose(whole_params(train_step.live_state), before, rtol=0, atol=0)
        with pytest.raises(errors.LossError, match="is a mean"):  # and not only once
            train_step(state, batch_of(8))

    def test_a_sum_that_is_given_as_a_mean_is_named(self):
        def loss(model, batch):
            return fa.Mean.of(F.mse_loss(model(batch[0]), batch[1], reduction="sum"), rows_of(batch))

        with pytest.raises(errors.LossError, match=r"fa\.Mean\.of takes a mean[\s\S]*8 times too large"):
            first_step(loss)

    def test_under_accumulation_and_a_window(self):
        with pytest.raises(errors.LossError, match="is a mean"):
            first_step(fa.accumulate(WRONG["label smoothing"], 2))
        train_step = program(WRONG["label smoothing"])
        with pytest.raises(errors.LossError, match="is a mean"):
            train_step(train_step.init(), fa.data.Window([batch_of(4), batch_of(4)]))

    def test_a_weight_that_is_known_before_counts_too(self):
        step = fa.with_weight(lambda m, b: squared(m, b).mean(), rows_of)
        with pytest.raises(errors.LossError, match=r"fa\.with_weight takes a total[\s\S]*return a sum"):
            first_step(step)

    def test_with_a_lent_model(self):
        teacher = fa.train_step(loss_fn, model=fa.distribute(Net, "local"), optimizer=None)

        def distil(model, batch, given):
            return fa.Mean(
                (model(batch[0]) - given["teacher"](batch[0])).square().mean(), weight=len(batch[0])
            )

        train_step = program(distil)
        with pytest.raises(errors.LossError, match="is a mean"):
            train_step(train_step.init(seed=1), batch_of(8), given={"teacher": teacher.init()})

    @pytest.mark.parametrize("strategy", ["local", "fsdp"])
    @pytest.mark.parametrize("name", RIGHT)
    def test_no_other_loss_is_accused(self, name, strategy):
        if (name, strategy) == ("a gradient penalty", "fsdp"):
            strategy = "ddp"  # a second derivative through a unit is FSDP2's own error
        (state, _), train_step = first_step(RIGHT[name], strategy=strategy)
        assert state.step == 1
        assert NOT_CHECKED not in str(train_step.plan)

    @pytest.mark.parametrize("name", UNKNOWN)
    def test_the_plan_names_a_total_that_was_not_checked(self, name):
        train_step = program(UNKNOWN[name])
        state = train_step.init()
        assert NOT_CHECKED not in str(train_step.plan)
        train_step(state, batch_of(8))
        assert NOT_CHECKED in str(train_step.plan)
        train_step.init()  # and ranks compare plans without it

    @pytest.mark.parametrize("scope", ["loss", "step"])
    def test_the_plan_names_a_compiled_loss(self, scope):
        _, train_step = first_step(fa.compile(loss_fn, scope=scope, backend="eager"))
        assert (NOT_CHECKED in str(train_step.plan)) == (scope == "step")  # eager graphs of a loss show it
        _, bare = first_step(fa.compile(lambda m, b: squared(m, b).mean(), scope=scope, backend="eager"))
        assert NOT_CHECKED not in str(bare.plan)


class TestCalls:
    """A loss may draw from a queue, train another model, or count: it is called as often as in a raw loop."""

    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
    def test_a_loss_is_called_once_a_micro_batch(self, strategy):
        calls = []

        def loss(model, batch):
            calls.append(len(batch[0]))
            return loss_fn(model, batch)

        train_step = program(fa.accumulate(loss, 2), strategy=strategy)
        state = train_step.init()
        for _ in range(2):
            state, _ = train_step(state, batch_of(8))
        assert calls == [4] * 4

    def test_a_metric_function_is_called_once_a_batch(self):
        calls = []

        def score(model, batch):
            calls.append(len(batch[0]))
            return {"error": fa.Mean(squared(model, batch).mean(), weight=rows_of(batch))}

        train_step = program()
        rows = DataLoader(TensorDataset(*batch_of(8)), batch_size=4)
        fa.evaluate(train_step, train_step.init(), score, fa.shard(rows))
        assert calls == [4, 4]

    def test_what_another_thread_writes_meanwhile_stays(self):
        """The items of a list that a reader thread fills."""
        items, ended = [], threading.Event()

        def loss(model, batch):
            assert isinstance(items, list)
            time.sleep(0.02)
            return loss_fn(model, batch)

        def read():
            while not ended.is_set():
                items.append(len(items))
                time.sleep(0.001)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            first_step(loss)
        finally:
            ended.set()
            reader.join()
        assert items == list(range(len(items)))

    def test_an_error_of_the_user_s_is_raised_once(self):
        """One that a check would swallow, such as that of a timeout."""
        alarms = [TimeoutError("of the user")]

        def loss(model, batch):
            if alarms:
                raise alarms.pop()
            return loss_fn(model, batch)

        train_step = program(loss)
        state = train_step.init()
        with pytest.raises(TimeoutError, match="of the user"):
            train_step(state, batch_of(8))
        assert train_step.live_state is state


def one_sided():
    """A loss that holds a mean on rank 1 only."""

    def loss(model, batch):
        mean = (model(batch[0]) - batch[1]).square().mean()
        return fa.Mean(mean * (1 if current().rank else len(batch[1])), weight=len(batch[1]))

    train_step = program(loss, strategy="ddp")
    train_step(train_step.init(), batch_of(4))


@pytest.mark.long
def test_a_rank_that_raises_alone_ends_the_step_of_all(pools):
    """Rank 0, whose error is shown, learns of it."""
    with pytest.raises(errors.PeerLostError, match="is a mean"):
        pools.run(2, one_sided)
