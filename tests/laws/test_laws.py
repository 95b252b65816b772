"""Laws that hold over every choice of transforms and configs (hypothesis)."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fnaccel as fa
from fnaccel.config.recipes import CheckpointRecipe
from fnaccel.program.plan import digest
from fnaccel.testing import assert_close
from tests.tiny_models import batch_of, loss_fn, program, whole_params

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
    fa.config.OptimizerRecipe,
    name=st.sampled_from(["sgd", "adam", "adamw", "adafactor"]),
    lr=floats,
    schedule=st.sampled_from(["constant", "cosine", "warmup_cosine"]),
    schedule_options=st.dictionaries(st.sampled_from(["warmup", "total"]), st.integers(1, 9)),
    options=st.dictionaries(st.sampled_from(["weight_decay", "eps"]), floats),
    groups=st.dictionaries(st.text("abc*.", min_size=1), st.dictionaries(st.just("lr"), floats)),
)
recipes = st.builds(
    fa.config.Recipe,
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
        fa.config.DataRecipe,
        window=st.none() | st.integers(1, 4),
        seed=st.integers(0, 9),
        per_rank=st.booleans(),
    ),
    run=st.builds(fa.config.RunRecipe, seed=st.integers(0, 9), epochs=st.none() | st.integers(1, 3)),
    launch=st.builds(
        fa.config.LaunchRecipe,
        ranks=st.none() | st.integers(1, 4),
        cpu=st.booleans(),
        watchdog=st.floats(0, 600),
        gpus=st.none() | st.sampled_from(["0", "0,1", "GPU-6e"]),
        env=st.dictionaries(st.text("ABC", min_size=1), st.text("01 yes:#", max_size=5)),
    ),
    checkpoint=st.builds(CheckpointRecipe, directory=st.none() | st.text("ab/ é#", min_size=1, max_size=5)),
)


@settings(deadline=None)
@given(recipes)
def test_law_9_a_recipe_survives_yaml(recipe):
    assert fa.config.from_yaml(fa.config.to_yaml(recipe) or "{}") == recipe


STRATEGIES = [
    fa.local(), fa.ddp(), fa.ddp(2, bucket_mb=3.5, static_graph=True, hook="bf16"), fa.fsdp(), fa.hsdp(2, 4),
    fa.ddp(hook="fp16+powersgd"), fa.ddp(hook=fa.strategies.powersgd(matrix_approximation_rank=2)),
    fa.ddp(hook=fa.strategies.powersgd(batched=True, wrap="bf16", start_powerSGD_iter=5)) * fa.fsdp(2),
    fa.fsdp(units=("Block", "Head"), reshard_after_forward=False, ignore="x.*", init="rank0"), fa.fsdp(units=1000),
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_strategy_is_its_text(strategy):
    assert fa.strategy(str(strategy)) == strategy
    assert hash(strategy) == hash(attrs.evolve(strategy))


def test_law_12_and_13_hold_under_fp16_too():
    with fa.start():
        step = fa.with_precision(loss_fn, fa.transforms.Precision(compute="fp16", init_scale=64.0))
        train_step = program(step, optimizer=fa.adamw(fa.schedules.linear(0.1, 0.0, 4)))
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
    recipe = fa.config.Recipe(
        accumulate=2, clip_norm=0.5, ema=0.9, optimizer=fa.config.OptimizerRecipe(name="sgd", lr=0.1)
    )
    with fa.start():
        applied = fa.config.apply(recipe, loss_fn, program_model())
        by_hand = program(
            fa.with_ema(fa.clip_norm(fa.accumulate(loss_fn, 2), 0.5), 0.9), model=program_model()
        )
        assert str(applied.plan) == str(by_hand.plan)
        a, b = applied.init(), by_hand.init()
        a, _ = applied(a, batch_of(4))
        b, _ = by_hand(b, batch_of(4))
        assert_close(whole_params(a), whole_params(b))


def program_model():
    from tests.tiny_models import Net

    return Net


@attrs.frozen
class Told:
    """A hook on gradients and on updates that reports all that it is told."""

    name: str

    def report(self, info):
        info.record(f"{self.name}/step", info.step * 1.0)
        info.record(f"{self.name}/updates", info.updates * 1.0)
        info.record(f"{self.name}/param", info.params["out.weight"].detach().sum())

    def on_gradients(self, grads, own, info):
        self.report(info)
        return own

    def on_update(self, engine, own, info):
        self.report(info)
        info.record("skip", 0.0 if info.skip is None else info.skip)  # a graph can't tell that it never is
        return own


def told(strategy, options, skips):
    step = fa.Transform("before", fa.Phase.GRADS, apply=Told("before"))(loss_fn)
    step = fa.Transform("after", fa.Phase.UPDATE, apply=Told("after"))(step)
    step = fa.skip_nonfinite(step) if skips else step
    step = step if options is None else fa.compile(step, "step", **options)
    train_step = program(step, strategy=strategy)
    state = train_step.init(seed=0)
    seen = []
    for number in range(3):
        x, y = batch_of(4, seed=number)
        batch = (x * float("nan"), y) if skips and number == 1 else (x, y)
        state, metrics = train_step(state, batch)
        names = [name for name in metrics if "/" in name or name == "skip"]
        seen.append({name: float(full(metrics[name])) for name in sorted(names)})
    return seen


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2)])
def test_hooks_are_told_the_same_eagerly_and_in_a_graph(pools, strategy, ranks, skips):
    for eager, captured in zip(
        pools.run(ranks, told, strategy, None, skips),
        pools.run(ranks, told, strategy, {"backend": "eager"}, skips),
        strict=True,
    ):
        assert len(eager[0]) == 7
        assert [call["after/updates"] for call in eager] == [0, 1, 1 if skips else 2]
        for mine, theirs in zip(eager, captured, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)


def test_a_hook_with_a_state_of_its_own_is_not_captured():
    counting = fa.Transform("told", fa.Phase.GRADS, apply=Told("told"), init=lambda params: {"calls": 0})
    with fa.start(device="cpu"):
        train_step = program(fa.compile(counting(loss_fn), "step", backend="eager"))
        state, _ = train_step(train_step.init(), batch_of(4))
    assert state.transforms["told"] == {"calls": 0}
