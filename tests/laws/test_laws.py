"""Laws that hold over every choice of transforms and configs (hypothesis)."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fnaccel as fa
from fnaccel.config.recipe import CheckpointRecipe
from fnaccel.program.plan import digest
from fnaccel.testing import assert_close
from tests.models import batch_of, loss_fn, program, whole_params

TRANSFORMS = {
    "precision": lambda step: fa.with_precision(step, "bf16"),
    "accumulate": lambda step: fa.accumulate(step, 2),
    "clip": lambda step: fa.clip_norm(step, 0.5),
    "ema": lambda step: fa.with_ema(step, 0.9),
    "remat": fa.remat,
}


@settings(deadline=None, max_examples=25)
@given(st.permutations(sorted(TRANSFORMS)))
def test_law_6_the_plan_does_not_depend_on_the_order_across_phases(names):
    with fa.start():
        step = loss_fn
        for name in names:
            step = TRANSFORMS[name](step)
        plan = program(step).plan
        base = loss_fn
        for name in sorted(TRANSFORMS):
            base = TRANSFORMS[name](base)
        assert str(plan) == str(program(base).plan)
        assert plan.hash == program(base).plan.hash


def test_the_plan_tells_functions_apart():
    def make(factor):
        def scaled(model, batch):
            return fa.Mean(loss_fn(model, batch).total * factor, weight=len(batch[0]))

        return scaled

    def longer(model, batch):
        loss = loss_fn(model, batch)
        return fa.Mean(loss.total + 0, weight=loss.weight)

    assert digest(make(2)) == digest(make(2))
    assert digest(make(2)) != digest(make(3))
    assert digest(make(2)) != digest(longer)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 4), st.integers(0, 4))
def test_law_4_n_steps_and_m_steps_are_n_plus_m_steps(n, m):
    with fa.start():
        train_step = program(fa.with_ema(loss_fn, 0.5), optimizer=fa.adamw(0.1))
        state = train_step.init(seed=0)
        for call in range(n):
            state, _ = train_step(state, batch_of(4, call))
        state = train_step.adopt(fa.snapshot(state))
        for call in range(n, n + m):
            state, _ = train_step(state, batch_of(4, call))
        expected = program(fa.with_ema(loss_fn, 0.5), optimizer=fa.adamw(0.1))
        straight = expected.init(seed=0)
        for call in range(n + m):
            straight, _ = expected.__call__(straight, batch_of(4, call))
        assert fa.tree.allclose(fa.snapshot(state), fa.snapshot(straight), rtol=0, atol=0)


floats = st.floats(1e-6, 1.0)
optimizers = st.builds(
    fa.OptimizerRecipe,
    name=st.sampled_from(["sgd", "adam", "adamw", "adafactor"]),
    lr=floats,
    schedule=st.sampled_from(["constant", "cosine", "warmup_cosine"]),
    schedule_options=st.dictionaries(st.sampled_from(["warmup", "total"]), st.integers(1, 9)),
    options=st.dictionaries(st.sampled_from(["weight_decay", "eps"]), floats),
    groups=st.dictionaries(st.text("abc*.", min_size=1), st.dictionaries(st.just("lr"), floats)),
)
recipes = st.builds(
    fa.Recipe,
    strategy=st.sampled_from(["local", "fsdp", "ddp(2) * fsdp(-1)"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    accumulate=st.integers(1, 8),
    clip_norm=st.none() | floats,
    skip_nonfinite=st.booleans(),
    ema=st.none() | floats,
    compile=st.sampled_from([None, "block", "loss", "step"]),
    transforms=st.lists(st.just("examples:thing"), max_size=2),
    optimizer=optimizers,
    data=st.builds(
        fa.DataRecipe, window=st.none() | st.integers(1, 4), seed=st.integers(0, 9), per_rank=st.booleans()
    ),
    checkpoint=st.builds(CheckpointRecipe, directory=st.none() | st.text("ab/ é:#", max_size=5)),
)


@settings(deadline=None)
@given(recipes)
def test_law_9_a_recipe_survives_yaml(recipe):
    assert fa.from_yaml(fa.to_yaml(recipe) or "{}") == recipe


STRATEGIES = [
    fa.local(), fa.ddp(), fa.ddp(2, bucket_mb=3.5, static_graph=True, hook="bf16"), fa.fsdp(), fa.hsdp(2, 4),
    fa.fsdp(units=("Block", "Head"), reshard_after_forward=False, ignore="x.*", init="rank0"), fa.fsdp(units=1000),
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_strategy_is_its_text(strategy):
    if "Hook" not in repr(strategy):
        assert fa.strategy(str(strategy)) == strategy
    assert hash(strategy) == hash(attrs.evolve(strategy))


def test_law_12_and_13_hold_under_fp16_too():
    with fa.start():
        step = fa.with_precision(loss_fn, fa.Precision(compute="fp16", init_scale=64.0))
        train_step = program(step, optimizer=fa.adamw(fa.linear(0.1, 0.0, 4)))
        state = train_step.init()
        structure = fa.tree.structure(state)
        rates = []
        for call in range(4):
            x, y = batch_of(4, call)
            state, metrics = train_step(state, (x, y * float("inf") if call == 1 else y))
            assert fa.tree.structure(state) == structure
            rates.append(round(float(metrics["lr"]), 5))
        assert rates == [0.1, 0.075, 0.075, 0.05]


def test_a_recipe_and_the_calls_it_stands_for_are_the_same_run():
    recipe = fa.Recipe(accumulate=2, clip_norm=0.5, ema=0.9, optimizer=fa.OptimizerRecipe(name="sgd", lr=0.1))
    with fa.start():
        applied = fa.apply(recipe, loss_fn, program_model())
        by_hand = program(
            fa.with_ema(fa.clip_norm(fa.accumulate(loss_fn, 2), 0.5), 0.9), model=program_model()
        )
        assert str(applied.plan) == str(by_hand.plan)
        a, b = applied.init(), by_hand.init()
        a, _ = applied(a, batch_of(4))
        b, _ = by_hand(b, batch_of(4))
        assert_close(whole_params(a), whole_params(b))


def program_model():
    from tests.models import Net

    return Net
