"""Optimizers against torch.optim, over several steps with a schedule."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


def raw(make, steps=4, rates=None, nets=None):
    torch.manual_seed(0)
    net = nets or Net()
    rule = make(net)
    for step in range(steps):
        x, y = batch_of(5, step)
        if rates is not None:
            for group in rule.param_groups:
                group["lr"] = rates(step)
        rule.zero_grad()
        loss = loss_fn(net, (x, y))
        (loss.total / loss.weight).backward()
        rule.step()
    return {name: value.detach() for name, value in net.named_parameters()}


def ours(optimizer, steps=4):
    train_step = program(optimizer=optimizer)
    state = train_step.init(seed=0)
    for step in range(steps):
        state, _ = train_step(state, batch_of(5, step))
    return whole_params(state)


PAIRS = {
    "sgd": (lambda lr: fa.sgd(lr), torch.optim.SGD, {}),
    "momentum": (
        lambda lr: fa.sgd(lr, momentum=0.9, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "nesterov": (
        lambda lr: fa.sgd(lr, momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "adam": (
        lambda lr: fa.adam(lr, betas=(0.8, 0.9), weight_decay=0.1),
        torch.optim.Adam,
        {"betas": (0.8, 0.9), "weight_decay": 0.1},
    ),
    "adamw": (lambda lr: fa.adamw(lr, eps=1e-6), torch.optim.AdamW, {"eps": 1e-6}),
    "adafactor": (lambda lr: fa.optim.adafactor(lr), torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equals_torch(name):
    make, cls, options = PAIRS[name]
    schedule = fa.schedules.warmup_linear(0.05, warmup=2, total=6)
    expected = raw(lambda net: cls(net.parameters(), lr=0.05, **options), rates=schedule)
    assert_close(ours(make(schedule)), expected)


FOREIGN = [
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
]  # fmt: skip


@pytest.mark.parametrize("cls", FOREIGN, ids=lambda cls: cls.__name__)
def test_any_torch_optimizer_starts_with_its_own_first_state(cls):
    expected = raw(lambda net: cls(net.parameters(), lr=0.01))
    assert_close(ours(fa.optim.from_torch(cls, lr=0.01)), expected)


def test_options_that_only_a_constructor_reads():
    options = {"lr": 0.01, "initial_accumulator_value": 0.3, "lr_decay": 0.1}
    expected = raw(lambda net: torch.optim.Adagrad(net.parameters(), **options))
    assert_close(ours(fa.optim.from_torch(torch.optim.Adagrad, **options)), expected)
    apart = {"*bias": {"initial_accumulator_value": 0.7}}
    state = program(optimizer=fa.optim.from_torch(torch.optim.Adagrad, **options, groups=apart)).init()
    assert float(state.opt["out.bias"]["sum"].min()) == pytest.approx(0.7)
    assert float(state.opt["out.weight"]["sum"].min()) == pytest.approx(0.3)


class Marked(torch.optim.SGD):
    """Reads a mark that its groups have and its constructor does not know."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)

    def step(self, closure=None):
        assert all(group["marked"] for group in self.param_groups)
        return super().step(closure)


def test_marks_of_groups_and_misspelt_options():
    expected = raw(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    assert_close(ours(fa.optim.from_torch(Marked, lr=0.1, groups={"*": {"marked": True}})), expected)
    with pytest.raises(errors.ArgumentError, match=r"RMSprop takes no 'alhpa'[\s\S]*alpha"):
        fa.optim.from_torch(torch.optim.RMSprop, lr=0.1, alhpa=0.9)


def test_dampening_in_a_group():
    with pytest.raises(errors.ArgumentError, match="dampening"):
        fa.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, groups={"*": {"dampening": 0.5}})


def test_foreign_state_exists_before_the_first_step():
    state = program(optimizer=fa.optim.from_torch(torch.optim.NAdam, lr=0.01)).init()
    assert set(state.opt["out.bias"]) == {"step", "mu_product", "exp_avg", "exp_avg_sq"}
    assert float(state.opt["out.bias"]["mu_product"]) == 1.0


def test_groups_by_pattern_have_options_and_rates_of_their_own():
    optimizer = fa.adamw(
        0.05, groups={"out.*": {"lr": 0.0, "weight_decay": 0.0}, "*bias": {"weight_decay": 0.0}}
    )

    def make(net):
        named = dict(net.named_parameters())
        biases = [p for n, p in named.items() if n.endswith("bias") and not n.startswith("out")]
        rest = [p for n, p in named.items() if not n.endswith("bias") and not n.startswith("out")]
        out = [p for n, p in named.items() if n.startswith("out")]
        return torch.optim.AdamW(
            [
                {"params": biases, "weight_decay": 0.0},
                {"params": rest},
                {"params": out, "weight_decay": 0.0, "lr": 0.0},
            ],
            lr=0.05,
        )

    assert_close(ours(optimizer), raw(make))


