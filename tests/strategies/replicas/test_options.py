"""The texts, plans and refusals of `fa.local_sgd` and `fa.diloco`."""

from __future__ import annotations

import pytest

import fnaccel as fa
from fnaccel.errors import ArgumentError, AxisProductError, CapabilityError, ConfigError
from tests.tiny_models import loss_fn, program


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (fa.local_sgd(), "local_sgd()"),
        (fa.local_sgd(4, every=16, warmup=2), "local_sgd(4, every=16, warmup=2)"),
        (fa.local_sgd(2, slots="average") * fa.fsdp(2), "local_sgd(2, slots='average') * fsdp(2)"),
        (fa.diloco(4, every=32, send="bfloat16"), "diloco(4, every=32, send='bfloat16')"),
    ],
)
def test_a_strategy_is_a_text_that_reads_back(strategy, text):
    assert str(strategy) == text
    assert fa.strategy(text) == strategy


def test_an_outer_optimizer_is_kept_as_the_text_that_makes_it():
    (axis,) = fa.diloco(2, outer=fa.sgd(0.8, momentum=0.9)).axes
    assert axis.outer == "sgd(lr=0.8, momentum=0.9, nesterov=False, weight_decay=0.0)"
    assert fa.strategy(str(fa.diloco(2, outer=fa.sgd(0.8, momentum=0.9)))).axes == (axis,)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: fa.local_sgd(every=0), ArgumentError, "every=0 is no number of steps"),
        (lambda: fa.local_sgd(every=True), ArgumentError, "every=True is no number of steps"),
        (lambda: fa.local_sgd(warmup=-1), ArgumentError, "warmup=-1 is no number of steps"),
        (lambda: fa.local_sgd(0), ArgumentError, "degree 0"),
        (lambda: fa.local_sgd(slots="mine"), ArgumentError, "'local' or 'average'"),
        (lambda: fa.local_sgd(weighting="tokens"), ArgumentError, "'replicas' or 'rows'"),
        (lambda: fa.diloco(send="fp8"), ArgumentError, '"float32" or "bfloat16"'),
        (lambda: fa.diloco(outer="sgd("), ConfigError, "makes no optimizer"),
        (lambda: fa.diloco(outer="0.7"), ConfigError, "makes no optimizer"),
        (lambda: fa.diloco(outer="sgd(rate)"), ConfigError, "makes no optimizer: malformed node"),
        (lambda: fa.diloco(outer="sgd(0.7, speed=2)"), ConfigError, "no option 'speed'"),
        (lambda: fa.diloco(outer="sdg(0.7)"), ConfigError, "of sgd, adam, adamw"),
        (lambda: fa.diloco(outer=fa.sgd(lambda n: 0.1)), ConfigError, "makes no optimizer"),
        (lambda: fa.diloco(outer=fa.sgd(0.1, groups={"*": {"lr": 1.0}})), ConfigError, "makes"),
    ],
)
def test_what_can_not_be_is_refused_at_once(make, error, text):
    with pytest.raises(error) as found:
        make()
    assert text in str(found.value)


def plan_of(strategy):
    return str(program(loss_fn, strategy=strategy).plan)


def test_the_plan_says_when_replicas_average(pools):
    text = pools.run(2, plan_of, "diloco(2, every=32, warmup=4)")[0]
    assert "d(sum of totals) / (sum of weights), over micro-batches and ranks of each replica" in text
    assert (
        "diloco: 2 replicas train apart, and average after each 32 steps, and after each of the first 4"
        in text
    )
    assert "diloco: each replica keeps optimizer slots of its own" in text


def refused(strategy, step):
    with pytest.raises((CapabilityError, AxisProductError)) as error:
        program(STEPS[step], strategy=strategy).init()
    return str(error.value)


STEPS = {
    "plain": loss_fn,
    "step": fa.compile(loss_fn, "step"),
    "ema": fa.with_ema(loss_fn, decay=0.9),
}


@pytest.mark.parametrize(
    ("strategy", "step", "text"),
    [
        ("local_sgd(2)", "step", "replicas of local_sgd weigh gradients by their own rows"),
        ("diloco(2)", "ema", "the outer optimizer moves the anchor"),
        ("local_sgd(2) * deepspeed(1)", "plain", "deepspeed averages gradients by itself"),
        ("ddp(1) * local_sgd(2)", "plain", "stands twice"),
    ],
)
def test_what_replicas_can_not_carry_out_names_a_way(pools, strategy, step, text):
    for found in pools.run(2, refused, strategy, step):
        assert text in found
        assert "fix:" in found


def auto_plan():
    return str(program(fa.compile(loss_fn), strategy="local_sgd(2)").plan)


def test_auto_compiles_the_loss_and_says_why_not_the_step(pools):
    text = pools.run(2, auto_plan)[0]
    assert "replicas of local_sgd weigh gradients by their own rows" in text
    assert "scope" in text
