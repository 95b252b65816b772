"""Weights of a loss that are zero, bad, or of two kinds; loss scales that sink."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.engine import scoring
from fnaccel.step import loss
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

BAD = [-1.0, float("nan"), float("inf")]


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


def weighed(weight):
    def weighed_loss(model, batch):
        x, y = batch
        return fa.Mean(F.mse_loss(model(x), y, reduction="sum"), weight=weight(x))

    return weighed_loss


def first_negative(x):
    """The rows whose first feature is negative, as a tensor."""
    return (x[:, 0] < 0).sum()


def labelled(model, batch):
    """A mean over the rows that have a label: NaN without any, as cross entropy gives it."""
    x, labels = batch
    logits = torch.cat([model(x), -model(x)], dim=1)
    count = (labels >= 0).sum()
    return fa.Mean(F.cross_entropy(logits, labels, ignore_index=-1) * count, weight=count)


@pytest.mark.parametrize("scope", [None, "step"])
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_a_weight_of_zero_is_no_update(world, scope, kind):
    step = fa.with_ema(weighed(lambda x: kind(0)), 0.5)
    step = step if scope is None else fa.compile(step, scope, backend="eager")
    train_step = program(step, optimizer=fa.adamw(0.1, weight_decay=0.5))
    state = train_step.init()
    before = fa.snapshot(state)
    state, metrics = train_step(state, batch_of(4))
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["skipped"]) == 1.0
    assert state.updates == 0
    assert state.step == 1
    for field in ("params", "opt", "ema"):
        assert fa.tree.allclose(getattr(state, field), getattr(before, field), rtol=0, atol=0)


@pytest.mark.parametrize("scope", [None, "step"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_micro_batch_without_labels_counts_for_nothing(world, scope, accumulate):
    x, _ = batch_of(4)
    some, none = torch.tensor([0, 1, 1, -1]), torch.full((4,), -1)
    step = fa.accumulate(labelled, accumulate)
    step = step if scope is None else fa.compile(step, scope, backend="eager")
    train_step, plain = program(step), program(labelled)
    window = fa.data.Window([(x, none), (x, some)])
    state, metrics = train_step(train_step.init(), window)
    expected, wanted = plain(plain.init(), (x, some))
    assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-6, abs=1e-6)
    for name, value in whole_params(expected).items():
        assert torch.allclose(value, state.params[name], atol=1e-6)


def over_nothing(model, batch):
    """A mean that is NaN without labels, and whose gradient divides 0 by 0."""
    x, y = batch
    used = (y >= 0).float()
    logits = torch.cat([model(x), -model(x)], dim=1)
    each = F.cross_entropy(logits, y.clamp(min=0), reduction="none")
    return fa.Mean((each * used).sum() / used.sum() * used.sum(), used.sum())


def trained_on(strategy, ranks_without_labels, accumulate):
    """The parameters after one update; the first window's first batch has no labels on those ranks."""
    train_step = program(fa.accumulate(over_nothing, 1), strategy=strategy)
    x, _ = batch_of(4)
    some, none = torch.tensor([0, 1, 1, 0]), torch.full((4,), -1)
    bare = train_step.mesh.world.rank in ranks_without_labels
    micros = [(x, none if bare or index else some) for index in range(accumulate)]
    state, metrics = train_step(train_step.init(), fa.data.Window(micros))
    return float(metrics["loss"]), whole_params(state)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_over_nothing_is_nothing(pools, strategy, accumulate):
    wanted_loss, wanted = pools.run(1, trained_on, "local", (), 1)[0]
    for found, params in pools.run(2, trained_on, strategy, (1,), accumulate):
        assert found == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)
        for name, value in wanted.items():
            assert torch.allclose(params[name], value, atol=1e-6)


def test_aux_over_nothing_counts_for_nothing(world):
    def with_aux(model, batch):
        x, y = batch
        used = (y >= 0).float()
        mean = (model(x)[:, 0] * used).sum().detach() / used.sum()
        return fa.Mean(
            F.mse_loss(model(x)[:, 0], used, reduction="sum"), len(x), {"mean": fa.Mean(mean, used.sum())}
        )

    train_step = program(with_aux)
    x, _ = batch_of(4)
    window = fa.data.Window([(x, torch.full((4,), -1)), (x, torch.ones(4))])
    _, metrics = train_step(train_step.init(), window)
    assert torch.isfinite(metrics["mean"])


