"""`with_ema(buffers="average")`: the buffers that go with averaged parameters are averages too, as in torch."""

from __future__ import annotations

import tempfile

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from fnaccel.world.world import current
from tests.tiny_models import batch_of, loss_fn, program

DECAY = 0.75
STEPS = 3
RUNS = [("local", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


class Normed(nn.Module):
    """A batch norm, a buffer in 16 bits, a mask with infinities, and buffers that are replaced or not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("largest", torch.zeros(1, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.training:
            self.largest.fill_(float(self.norm.num_batches_tracked) + 0.5)
            self.passing.add_(1.0)
            self.replaced = self.replaced + 1.0
        return self.out(torch.tanh(self.norm(self.inp(x)))) + self.mask.softmax(0)[1]


class Traced(nn.Module):
    """What a graph can hold of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.inp(x))))


def rows(step, rank=0):
    return batch_of(5, 10 * step + rank)


def by_hand(model, ranks, steps=STEPS):
    """The averages of torch in a loop of raw PyTorch, with the statistics of the first rank."""
    torch.manual_seed(0)
    model = model()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    averaged.update_parameters(model)  # the first one copies
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rule.zero_grad()
        for rank in reversed(range(ranks)):
            before = {name: value.clone() for name, value in model.named_buffers()}
            loss = loss_fn(model, rows(step, rank))
            (loss.total / (loss.weight * ranks)).backward()
            if rank:
                with torch.no_grad():
                    for name, value in model.named_buffers():
                        value.copy_(before[name])
        rule.step()
        averaged.update_parameters(model)
    return model, averaged.module


def rows_of_all():
    x, y = batch_of(7, 99)
    return fa.shard(DataLoader(TensorDataset(x, y), batch_size=4))


def trained(model, strategy, compiled=False, steps=STEPS, step=None):
    step = fa.with_ema(step or loss_fn, DECAY, buffers="average")
    train_step = program(
        fa.compile(step, backend="eager") if compiled else step, strategy=strategy, model=model
    )
    state = train_step.init(seed=0)
    for number in range(steps):
        state, _ = train_step(state, rows(number, current().rank))
    return train_step, state


def averaged_run(model, strategy, compiled):
    """Averages, what evaluation, `averaged` and exports use, and the averages after a restore elsewhere."""
    train_step, state = trained(model, strategy, compiled)
    plan = str(train_step.plan)
    now = {name: value.clone() for name, value in state.buffers.items()}
    ema = {name: fa.tree.whole(value).clone() for name, value in state.ema.items()}
    score = float(fa.evaluate(train_step, state, loss_fn, rows_of_all(), ema=True))
    with train_step.averaged(state):
        inside = {name: value.clone() for name, value in state.buffers.items()}
    back = all(torch.equal(now[name], value) for name, value in state.buffers.items())
    folder = fa.collectives.broadcast_objects(tempfile.mkdtemp() if current().is_main else None)
    fa.save(folder, state)
    exports = {}
    for name, source in (("live", state), ("saved", folder)):
        fa.interchange.export_hf(f"{folder}/{name}", source, ema=True)
        exports[name] = load_file(f"{folder}/{name}/model.safetensors")
    train_step.close()
    return plan, ema, score, inside, back, folder, exports


def restored_run(model, strategy, folder):
    train_step = program(fa.with_ema(loss_fn, DECAY, buffers="average"), strategy=strategy, model=model)
    state = fa.restore(folder, like=train_step.init(seed=1))
    score = float(fa.evaluate(train_step, state, loss_fn, rows_of_all(), ema=True))
    train_step.close()
    return score


@pytest.mark.long_except(r"eager|local")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize(("strategy", "ranks"), RUNS)
def test_averages_are_those_of_torch(pools, strategy, ranks, mode):
    """Evaluation mixed averaged parameters with the statistics of the last ones."""
    model = Normed if mode == "eager" else Traced
    raw, oracle = by_hand(model, ranks)
    oracle.norm.num_batches_tracked.copy_(raw.norm.num_batches_tracked)  # integers are not averaged
    expected = dict(oracle.state_dict())
    expected.pop("mask", None)
    oracle.eval()
    if mode == "eager":
        oracle.mask.copy_(raw.mask)  # torch's average of an infinity is NaN
    score = loss_fn(oracle, batch_of(7, 99))
    for plan, ema, found, inside, back, folder, exports in pools.run(
        ranks, averaged_run, model, strategy, mode == "compiled"
    ):
        assert "buffers='average'" in plan
        assert back
        assert ema.keys() == expected.keys() - {"norm.num_batches_tracked"}
        assert_close({n: v.float() for n, v in ema.items()}, {n: expected[n].float() for n in ema})
        assert_close({n: inside[n] for n in ema if n in inside}, {n: expected[n] for n in ema if n in inside})
        assert_close(found, float(score.total.detach() / score.weight))
        for values in exports.values():
            assert_close(
                {n: values[n].float() for n in expected}, {n: v.float() for n, v in expected.items()}
            )
    for other, count in RUNS if mode == "eager" else []:
        for again in pools.run(count, restored_run, model, other, folder):
            assert_close(again, found)


