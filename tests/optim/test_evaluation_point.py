"""Optimizers that train at one point and evaluate at another, as those of the package schedulefree do."""

from __future__ import annotations

import attrs
import pytest
import schedulefree
import torch
from safetensors.torch import load_file

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.tiny_models import Net, batch_of, program, whole_params

CLASSES = {
    "adamw": (schedulefree.AdamWScheduleFree, {"lr": 0.05, "warmup_steps": 2, "weight_decay": 0.1}),
    "sgd": (schedulefree.SGDScheduleFree, {"lr": 0.5, "momentum": 0.9}),
    "radam": (schedulefree.RAdamScheduleFree, {"lr": 0.05, "betas": (0.9, 0.9)}),
}


def by_hand(name, steps=5):
    """The parameters that train and those that evaluate, after each update, by the package's own rules."""
    cls, options = CLASSES[name]
    torch.manual_seed(0)
    net = Net()
    rule = cls(net.parameters(), **options)
    points = []
    for number in range(steps):
        net.zero_grad()
        x, y = batch_of(8, number)
        torch.nn.functional.mse_loss(net(x), y).backward()
        rule.train()
        rule.step()
        trained = {key: value.detach().clone() for key, value in net.named_parameters()}
        rule.eval()
        points.append((trained, {key: value.detach().clone() for key, value in net.named_parameters()}))
        rule.train()
        net.load_state_dict(trained)  # train() alone rounds
    return points


def squared_error(model, batch):
    x, y = batch
    errors_of_rows = ((model(x) - y) ** 2).mean(1)
    return fa.Mean(errors_of_rows.sum(), weight=len(x))


def trained(strategy, name, folder, steps, resumed=False):
    cls, options = CLASSES[name]
    train_step = program(strategy=strategy, optimizer=fa.optim.from_torch(cls, **options))
    state = train_step.init(seed=0)
    if resumed:
        state = fa.restore(folder / "run", like=state)
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    looked = []
    for number in steps:
        state, _ = train_step(state, tuple(part.chunk(count)[rank] for part in batch_of(8, number)))
        before = whole_params(state)
        looked.append(train_step.look(state, whole_values, whole=True))
        after = whole_params(state)
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert_close(train_step.look(state, whole_values, train=True, whole=True), before)
    rows = torch.utils.data.TensorDataset(*batch_of(8, 9))
    score = fa.evaluate(train_step, state, squared_error, fa.shard(torch.utils.data.DataLoader(rows, 3)))
    fa.interchange.export_hf(folder / "hf", state, overwrite=True)
    fa.save(folder / "run", state)
    return whole_params(state), looked, float(score)


def whole_values(model):
    return {key: value.detach().clone() for key, value in model.named_parameters()}


@pytest.mark.long_except(r"^(?!sgd-fsdp)")
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("name", CLASSES)
def test_evaluate_look_and_export_are_where_the_optimizer_evaluates(pools, tmp_path, strategy, ranks, name):
    points = by_hand(name)
    first = pools.run(ranks, trained, strategy, name, tmp_path, range(3))
    for params, looked, _ in first:
        assert_close(params, points[2][0])
        for ours, (_, expected) in zip(looked, points[:3], strict=True):
            assert_close(ours, expected)
    resumed = pools.run(ranks, trained, strategy, name, tmp_path, range(3, 5), True)
    for params, looked, score in resumed:
        assert_close(params, points[4][0])
        assert_close(looked[-1], points[4][1])
        net = Net()
        net.load_state_dict(points[4][1])
        x, y = batch_of(8, 9)
        assert score == pytest.approx(float(torch.nn.functional.mse_loss(net(x), y).detach()), rel=1e-5)
    assert_close(load_file(tmp_path / "hf" / "model.safetensors"), points[4][1])


class Cut(schedulefree.SGDScheduleFree):
    """Its `eval` ends by an error after the first group."""

    def eval(self):
        groups, self.param_groups = self.param_groups, self.param_groups[:1]
        super().eval()
        self.param_groups = groups
        raise MemoryError


def test_an_error_between_the_two_points_leaves_the_parameters_that_train():
    with fa.start():
        groups = {"*bias": {"lr": 0.1}}
        optimizer = fa.optim.from_torch(Cut, lr=0.5, groups=groups)
        train_step = program(optimizer=optimizer)
        state, _ = train_step(train_step.init(seed=0), batch_of(8, 0))
        state, _ = train_step(state, batch_of(8, 1))
        before = whole_params(state)
        with pytest.raises(MemoryError):
            train_step.look(state, whole_values)
        assert all(torch.equal(value, before[key]) for key, value in whole_params(state).items())
        state, _ = train_step(state, batch_of(8, 2))


def test_an_error_in_a_look_leaves_the_parameters_that_train():
    with fa.start():
        train_step = program(optimizer=fa.optim.from_torch(schedulefree.SGDScheduleFree, lr=0.5))
        state = train_step.init(seed=0)
        for number in range(2):
            state, _ = train_step(state, batch_of(8, number))
        before = whole_params(state)
        with pytest.raises(ZeroDivisionError):
            train_step.look(state, lambda model: 1 / 0)
        assert all(torch.equal(value, before[key]) for key, value in whole_params(state).items())


def test_adopted_weights_are_evaluated_before_the_first_update():
    """The other point begins at the first update, from the weights of that time."""
    with fa.start():
        train_step = program(optimizer=fa.optim.from_torch(schedulefree.AdamWScheduleFree, lr=0.5))
        copy = fa.snapshot(train_step.init(seed=0))
        weights = fa.tree.map(lambda value: value + 1, copy.params)
        state = train_step.adopt(attrs.evolve(copy, params=weights))
        assert_close(train_step.look(state, whole_values), weights)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_file_of_torch_with_its_slots_is_refused(tmp_path, mode):
    """Nothing in it says at which point its weights are. The weights alone are taken."""
    cls, options = CLASSES["adamw"]
    net = Net()
    rule = cls(net.parameters(), **options)
    rule.train()
    net(torch.ones(2, 3)).sum().backward()
    rule.step()
    getattr(rule, mode)()
    torch.save({"model": net.state_dict(), "optimizer": rule.state_dict()}, tmp_path / "run.pt")
    with fa.start():
        train_step = program(optimizer=fa.optim.from_torch(cls, **options))
        state = train_step.init(seed=0)
        with pytest.raises(errors.ArgumentError, match="of the two points its weights"):
            fa.interchange.adopt(tmp_path / "run.pt", like=state)
        state = fa.interchange.adopt(tmp_path / "run.pt", like=state, skip="opt*")
        assert_close(train_step.look(state, whole_values), dict(net.named_parameters()))


def test_a_save_in_the_body_of_a_look_is_refused(tmp_path):
    with fa.start():
        train_step = program(optimizer=fa.optim.from_torch(schedulefree.AdamWScheduleFree, lr=0.5))
        state, _ = train_step(train_step.init(seed=0), batch_of(8, 0))
        with pytest.raises(errors.AveragedError, match="where an optimizer evaluates"):
            train_step.look(state, lambda model: fa.save(tmp_path / "run", state))
