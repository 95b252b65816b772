"""Optimizers of torch that keep numbers in `param_groups`: trained, resumed and adopted as torch does."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.tiny_models import Net, batch_of, program, whole_params


class Counting(torch.optim.SGD):
    """SGD whose rate falls with a count that it keeps in its groups, as schedule-free optimizers keep theirs."""

    def __init__(self, params, lr=0.1, momentum=0.0):
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] / (group["k"] + 1) ** 2
            group["sum"] = group.get("sum", 0.25) + group["lr"]
            group["lr"] *= 1 + group["sum"]
            group["k"] += 1
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def by_hand(momentum, steps=5):
    torch.manual_seed(0)
    net = Net()
    rule = Counting(net.parameters(), lr=0.5, momentum=momentum)
    for number in range(steps):
        net.zero_grad()
        x, y = batch_of(8, number)
        torch.nn.functional.mse_loss(net(x), y).backward()
        rule.step()
    return net, rule


def trained(strategy, momentum, folder, steps, like=None, adopted=None):
    optimizer = fa.optim.from_torch(Counting, lr=0.5, momentum=momentum)
    train_step = program(strategy=strategy, optimizer=optimizer)
    state = train_step.init(seed=0)
    if like is not None:
        state = fa.restore(folder, like=state)
    if adopted is not None:
        state = fa.interchange.adopt(adopted, like=state)
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    for number in steps:
        state, _ = train_step(state, tuple(part.chunk(count)[rank] for part in batch_of(8, number)))
    if like is None and adopted is None:
        fa.save(folder, state)
    return whole_params(state), {name: float(slots["group.k"]) for name, slots in state.opt.items()}


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_numbers_of_groups_are_saved_and_restored(pools, tmp_path, strategy, ranks, momentum):
    """With momentum each parameter has slots of torch's too."""
    expected = dict(by_hand(momentum)[0].named_parameters())
    pools.run(ranks, trained, strategy, momentum, tmp_path, range(2))
    for params, counts in pools.run(ranks, trained, strategy, momentum, tmp_path, range(2, 5), True):
        assert_close(params, expected)
        assert set(counts.values()) == {5.0}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_numbers_of_groups_are_adopted(pools, tmp_path, momentum):
    net, rule = by_hand(momentum, steps=2)
    torch.save({"model": net.state_dict(), "optimizer": rule.state_dict()}, tmp_path / "run.pt")
    file = tmp_path / "run.pt"
    params, _ = pools.run(1, trained, "local", momentum, tmp_path, range(2, 5), None, file)[0]
    assert_close(params, dict(by_hand(momentum)[0].named_parameters()))


class Listing(Counting):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["seen"] = [1, *self.param_groups[0].get("seen", [])]


class Rating(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize(
    ("cls", "text"), [(Listing, "keeps 'seen' in its groups"), (Rating, "changes its rate")]
)
def test_what_no_checkpoint_could_hold_is_refused(cls, text):
    with fa.start(), pytest.raises(errors.CapabilityError, match=text):
        program(optimizer=fa.optim.from_torch(cls, lr=0.1)).init()


def parts_of_a_group_differ(whole):
    optimizer = fa.optim.from_torch(Counting, lr=0.5, whole=whole)
    train_step = program(strategy="fsdp", optimizer=optimizer)
    state = train_step.init(seed=0)
    state.opt["out.bias"]["group.k"].fill_(3)
    train_step(state, batch_of(4))


def test_parameters_of_one_group_with_other_numbers_raise(pools):
    with pytest.raises(errors.ArgumentError, match=r"different 'k'[\s\S]*optimizer_groups"):
        pools.run(2, parts_of_a_group_differ, False)
    with pytest.raises(errors.CapabilityError, match=r"'k'[\s\S]*one parameter at a time"):
        pools.run(2, parts_of_a_group_differ, True)