@pytest.mark.usefixtures("world")
def test_buffers_of_now_are_the_default():
    train_step = program(fa.with_ema(loss_fn, DECAY), model=Normed)
    state, _ = train_step(train_step.init(), rows(0))
    assert "buffers='now'" in str(train_step.plan)
    assert state.ema.keys() == state.params.keys()


@pytest.mark.usefixtures("world")
def test_a_skipped_update_moves_no_average():
    """The statistics are NaN then, and the averages are not."""
    train_step, state = trained(Normed, "local", step=fa.skip_nonfinite(loss_fn))
    kept = fa.snapshot(state)
    x, y = rows(9)
    state, metrics = train_step(state, (x * torch.nan, y))
    assert float(metrics["skipped"]) == 1.0
    assert state.buffers["norm.running_mean"].isnan().all()
    assert fa.tree.allclose(fa.snapshot(state).ema, kept.ema, rtol=0, atol=0)


@pytest.mark.usefixtures("world")
def test_an_update_of_no_row_moves_no_average():
    train_step, state = trained(Normed, "local", step=lambda model, batch: counted(model, batch))
    kept = fa.snapshot(state)
    x, y = rows(9)
    state, metrics = train_step(state, (x, torch.full_like(y, -100.0)))
    assert metrics["skipped"] == 1.0
    assert not torch.equal(state.buffers["norm.running_mean"], kept.buffers["norm.running_mean"])
    assert fa.tree.allclose(fa.snapshot(state).ema, kept.ema, rtol=0, atol=0)


def counted(model, batch):
    x, y = batch
    counts = y != -100
    return fa.Mean(((model(x) - y).square() * counts).sum(), weight=counts.sum())


@pytest.mark.usefixtures("world")
def test_averages_of_buffers_start_from_adopted_weights(tmp_path):
    torch.manual_seed(5)
    model = Normed()
    model.norm.running_mean.fill_(3.0)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    train_step = program(fa.with_ema(loss_fn, DECAY, buffers="average"), model=Normed)
    state = fa.interchange.adopt(tmp_path / "model.pt", like=train_step.init())
    assert torch.equal(state.ema["norm.running_mean"], torch.full((6,), 3.0))


def both(models, batch):
    return fa.Mean(
        loss_fn(models["a"], batch).total + loss_fn(models["b"], batch).total, weight=len(batch[1])
    )


@pytest.mark.usefixtures("world")
def test_a_pure_update_averages_the_same_buffers():
    train_step = fa.train_step(
        fa.with_ema(both, DECAY, buffers="average"),
        model=fa.distribute({"a": Traced, "b": Traced}, "local"),
        optimizer=fa.sgd(0.1),
    )
    state, update = train_step.init(seed=0), fa.pure(train_step)
    values = update.init(seed=0)
    for number in range(STEPS):
        state, _ = train_step(state, rows(number))
        values, _ = update(values, rows(number))
    assert "norm.running_mean" in values["ema"]["a"]
    assert_close(dict(fa.tree.items(values["ema"])), dict(fa.tree.items(state.ema)))


def test_no_such_buffers():
    with pytest.raises(errors.UnknownNameError, match="averaged"):
        fa.with_ema(loss_fn, DECAY, buffers="averaged")


def apart(reduced):
    """A score of ranks whose statistics differ, or are made equal by hand as timm does."""
    train_step = program(strategy="ddp(sync_buffers=False)", model=Traced)
    try:
        state, _ = train_step(train_step.init(seed=0), rows(0, current().rank))
        if reduced:
            with torch.no_grad():
                for value in state.buffers.values():
                    if value.is_floating_point():
                        value.copy_(fa.reduce(value, "mean"))
        return float(fa.evaluate(train_step, state, loss_fn, rows_of_all()))
    finally:
        train_step.close()


def test_one_score_of_different_buffers_raises(pools):
    with pytest.raises(errors.ArgumentError, match="buffers of its own"):
        pools.run(2, apart, False)


def test_statistics_that_are_reduced_by_hand_score(pools):
    first, second = pools.run(2, apart, True)
    assert first == second