# the labels of three batches: some, none, some
LABELS = [torch.tensor([[0, 1, -100, 1]]), torch.full((1, 4), -100), torch.tensor([[0, -100, 0, 0]])]


def of_labels(model, batch):
    """Means over the labels of a batch and over those of each class: NaN if there are none."""
    x, labels = batch
    counts = labels[..., 1:] != -100
    of_class = torch.stack([(labels[..., 1:] == number).sum() for number in range(2)])
    each = model(x[..., :3]).flatten() * torch.ones_like(counts)
    of_each = torch.stack([each[labels[..., 1:] == number].mean() for number in range(2)])
    return {
        "tokens": fa.Mean.of_tokens(each[counts].mean(), labels),
        "classes": fa.Mean(of_each * of_class, of_class),
        "number": fa.Mean(each[counts].mean() * counts.sum(), weight=int(counts.sum())),
        "plain": fa.Mean(float(each[counts].mean().detach()) * int(counts.sum()), weight=counts.sum()),
    }


def rows_of_labels():
    x, _ = batch_of(len(LABELS))
    return x, torch.cat(LABELS)


def by_hand():
    torch.manual_seed(0)
    model = Net()
    x, labels = rows_of_labels()
    each = (model(x) * torch.ones(1, 3)).detach()
    labels = labels[:, 1:]
    mean = each[labels != -100].mean()
    classes = torch.stack([each[labels == number].mean() for number in range(2)])
    return {"tokens": mean, "classes": classes, "number": mean, "plain": mean}


def scored(strategy):
    """The metrics, and the same values as aux of a step of three micro-batches on one rank."""

    def loss_of(model, batch):
        aux = of_labels(model, batch)
        return fa.Mean(model(batch[0]).sum(), len(batch[0]), aux)

    train_step = program(loss_of, strategy=strategy)
    try:
        state = train_step.init(seed=0)
        scores = fa.evaluate(train_step, state, of_labels, fa.shard(DataLoader(Rows(), batch_size=1)))
        _, metrics = train_step(
            state, fa.data.Window([*zip(*(v.split(1) for v in rows_of_labels()), strict=True)])
        )
        return scores, {name: metrics[name] for name in scores}
    finally:
        train_step.close()


class Rows(Dataset):
    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        x, labels = rows_of_labels()
        return x[index], labels[index]