def test_mistakes_are_named():
    with pytest.raises(errors.ConfigError, match="weight_decay"):
        fa.adamw(0.1, groups={"*": {"weight_decy": 0.0}})
    with pytest.raises(errors.ArgumentError, match="matches no trainable parameter"):
        program(optimizer=fa.adamw(0.1, groups={"nothing*": {"lr": 0.0}})).init()
    with pytest.raises(errors.ArgumentError, match="description"):
        program(optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(errors.ArgumentError, match="LBFGS"):
        fa.optim.from_torch(torch.optim.LBFGS, lr=0.1)
    with pytest.raises(errors.ArgumentError, match="learning rate"):
        fa.sgd("fast")


def test_a_parameter_without_a_gradient_is_left_alone():
    def half(model, batch):
        x, y = batch
        return fa.Mean((model.inp(x).sum(dim=1, keepdim=True) - y).square().sum(), weight=len(y))

    train_step = program(half, optimizer=fa.adamw(0.1))
    state = train_step.init()
    before = fa.snapshot(state)
    state, _ = train_step(state, batch_of(4))
    assert torch.equal(state.params["out.weight"], before.params["out.weight"])
    assert not torch.equal(state.params["inp.weight"], before.params["inp.weight"])


def test_law_13_the_rate_depends_on_applied_updates_alone():
    schedule = fa.warmup_cosine(0.1, warmup=2, total=6)
    seen = {}
    for accumulate, poison in ((1, None), (3, None), (3, 2)):
        step = fa.skip_nonfinite(fa.accumulate(loss_fn, accumulate))
        train_step = program(step, optimizer=fa.sgd(schedule))
        state = train_step.init()
        rates = []
        for call in range(5):
            x, y = batch_of(6, call)
            state, metrics = train_step(state, (x, y / 0.0 if call == poison else y))
            if not float(metrics["skipped"]):
                rates.append(round(float(metrics["lr"]), 7))
        seen[accumulate, poison] = rates
    assert seen[1, None] == seen[3, None]
    assert seen[3, 2] == seen[1, None][:4]


def test_foreign_optimizers_take_what_transforms_return():
    zero = fa.Transform(
        "zero", fa.Phase.GRADS,
        apply=lambda grads, own, info: ({k: torch.zeros_like(g) for k, g in grads.items()}, own),
    )  # fmt: skip
    train_step = program(
        fa.clip_norm(zero(loss_fn), 1.0), optimizer=fa.optim.from_torch(torch.optim.SGD, lr=1.0)
    )
    state = train_step.init()
    before = fa.snapshot(state)
    state, _ = train_step(state, batch_of(4))
    assert fa.tree.allclose(fa.snapshot(state).params, before.params, rtol=0, atol=0)


def test_a_foreign_sgd_with_momentum_and_decay_starts_from_nothing():
    options = {"momentum": 0.9, "weight_decay": 0.1}
    expected = raw(lambda net: torch.optim.SGD(net.parameters(), lr=0.05, **options))
    assert_close(ours(fa.optim.from_torch(torch.optim.SGD, lr=0.05, **options)), expected)


class Anchored(torch.optim.Optimizer):
    """SGD that is pulled back to the first value of a parameter, and counts its updates."""

    def __init__(self, params, lr=0.1, pull=0.5, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "pull": pull, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad + group["weight_decay"] * param
                slots = self.state[param]
                if not slots:
                    slots["anchor"], slots["sum"], slots["step"] = (
                        param.clone(),
                        grad.clone(),
                        torch.tensor(0.0),
                    )
                slots["step"] += 1
                slots["sum"] += grad
                param.add_(grad + group["pull"] * (param - slots["anchor"]), alpha=-group["lr"])


OPTIONS = {"lr": 0.05, "pull": 0.7, "weight_decay": 1.0}


def test_a_slot_that_begins_as_a_copy_of_the_parameter():
    """Such as z of schedule-free optimizers. It began at zero, and training went on from there."""
    optimizer = fa.optim.from_torch(Anchored, **OPTIONS)
    assert_close(ours(optimizer), raw(lambda net: Anchored(net.parameters(), **OPTIONS)))
    state = program(optimizer=optimizer).init(seed=0)
    first = whole_params(state)
    for name, slots in state.opt.items():
        assert torch.equal(slots["anchor"], first[name])
        assert not slots["sum"].any()


def test_such_a_slot_follows_weights_that_were_adopted_before_the_first_update(tmp_path):
    torch.manual_seed(5)
    net = Net()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    expected = raw(lambda net: Anchored(net.parameters(), **OPTIONS), nets=net)
    train_step = program(optimizer=fa.optim.from_torch(Anchored, **OPTIONS))
    state = fa.interchange.adopt(tmp_path / "net.pt", like=train_step.init(seed=0))
    for step in range(4):
        state, _ = train_step(state, batch_of(5, step))
    assert_close(whole_params(state), expected)
    # later the slot is part of the state, as any other
    fa.save(tmp_path / "run", state)
    anchors = {name: slots["anchor"].clone() for name, slots in state.opt.items()}
    state = fa.restore(
        tmp_path / "run", like=program(optimizer=fa.optim.from_torch(Anchored, **OPTIONS)).init(seed=9)
    )
    assert all(torch.equal(slots["anchor"], anchors[name]) for name, slots in state.opt.items())


def anchored(strategy):
    train_step = program(strategy=strategy, optimizer=fa.optim.from_torch(Anchored, **OPTIONS))
    state = train_step.init(seed=0)
    for step in range(4):
        x, y = batch_of(6, step)
        rank = train_step.mesh.batch_rank
        state, _ = train_step(state, (x[3 * rank : 3 * rank + 3], y[3 * rank : 3 * rank + 3]))
    return whole_params(state)


def test_such_a_slot_is_equal_on_shards(pools):
    replicated, sharded = (pools.run(2, anchored, strategy)[0] for strategy in ("ddp", "fsdp"))
    assert_close(sharded, replicated)


class Unwritten(torch.optim.SGD):
    def step(self, closure=None):
        raise NotImplementedError


def test_an_error_without_a_text_has_its_class():
    with pytest.raises(errors.CapabilityError, match="can't update these parameters: NotImplementedError"):
        program(optimizer=fa.optim.from_torch(Unwritten, lr=0.1)).init()
