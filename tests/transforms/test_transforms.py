"""Each transform on one process: what it changes, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


def run(step, calls=3, rows=7, **options):
    train_step = program(step, **options)
    state = train_step.init(seed=0)
    metrics = {}
    for call in range(calls):
        state, metrics = train_step(state, batch_of(rows, call))
    return state, metrics


class TestPrecision:
    def test_it_reaches_methods_that_the_loss_calls(self):
        seen = {}

        def spying(model, batch):
            seen["forward"] = model(batch[0]).dtype
            seen["method"] = model.scored(batch[0]).dtype
            return loss_fn(model, batch)

        run(fa.with_precision(spying, "bf16"), calls=1)
        assert seen == {"forward": torch.bfloat16, "method": torch.bfloat16}

    def test_parameters_and_loss_stay_fp32(self):
        state, metrics = run(fa.with_precision(loss_fn, "bf16"))
        assert state.params["out.weight"].dtype is torch.float32
        assert metrics["loss"].dtype is torch.float32

    def test_an_explicit_policy_keeps_parameters_in_its_dtype(self):
        policy = fa.transforms.Precision(param="bf16", compute="bf16")
        train_step = program(
            fa.with_precision(lambda m, b: loss_fn(m, fa.tree.cast(b, torch.bfloat16)), policy)
        )
        state = train_step.init()
        assert state.params["out.weight"].dtype is torch.bfloat16
        state, _ = train_step(state, batch_of(4))

    def test_what_is_returned_is_in_the_output_dtype(self):
        def returning(model, batch):
            out = model(batch[0])
            return fa.Mean(out.sum(), weight=1, aux={"rows": fa.Concat(out[:, 0]), "one": out.mean()})

        for policy, dtype in (
            ("bf16", torch.float32),
            (fa.transforms.Precision(compute="bf16", output="bf16"), torch.bfloat16),
        ):
            out = fa.with_precision(returning, policy)(Net(), batch_of(2))
            assert {out.total.dtype, out.aux["rows"].value.dtype, out.aux["one"].dtype} == {dtype}

    def test_a_policy_that_casts_up_is_refused(self):
        with pytest.raises(errors.CapabilityError, match="casts up"):
            fa.with_precision(loss_fn, fa.transforms.Precision(param="bf16", compute="fp32"))

    def test_fp16_skips_halves_and_grows(self):
        policy = fa.transforms.Precision(compute="fp16", init_scale=1024.0, interval=2)
        step = fa.with_ema(fa.with_precision(loss_fn, policy), 0.5)
        train_step = program(step, optimizer=fa.adamw(fa.schedules.linear(0.1, 0.0, 10)))
        state = train_step.init()
        state, _first = train_step(state, batch_of(4))
        kept = fa.snapshot(state)
        x, y = batch_of(4)
        state, bad = train_step(state, (x, y * torch.inf))
        assert float(bad["skipped"]) == 1.0
        assert float(state.updates) == float(kept.updates) == 1.0
        assert state.step == 2
        for what in ("params", "opt", "ema"):
            assert fa.tree.allclose(getattr(fa.snapshot(state), what), getattr(kept, what), rtol=0, atol=0)
        assert float(state.scale["scale"]) == 512.0
        state, good = train_step(state, batch_of(4))
        assert float(good["lr"]) == pytest.approx(float(bad["lr"]))  # the schedule did not move
        state, _ = train_step(state, batch_of(4))
        assert float(state.scale["scale"]) == 1024.0

    def test_fp16_scale_divides_out(self):
        policy = fa.transforms.Precision(compute="fp16", init_scale=256.0)
        small, _ = run(fa.with_precision(loss_fn, policy))
        plain, _ = run(loss_fn)
        for name, value in whole_params(plain).items():
            assert torch.allclose(value, small.params[name], atol=2e-3)


class TestAccumulation:
    @pytest.mark.parametrize("n", [1, 2, 3, 7])
    def test_law_5_any_split_is_one_batch(self, n):
        one, _ = run_double(loss_fn)
        many, _ = run_double(fa.accumulate(loss_fn, n))
        for name, value in one.params.items():
            assert torch.allclose(value, many.params[name], atol=1e-12, rtol=0)

    def test_a_window_is_micro_batches_as_they_stand(self):
        batches = [batch_of(5, 1), batch_of(2, 2), batch_of(9, 3)]
        train_step = program()
        state, metrics = train_step(train_step.init(), fa.data.Window(batches))
        joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        other = program()
        expected, whole = other(other.init(), joined)
        assert float(metrics["loss"]) == pytest.approx(float(whole["loss"]), abs=1e-6)
        for name, value in whole_params(expected).items():
            assert torch.allclose(value, state.params[name], atol=1e-6)

    def test_each_batch_of_a_window_is_cut(self):
        calls = []

        def counted(model, batch):
            calls.append(len(batch[0]))
            return loss_fn(model, batch)

        window = fa.data.Window([batch_of(5, 1), batch_of(2, 2), batch_of(9, 3)])
        step = fa.accumulate(counted, 2)
        train_step = program(step)
        state, _ = train_step(train_step.init(), window)
        assert calls == [3, 2, 1, 1, 5, 4]
        plain = program()
        expected, _ = plain(plain.init(), window)
        for name, value in whole_params(expected).items():
            assert torch.allclose(value, state.params[name], atol=1e-6)
        assert "n=2 of each batch (2 * m with window=m)" in str(train_step.plan)
        assert fa.config.Recipe(accumulate=2, data=fa.config.DataRecipe(window=3)).micro_batches == 6

    def test_a_bare_scalar_is_the_mean_of_micro_batches(self):
        def bare(model, batch):
            loss = loss_fn(model, batch)
            return loss.total / loss.weight

        state, _metrics = run(fa.accumulate(bare, 2), calls=1, rows=6)
        expected, _ = run(loss_fn, calls=1, rows=6)
        for name, value in whole_params(expected).items():
            assert torch.allclose(value, state.params[name], atol=1e-6)


def run_double(step):
    train_step = program(step, model=lambda: Net().double())
    state = train_step.init(seed=0)
    metrics = {}
    for call in range(3):
        state, metrics = train_step(state, fa.tree.cast(batch_of(7, call), torch.float64))
    return state, metrics


def test_with_weight_divides_up_front():
    def total_only(model, batch):
        return loss_fn(model, batch).total

    step = fa.with_weight(fa.accumulate(total_only, 3), lambda batch: len(batch[1]))
    state, metrics = run(step)
    expected, plain = run(loss_fn)
    assert float(metrics["loss"]) == pytest.approx(float(plain["loss"]), abs=1e-6)
    for name, value in whole_params(expected).items():
        assert torch.allclose(value, state.params[name], atol=1e-6)


class TestClipping:
    def test_norm(self):
        state, metrics = run(fa.clip_norm(loss_fn, 0.01), calls=1)
        torch.manual_seed(0)
        net = Net()
        loss = loss_fn(net, batch_of(7, 0))
        (loss.total / loss.weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        assert float(metrics["grad_norm"]) == pytest.approx(float(norm), abs=1e-6)
        for name, value in net.named_parameters():
            assert torch.allclose(value - 0.1 * value.grad, state.params[name], atol=1e-7)

    def test_value_acts_on_the_averaged_gradient(self):
        state, _ = run(fa.clip_value(fa.accumulate(loss_fn, 2), 0.005), calls=1)
        torch.manual_seed(0)
        net = Net()
        loss = loss_fn(net, batch_of(7, 0))
        (loss.total / loss.weight).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.005)
        for name, value in net.named_parameters():
            assert torch.allclose(value - 0.1 * value.grad, state.params[name], atol=1e-7)

    def test_written_order_is_execution_order(self):
        value_last, _ = run(fa.clip_value(fa.clip_norm(loss_fn, 0.05), 0.01), calls=1)
        norm_last, _ = run(fa.clip_norm(fa.clip_value(loss_fn, 0.01), 0.05), calls=1)
        torch.manual_seed(0)
        net = Net()
        loss = loss_fn(net, batch_of(7, 0))
        (loss.total / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)
        for name, value in net.named_parameters():
            assert torch.allclose(value - 0.1 * value.grad, value_last.params[name], atol=1e-7)
        assert any(
            not torch.allclose(value_last.params[n], norm_last.params[n], atol=1e-5) for n in norm_last.params
        )


def test_skip_nonfinite_leaves_everything_as_it_is():
    train_step = program(
        fa.skip_nonfinite(loss_fn), optimizer=fa.optim.from_torch(torch.optim.RMSprop, lr=0.1)
    )
    state = train_step.init()
    state, _ = train_step(state, batch_of(4))
    kept = fa.snapshot(state)
    x, y = batch_of(4)
    state, metrics = train_step(state, (x * torch.nan, y))
    assert float(metrics["skipped"]) == 1.0
    assert fa.tree.allclose(fa.snapshot(state).params, kept.params, rtol=0, atol=0)
    assert fa.tree.allclose(fa.snapshot(state).opt, kept.opt, rtol=0, atol=0)


def test_ema_follows_the_parameters():
    train_step = program(fa.with_ema(loss_fn, 0.75))
    state = train_step.init()
    expected = {name: value.detach().clone() for name, value in state.params.items()}
    for call in range(3):
        state, _ = train_step(state, batch_of(4, call))
        for name, value in state.params.items():
            expected[name].lerp_(value.detach(), 0.25)
    for name, value in expected.items():
        assert torch.allclose(state.ema[name], value, atol=1e-7)


def test_remat_recomputes_and_changes_nothing():
    calls = []

    class Counting(Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.register_forward_pre_hook(lambda *_: None)
                block.mix.register_forward_hook(lambda *_: calls.append(1))

    plain, _ = run(loss_fn, model=Counting, calls=2)
    once = len(calls)
    again, _ = run(fa.remat(loss_fn), model=Counting, calls=2)
    assert len(calls) - once == 2 * once
    assert set(plain.params) == set(again.params)
    for name, value in whole_params(plain).items():
        assert torch.equal(value, again.params[name])


class TestCompilation:
    @pytest.mark.parametrize("scope", ["block", "loss", "step"])
    def test_law_7_compiled_equals_eager(self, scope):
        step = fa.clip_norm(fa.accumulate(loss_fn, 2), 0.5)
        eager, plain = run(step, optimizer=fa.adamw(0.05), rows=8)
        compiled, metrics = run(
            fa.compile(step, scope, backend="aot_eager"), optimizer=fa.adamw(0.05), rows=8
        )
        assert float(metrics["loss"]) == pytest.approx(float(plain["loss"]), abs=1e-6)
        for name, value in whole_params(eager).items():
            assert torch.allclose(value, compiled.params[name], atol=1e-6)

    @pytest.mark.parametrize(("mode", "begins"), [(None, []), ("reduce-overhead", ["begin"])])
    def test_cuda_graphs_are_told_where_a_micro_batch_begins(self, monkeypatch, mode, begins):
        """Blocks are graphs of their own: a second one must not take the memory of the first."""
        events = []
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: events.append("begin"))

        class Told(Net):
            def forward(self, x):
                events.append("forward")
                return super().forward(x)

        step = fa.compile(fa.accumulate(loss_fn, 2), "block", backend="eager", mode=mode)
        run(step, model=Told, calls=2)
        assert events == [*begins, "forward"] * 4

    def test_nothing_compiled_is_an_error(self):
        inner = torch._dynamo.disable(loss_fn)

        def hidden(model, batch):
            return inner(model, batch)

        train_step = program(fa.compile(hidden, "loss", backend="aot_eager"))
        with pytest.raises(errors.NotCompiledError, match="compiled nothing"):
            train_step(train_step.init(), batch_of(4))

    def test_no_blocks_is_an_error_at_init(self):
        step = fa.compile(loss_fn, "block", backend="aot_eager")
        with pytest.raises(errors.NotCompiledError, match="no blocks"):
            program(step, model=lambda: nn.Linear(3, 1)).init()


class TestOwnTransforms:
    def test_every_phase_takes_one(self):
        order = []

        def module(model):
            order.append(("module", type(model).__name__))

        def forward(fn):
            return lambda model, batch: fa.Mean(fn(model, batch).total * 2, weight=len(batch[0]))

        def grads(named, own, info):
            order.append(("grads", min(named)))
            info.record("calls", own)
            return {name: grad * 0.5 for name, grad in named.items()}, own + 1

        def update(params, own, info):
            order.append(("update", info.step))
            return own

        def call(inner):
            def outer(state, batch, **options):
                order.append(("call", state.step))
                return inner(state, batch, **options)

            return outer

        step = loss_fn
        for name, phase, apply in (
            ("u", fa.Phase.UPDATE, update), ("c", fa.Phase.CALL, call), ("g", fa.Phase.GRADS, grads),
            ("f", fa.Phase.FORWARD, forward), ("m", fa.Phase.MODULE, module),
        ):  # fmt: skip
            step = fa.Transform(name, phase, apply=apply, init=(lambda params: 0) if name == "g" else None)(
                step
            )
        state, metrics = run(step, calls=1)
        expected, _ = run(loss_fn, calls=1)  # doubled in forward, halved in grads
        assert [what for what, _ in order] == ["module", "call", "grads", "update"]
        assert metrics["calls"] == 0
        assert state.transforms["g"] == 1
        for name, value in whole_params(expected).items():
            assert torch.allclose(value, state.params[name], atol=1e-7)

    def test_backward_is_the_engines_own(self):
        with pytest.raises(errors.ArgumentError, match="engine's own"):
            fa.Transform("mine", fa.Phase.BACKWARD, apply=lambda x: x)

    @pytest.mark.parametrize(("arguments", "message"), [
        ({"phase": "GRADS"}, "'GRADS' is no phase"),
        ({"phase": 7}, "7 is no phase"),
        ({"name": ""}, "'' is no name of a transform"),
        ({"apply": None}, r"apply=None, which can't be called[\s\S]*phase GRADS"),
    ])  # fmt: skip
    def test_a_transform_checks_its_arguments(self, arguments, message):
        with pytest.raises(errors.ArgumentError, match=message):
            fa.Transform(
                **{"name": "mine", "phase": fa.Phase.GRADS, "apply": lambda grads: grads} | arguments
            )

    @pytest.mark.parametrize("needs", ["gradientz", ["modules", "gradientz"]])
    def test_a_transform_needs_capabilities_that_exist(self, needs):
        with pytest.raises(errors.UnknownNameError, match=r"'gradientz'[\s\S]*did you mean 'gradients'"):
            fa.Transform("mine", fa.Phase.GRADS, apply=lambda grads: grads, needs=needs)

    def test_a_function_of_gradients_needs_them(self):
        """DeepSpeed keeps the gradients, so the function would change none."""
        halved = fa.Transform("half", fa.Phase.GRADS, apply=lambda grads, own, info: (grads, own))
        with (
            fa.simulate(ranks=2),
            pytest.raises(errors.CapabilityError, match=r"half needs gradients, which deepspeed\(stage=1\)"),
        ):
            program(halved(loss_fn), strategy="deepspeed_zero1")

    def test_a_call_transform_that_returns_no_function_is_named(self):
        silent = fa.Transform("silent", fa.Phase.CALL, apply=lambda call: None)
        with pytest.raises(errors.ArgumentError, match="'silent' returned NoneType, not a function"):
            run(silent(loss_fn), calls=1)

    def test_a_name_stands_once_unless_repeatable(self):
        once = fa.Transform("mine", fa.Phase.FORWARD, apply=lambda fn: fn)
        with pytest.raises(errors.RepeatedTransformError):
            once(once(loss_fn))
        many = fa.Transform("mine", fa.Phase.FORWARD, apply=lambda fn: fn, repeatable=True)
        assert len(many(many(loss_fn)).transforms) == 2


def test_a_step_stays_callable_under_its_forward_transforms():
    inside = []

    def spying(model, batch):
        out = model(batch[0])
        inside.append(out.dtype)
        return out

    step = fa.clip_norm(fa.with_precision(spying, "bf16"), 1.0)
    assert step(Net(), batch_of(2)).dtype is torch.float32
    assert inside == [torch.bfloat16]


class TestOwnGradients:
    """What a GRADS transform returns is what the next one sees, and is checked."""

    @staticmethod
    def transform(name, fn):
        return fa.Transform(name, fa.Phase.GRADS, apply=lambda grads, own, info: (fn(grads), own))

    def test_transforms_chain(self):
        zero = self.transform("zero", lambda grads: {k: torch.zeros_like(g) for k, g in grads.items()})
        same = self.transform("same", dict)
        train_step = program(same(fa.clip_norm(zero(loss_fn), 1.0)))
        state = train_step.init()
        before = fa.snapshot(state)
        state, metrics = train_step(state, batch_of(4))
        assert float(metrics["grad_norm"]) == 0.0
        assert fa.tree.allclose(fa.snapshot(state).params, before.params, rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("fn", "says"),
        [
            (lambda g: {k: v for k, v in g.items() if k != "out.bias"}, "out.bias is missing"),
            (lambda g: {**g, "typo": torch.ones(1)}, "typo is unknown"),
            (lambda g: {**g, "out.bias": torch.ones(())}, r"out.bias has shape \[\], not \[1\]"),
            (lambda g: {**g, "out.bias": 3}, "out.bias is int, not a tensor"),
            (lambda g: list(g.values()), "list instead of a dict"),
        ],
    )
    def test_what_is_wrong_is_named(self, fn, says):
        train_step = program(self.transform("bad", fn)(loss_fn))
        state = train_step.init()
        with pytest.raises(errors.TreeMismatchError, match=says):
            train_step(state, batch_of(4))
        state.params  # noqa: B018 - still live

    def test_a_single_return_value_is_named(self):
        bad = fa.Transform("bad", fa.Phase.GRADS, apply=lambda grads, own, info: grads)
        train_step = program(bad(loss_fn))
        with pytest.raises(errors.ArgumentError, match="returned dict"):
            train_step(train_step.init(), batch_of(4))


def test_double_precision_can_be_clipped():
    train_step = program(fa.clip_norm(loss_fn, 0.1), model=lambda: Net().double())
    state, _ = train_step(train_step.init(), fa.tree.cast(batch_of(4), torch.float64))
    assert state.params["out.bias"].dtype is torch.float64


def test_a_policy_casts_a_model_of_another_dtype():
    train_step = program(fa.with_precision(loss_fn, "bf16"), model=lambda: Net().bfloat16())
    assert train_step.init().params["out.bias"].dtype is torch.float32


class TestOrderOfDecisions:
    """Whether an update is skipped is decided before a transform could hide the reason."""

    @pytest.mark.parametrize("wrap", [
        lambda step: fa.with_precision(fa.clip_value(step, 0.1), fa.transforms.Precision(compute="fp16", init_scale=8.0)),
        lambda step: fa.skip_nonfinite(fa.clip_value(step, 0.1)),
    ])  # fmt: skip
    def test_an_infinity_that_is_clamped_is_still_skipped(self, wrap):
        train_step = program(wrap(loss_fn))
        state = train_step.init()
        before = fa.snapshot(state)
        x, y = batch_of(4)
        state, metrics = train_step(state, (x, y * torch.inf))
        assert float(metrics["skipped"]) == 1.0
        assert fa.tree.allclose(fa.snapshot(state).params, before.params, rtol=0, atol=0)

    def test_a_norm_is_taken_again_after_values_are_clipped(self):
        with_skip, one = run(fa.clip_norm(fa.clip_value(fa.skip_nonfinite(loss_fn), 0.01), 0.02), calls=1)
        without, two = run(fa.clip_norm(fa.clip_value(loss_fn, 0.01), 0.02), calls=1)
        assert float(one["grad_norm"]) == pytest.approx(float(two["grad_norm"]), abs=1e-7)
        for name, value in whole_params(without).items():
            assert torch.allclose(value, with_skip.params[name], atol=1e-7)


def test_gradients_keep_the_layout_of_parameters():
    def make():
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 1)).to(
            memory_format=torch.channels_last
        )
        net[2].weight = nn.Parameter(torch.randn(4, 1).t())
        return net

    def loss(model, images):
        return fa.Mean(model(images).square().sum(), weight=len(images))

    images = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    same = fa.Transform("same", fa.Phase.GRADS, apply=lambda grads, own, info: (grads, own))
    states = []
    for step in (loss, same(loss)):
        train_step = program(step, model=make, optimizer=fa.adamw(0.1))
        state, _ = train_step(train_step.init(), images)
        states.append(whole_params(state))
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], atol=1e-7), name


def test_what_an_output_dtype_of_fp64_means():
    step = fa.with_precision(loss_fn, fa.transforms.Precision(compute="bf16", output="fp64"))
    _, metrics = run(step, calls=1)
    assert metrics["loss"].dtype is torch.float64