def close(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(torch.as_tensor(found[name]).float(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_mean_over_nothing_counts_for_nothing_in_scores_and_aux(pools, strategy, ranks):
    """`fa.evaluate` was NaN if one batch had no label."""
    for scores, aux in pools.run(ranks, scored, strategy):
        close(scores, by_hand())
        close(aux, by_hand())


def test_a_mean_over_nothing_on_a_device_that_the_host_does_not_read(world, monkeypatch):
    monkeypatch.setattr(loss, "readable", lambda value: False)
    monkeypatch.setattr("fnaccel.engine.aux_values.readable", lambda value: False)
    scores, aux = scored("local")
    wanted = {name: value for name, value in by_hand().items() if name != "plain"}  # a number is on the host
    close(scores, wanted)
    close(aux, wanted)


def test_scores_over_nothing_at_all_have_no_value(world):
    train_step = program()

    def nothing(model, batch):
        return fa.Mean.of_tokens(torch.tensor(float("nan")), torch.full((1, 4), -100))

    assert fa.evaluate(train_step, train_step.init(), nothing, fa.shard(DataLoader(Rows()))).isnan()


def test_a_pure_update_counts_a_mean_over_nothing_for_nothing(world):
    def loss_of(model, batch):
        x, labels = batch
        counts, value = (labels[..., 1:] != -100).sum(), model(x).mean().detach()
        aux = {"a": fa.Mean.of(value * counts / counts, counts), "b": fa.Mean(value * torch.nan, 0)}
        return fa.Mean(model(x).sum(), len(x), aux)

    train_step = program(fa.accumulate(loss_of, 3))
    update, x = fa.pure(train_step), rows_of_labels()
    _, wanted = train_step(train_step.init(seed=0), x)
    _, metrics = update(update.init(seed=0), x)
    for name in ("a", "b"):
        torch.testing.assert_close(metrics[name], wanted[name])
    assert metrics["b"] == 0.0


@pytest.mark.parametrize("change", ["backward", "zero_grad"])
def test_a_loss_may_not_change_gradients(world, change):
    def loss(model, batch):
        total = model(batch[0]).square().sum()
        if change == "backward":
            total.backward(retain_graph=True)
        else:
            model.zero_grad()
        return fa.Mean(total, 4)

    train_step = program(fa.accumulate(loss, 2))
    state = train_step.init()
    with pytest.raises(errors.LossError, match=r"called backward\(\) or zero_grad\(\)"):
        train_step(state, fa.data.Window([batch_of(4), batch_of(4)]))
    assert train_step.live_state is state


@pytest.mark.parametrize("weight", BAD)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_bad_weight_that_the_host_can_read_raises_at_once(world, weight, kind):
    train_step = program(weighed(lambda x: kind(weight)))
    state = train_step.init()
    before = fa.snapshot(state)
    with pytest.raises(errors.LossError, match="the weight of a loss is"):
        train_step(state, batch_of(4))
    assert fa.tree.allclose(state, before, rtol=0, atol=0)
    step = fa.with_weight(loss_fn, lambda batch: kind(weight))
    weighing = program(step)
    with pytest.raises(errors.LossError, match="the weight of a loss is"):
        weighing(weighing.init(), batch_of(4))


@pytest.mark.parametrize("weight", BAD)
@pytest.mark.parametrize("read", [float, lambda x: x.item(), str, lambda x: x.tolist(), "{:.3f}".format])
def test_a_bad_weight_on_the_device_raises_when_metrics_are_read(world, monkeypatch, weight, read):
    """As on an accelerator: the host reads nothing in the step, and the update is left out on the device."""
    monkeypatch.setattr(loss, "readable", lambda value: False)
    monkeypatch.setattr("fnaccel.engine.aux_values.readable", lambda value: False)
    train_step = program(fa.with_ema(weighed(lambda x: torch.tensor(weight)), 0.5), optimizer=fa.adamw(0.1))
    state = train_step.init()
    before = fa.snapshot(state)
    state, metrics = train_step(state, batch_of(4))
    for field in ("params", "opt", "ema"):
        assert fa.tree.allclose(getattr(state, field), getattr(before, field), rtol=0, atol=0)
    assert metrics["loss"].detach().shape == ()
    for name in ("loss", "weight"):
        with pytest.raises(errors.LossError, match="negative, infinite or NaN"):
            read(metrics[name])


def test_a_good_weight_on_the_device_is_read_as_ever(world, monkeypatch):
    plain = program(weighed(first_negative))
    expected, wanted = plain(plain.init(), batch_of(9))
    monkeypatch.setattr(loss, "readable", lambda value: False)
    monkeypatch.setattr("fnaccel.engine.aux_values.readable", lambda value: False)
    train_step = program(weighed(first_negative))
    state, metrics = train_step(train_step.init(), batch_of(9))
    assert float(metrics["loss"]) == float(wanted["loss"])
    assert fa.tree.allclose(whole_params(state), whole_params(expected), rtol=0, atol=0)


@pytest.mark.parametrize("number", [np.int64(4), np.float32(4.0), np.float64(4.0)])
def test_numbers_of_numpy_are_weights(world, number):
    train_step = program(weighed(lambda x: number))
    _, metrics = train_step(train_step.init(), batch_of(4))
    assert float(metrics["weight"]) == 4.0


def two_kinds(model, batch):
    mean = loss_fn(model, batch)
    bare = current().rank == 0 if current().size > 1 else float(batch[0][0, 0]) > 0
    return mean.total / mean.weight if bare else mean


def on_ranks(scope):
    step = two_kinds if scope is None else fa.compile(two_kinds, scope, backend="eager")
    train_step = program(step, strategy="ddp")
    train_step(train_step.init(), batch_of(4))


@pytest.mark.parametrize("scope", [None, "step"])
def test_losses_of_two_kinds_on_two_ranks_raise(pools, scope):
    with pytest.raises(errors.LossError, match="rank 0 has a bare loss with no aux; rank 1 has"):
        pools.run(2, on_ranks, scope)


@pytest.mark.parametrize("scope", [None, "step"])
def test_losses_of_two_kinds_in_two_micro_batches_raise(world, scope):
    def by_size(model, batch):
        mean = loss_fn(model, batch)
        return mean if len(batch[0]) > 2 else mean.total / mean.weight

    step = fa.accumulate(by_size, 2)
    step = step if scope is None else fa.compile(step, scope, backend="eager")
    train_step = program(step)
    state = train_step.init()
    before = fa.snapshot(state)
    with pytest.raises(errors.LossError, match="for one micro-batch and a bare loss"):
        train_step(state, batch_of(5))
    if scope is None:  # a captured step finds out after its update
        assert fa.tree.allclose(state, before, rtol=0, atol=0)


def repeated(train_step, state, calls):
    for _ in range(calls):
        state, _ = train_step(state, batch_of(4))
    return state


class TestLossScale:
    def overflowing(self, **policy):
        def huge(model, batch):
            x, y = batch
            return fa.Mean(model(x).float().sum() * float("inf"), weight=len(y))

        precision = fa.transforms.Precision(compute="fp16", **policy)
        train_step = program(fa.with_precision(huge, precision))
        return train_step, train_step.init()

    def test_it_sinks_to_its_floor_and_no_lower(self, world):
        train_step, state = self.overflowing(init_scale=8.0, min_scale=2.0, max_skipped=None)
        for _ in range(6):
            state, metrics = train_step(state, batch_of(4))
        assert float(state.scale["scale"]) == 2.0
        assert float(metrics["skipped"]) == 1.0

    def test_it_warns_and_then_raises_with_the_state_live(self, world):
        train_step, state = self.overflowing(max_skipped=30)
        with pytest.warns(RuntimeWarning, match="25 updates in a row were skipped") as caught:
            state = repeated(train_step, state, 30)
        assert len(caught) == 1
        before = fa.snapshot(state)
        with pytest.raises(errors.NonfiniteError, match="30 updates in a row"):
            train_step(state, batch_of(4))
        assert train_step.live_state is state
        assert fa.tree.allclose(state, before, rtol=0, atol=0)
        train_step(state, batch_of(4))

    def test_skip_nonfinite_has_the_same_limit(self, world):
        step = fa.skip_nonfinite(lambda m, b: m(b[0]).sum() * float("nan"), max_skipped=3)
        train_step = program(step)
        state = train_step.init()
        for _ in range(3):
            state, _ = train_step(state, batch_of(4))
        with pytest.raises(errors.NonfiniteError, match="3 updates in a row"):
            train_step(state, batch_of(4))
        with pytest.raises(errors.ArgumentError, match="max_skipped=0"):
            fa.skip_nonfinite(loss_fn, max_skipped=0)


def mean_of_rows(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def uneven(sizes, strategy, scope):
    """Train on batches of so many rows a rank. Returns the warnings, and whether the plan has them."""
    step = fa.accumulate(mean_of_rows, 2)
    train_step = program(
        step if scope is None else fa.compile(step, scope, backend="eager"), strategy=strategy
    )
    state = train_step.init()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fnaccel")
    logger.addHandler(handler)
    try:
        for step, rows in enumerate(sizes[current().rank]):
            state, _ = train_step(state, batch_of(rows, step))
    finally:
        logger.removeHandler(handler)
    return [text for text in said if "bare scalar" in text], "bare scalar" in str(train_step.plan)


@pytest.mark.parametrize("scope", [None, pytest.param("step", marks=pytest.mark.long)])
def test_a_bare_loss_of_unequal_rows_is_told_once(pools, scope):
    """Two ranks, two micro-batches, or a later batch: its mean is not that over rows."""
    for said, planned in pools.run(2, uneven, ([8, 8, 8], [4, 4, 4]), "ddp", scope):
        assert (len(said), planned) == (1, True)
        assert "for 2 and 4 rows: each micro-batch counts the same" in said[0]
    for sizes in ([7, 7], [8, 8, 6]):
        [(said, planned)] = pools.run(1, uneven, (sizes,), "local", scope)
        assert (len(said), planned) == (1, True)
    for found in pools.run(2, uneven, ([8, 8], [8, 8]), "ddp", scope):
        assert found == ([], False)


def test_a_bare_score_of_unequal_rows_is_told_once(world, caplog):
    scoring._warn_of_bare.cache_clear()
    data = DataLoader(TensorDataset(*batch_of(10)), batch_size=4)
    train_step = program()
    state = train_step.init()
    for _ in range(2):
        fa.evaluate(train_step, state, lambda model, batch: loss_fn(model, batch), fa.shard(data))
    assert "bare scalar" not in caplog.text
    for _ in range(2):
        fa.evaluate(train_step, state, lambda model, batch: {"worst": model(batch[0]).max()}, fa.shard(data))
    assert caplog.text.count("got a bare scalar for batches of unequal rows") == 1
