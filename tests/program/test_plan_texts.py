"""Plans hold functions by name and by a digest of their code: no plan holds an address."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import loss_fn, program


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


def takes_anything(*args, **options):
    return 0.1


class Called:
    """An object with `__call__` and without a text of its own."""

    def __init__(self, factor=0.1):
        self.factor = factor

    def __call__(self, *args, **options):
        return self.factor

    def method(self, *args, **options):
        return self.factor


@attrs.frozen
class Record:
    """An object whose text holds a function."""

    inner: object

    def __call__(self, *args, **options):
        return 0.1


class Odd(torch.optim.SGD):
    """An optimizer with options that hold functions."""

    def __init__(self, params, lr, alone=None, several=(), named=None):
        super().__init__(params, lr)


CALLABLES = {
    "function": takes_anything,
    "lambda": lambda *args, **options: 0.1,
    "partial": functools.partial(takes_anything, 0.1, key=takes_anything),
    "object": Called(),
    "method": Called().method,
    "record": Record(takes_anything),
    "class": Called,
}


FEATURES = {
    "loss": lambda fn: {"step": fn},
    "rate": lambda fn: {"optimizer": fa.sgd(fn)},
    "rate of a group": lambda fn: {"optimizer": fa.sgd(0.1, groups=[("*", {"lr": fn})])},
    "joined rates": lambda fn: {"optimizer": fa.sgd(fa.schedules.joined((fn, fn), boundaries=(3,)))},
    "selection": lambda fn: {"optimizer": fa.sgd(0.1, groups=[(fn, {"momentum": 0.9})])},
    "member": lambda fn: {"optimizer": fa.optim.optimizer_groups([(fn, fa.sgd(fn)), ("*", fa.sgd(0.1))])},
    "option": lambda fn: {"optimizer": fa.optim.from_torch(Odd, lr=0.1, alone=fn, several=[fn], named={"a": fn})},
    "weight": lambda fn: {"step": fa.with_weight(loss_fn, fn)},
    "backend": lambda fn: {"step": fa.compile(loss_fn, backend=fn)},
    "options of a compiler": lambda fn: {"step": fa.compile(loss_fn, options={"post_pass": fn})},
    "compiled units": lambda fn: {"step": fa.compile(loss_fn, scope="block", units=fn)},
    "remat": lambda fn: {"step": fa.remat(loss_fn, units=fn)},
    "updates": lambda fn: {"step": fa.Transform("own", fa.Phase.UPDATE, apply=fn)(loss_fn)},
    "gradients": lambda fn: {"step": fa.Transform("own", fa.Phase.GRADS, apply=fn)(loss_fn)},
    "units": lambda fn: {"strategy": fa.fsdp(units=fn)},
    "hook": lambda fn: {"strategy": fa.ddp(hook=fn)},
}  # fmt: skip


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", CALLABLES)
@pytest.mark.parametrize("feature", FEATURES)
def test_no_plan_holds_an_address(feature, kind):
    if kind == "class" and feature in ("loss", "rate", "joined rates"):
        pytest.skip("a class is no loss, and an object is no rate")
    plan = program(**FEATURES[feature](CALLABLES[kind])).plan
    for text in (str(plan), plan._repr_html_(), *map(str, plan.digests)):
        assert " at 0x" not in text


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "option"])
def test_a_digest_tells_functions_of_one_name_apart(feature):
    plans = {program(**FEATURES[feature](Called(factor))).plan.hash for factor in (0.1, 0.2)}
    assert len(plans) == 2


def differing(kind):
    """Ranks whose rates differ and whose names do not."""
    factor = 0.1 * (1 + current().rank)
    rate = (
        Called(factor)
        if kind == "object"
        else functools.partial(lambda updates, key: key, key=lambda: factor)
    )
    program(strategy="ddp", optimizer=fa.sgd(0.1, groups=[("*", {"lr": rate})])).init()


@pytest.mark.parametrize("kind", ["object", "partial"])
def test_ranks_with_different_rates_of_a_group_raise(pools, kind):
    with pytest.raises(errors.PlanMismatchError, match="ranks hold different plans"):
        pools.run(2, differing, kind)


@pytest.mark.usefixtures("world")
def test_options_given_as_a_set_have_one_order():
    text = str(program(strategy=fa.fsdp(units={"Net", "Block", "Linear"})).plan)
    assert "units={'Block', 'Linear', 'Net'}" in text
    assert errors.as_names({"c", "a", "b"}) == ("a", "b", "c")


def counts_of(strategy, twice=False):
    train_step = program(strategy=strategy, frozen="out*")
    assert "parameters, " not in str(train_step.plan)
    for _ in range(1 + twice):
        train_step.init(seed=0)  # ranks compare plans here, and hold parts of other sizes
    [line] = [line for line in str(train_step.plan).splitlines() if " parameters, " in line]
    params = train_step.init(seed=0).params
    own = sum(getattr(value, "_local_tensor", value).numel() for value in params.values())
    return line, own, sum(value.numel() for value in params.values())


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_plan_after_init_counts_parameters(pools, strategy, ranks):
    found = pools.run(ranks, counts_of, strategy, True)
    for line, own, every in found:
        assert line.startswith(f"  note: {every} parameters, ")
        assert line.endswith(f" trained, {own} on this rank")
        assert int(line.split("parameters, ")[1].split()[0]) < every
    assert (sum(own for _, own, _ in found) == found[0][2]) == (strategy != "ddp")
