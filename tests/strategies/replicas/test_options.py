"""The texts, plans and refusals of `fa.local_sgd` and `fa.diloco`."""

from __future__ import annotations

import json

import pytest

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.errors import ArgumentError, AxisProductError, CapabilityError, ConfigError
from tests.tiny_models import Net, loss_fn, program


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (fa.local_sgd(), "local_sgd()"),
        (fa.local_sgd(4, every=16, warmup=2), "local_sgd(4, every=16, warmup=2)"),
        (fa.local_sgd(2, slots="average") * fa.fsdp(2), "local_sgd(2, slots='average') * fsdp(2)"),
        (fa.diloco(4, every=32, send="bfloat16"), "diloco(4, every=32, send='bfloat16')"),
        (fa.diloco(4, anchor="host"), "diloco(4, anchor='host')"),
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
        (lambda: fa.diloco(anchor="disk"), ArgumentError, '"device" or "host"'),
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


HELD = [
    ("local_sgd(2, every=4)", 0),
    ("diloco(2, every=4)", 2),
    ("diloco(2, every=4, outer='sgd(0.7)')", 1),
    ("diloco(2, every=4, outer='adam(0.1)')", 3),
    ("diloco(2, every=4, anchor='host')", 0),
]


@pytest.mark.parametrize(("strategy", "times"), HELD)
def test_plan_and_estimate_count_the_anchor_and_its_slots(capsys, strategy, times):
    whole = fa.strategies.footprint(Net, "local", 1, optimizer=fa.adamw(0.1))
    options = ["--strategy", strategy, "--ranks", "2", "--json"]
    main(["plan", "tests.tiny_models:loss_fn", "--model", "tests.tiny_models:Net", *options])
    planned = json.loads(capsys.readouterr().out)
    assert planned["footprint"]["slots"] == whole.slots + times * whole.parameters
    in_host_memory = "diloco: the anchor and the slots of the outer optimizer are in host memory"
    assert (in_host_memory in planned["plan"]["notes"]) == ("host" in strategy)
    loss, rows = "tests.tiny_models:loss_fn", "tests.tiny_models:batch_of"
    main(["estimate", "tests.tiny_models:Net", "--loss", loss, "--inputs", rows, "--batch", "4", *options])
    estimated = json.loads(capsys.readouterr().out)["training"]
    assert estimated["kinds"]["optimizer"] == whole.slots + times * whole.parameters


SENT = [
    ("local_sgd(2, every=4)", 460),
    ("local_sgd(2, every=4, slots='average')", 3 * 460),
    ("diloco(2, every=4)", 460),
    ("diloco(2, every=4, send='bfloat16')", 230),
    ("local_sgd(2, every=4) * fsdp(2)", 232),
]


@pytest.mark.parametrize(("strategy", "size"), SENT)
def test_plan_and_estimate_count_the_bytes_of_an_average(capsys, strategy, size):
    ranks = "4" if "fsdp" in strategy else "2"
    options = ["--strategy", strategy, "--ranks", ranks]
    main(["plan", "tests.tiny_models:loss_fn", "--model", "tests.tiny_models:Net", *options])
    peak = f"{size} B" if size < 1000 else f"{size / 1000:.2f} kB"
    planned = (
        f"dp_replicate 1 all_reduce a step, {-(-size // 4)} B: its share of {peak}, sent after each 4 steps"
    )
    assert planned in capsys.readouterr().out
    loss, rows = "tests.tiny_models:loss_fn", "tests.tiny_models:batch_of"
    main(["estimate", "tests.tiny_models:Net", "--loss", loss, "--inputs", rows, "--batch", "4", *options])
    assert f"dp_replicate 1 all_reduce, {-(-size // 4)} B" in capsys.readouterr().out
