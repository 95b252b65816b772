"""The user's backward hooks, and parameters that begin to take a gradient after `init`."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import Net, batch_of, loss_fn, program


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def hooked_net(seen):
    model = Net()
    model.out.weight.register_hook(lambda grad: seen.append(grad.clone()))
    return model


def gradient_of_the_mean():
    torch.manual_seed(0)
    model = Net()
    output = loss_fn(model, batch_of(8))
    (output.total / output.weight).backward()
    return model.out.weight.grad


class TestHooks:
    @pytest.mark.parametrize("strategy", ["local", "ddp"])
    @pytest.mark.parametrize("precision", ["fp32", "fp64"])
    def test_they_see_the_gradient_of_the_mean(self, strategy, precision):
        seen = []
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[precision]
        step = fa.with_precision(loss_fn, fa.transforms.Precision(param=precision, compute=precision))
        train_step = program(step, model=lambda: hooked_net(seen), strategy=strategy)
        x, y = batch_of(8)
        train_step(train_step.init(), (x.to(dtype), y.to(dtype)))
        torch.testing.assert_close(seen[0].float(), gradient_of_the_mean())

    def test_an_update_without_weight_is_left_out_as_ever(self):
        seen = []
        train_step = program(
            lambda model, batch: fa.Mean(model(batch[0]).sum(), weight=0), model=lambda: hooked_net(seen)
        )
        state = train_step.init()
        before = state.params["out.weight"].clone()
        state, metrics = train_step(state, batch_of(8))
        assert torch.equal(state.params["out.weight"], before)
        assert metrics["skipped"] == 1.0

    def test_of_several_micro_batches_they_see_totals_and_the_plan_says_so(self):
        seen = []
        train_step = program(fa.accumulate(loss_fn, 2), model=lambda: hooked_net(seen))
        state = train_step.init()
        assert "1 backward hook sees gradients of a total, not of a mean" in str(train_step.plan)
        with pytest.warns(UserWarning, match=r"several micro-batches: out\.weight\. fa\.with_weight"):
            state, _ = train_step(state, batch_of(8))
        torch.testing.assert_close(sum(seen) / 8, gradient_of_the_mean())
        train_step(state, batch_of(8))  # and does not warn again

    def test_with_a_weight_known_before_there_is_no_note(self, recwarn):
        seen = []
        step = fa.with_weight(fa.accumulate(loss_fn, 2), lambda batch: len(batch[0]))
        train_step = program(step, model=lambda: hooked_net(seen))
        train_step(train_step.init(), batch_of(8))
        (count,) = train_step.plan.notes
        assert "parameters" in count
        torch.testing.assert_close(sum(seen), gradient_of_the_mean())
        assert not recwarn.list

    def test_a_hook_that_is_added_later_is_noticed(self):
        train_step = program()
        state, _ = train_step(train_step.init(), batch_of(8))
        seen = []
        train_step.look(state, lambda model: model.out.weight.register_hook(lambda g: seen.append(g.clone())))
        before = {name: value.clone() for name, value in state.params.items()}
        train_step(state, batch_of(8))
        model = Net()
        model.load_state_dict(before)
        output = loss_fn(model, batch_of(8))
        (output.total / output.weight).backward()
        torch.testing.assert_close(seen[0], model.out.weight.grad)

    @pytest.mark.parametrize("strategy", ["fsdp", "compiled"])
    def test_a_hook_that_would_never_run_raises(self, strategy):
        seen = []
        options = (
            {"strategy": "fsdp"} if strategy == "fsdp" else {"step": fa.compile(loss_fn, backend="eager")}
        )
        train_step = program(model=lambda: hooked_net(seen), **options)
        with pytest.raises(errors.CapabilityError, match=r"hook of out\.weight would never run"):
            train_step.init()
        train_step = program(**options)
        state, _ = train_step(train_step.init(), batch_of(8))
        train_step.engine.layout.model.out.weight.register_hook(lambda grad: grad)
        with pytest.raises(errors.CapabilityError, match=r"hook of out\.weight would never run"):
            train_step(state, batch_of(8))


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp", "compiled"])
def test_a_parameter_that_takes_a_gradient_after_init_raises(strategy):
    """It never trained, and its gradients piled up."""
    options = (
        {"strategy": strategy} if strategy != "compiled" else {"step": fa.compile(loss_fn, backend="eager")}
    )
    train_step = program(frozen="inp.*", **options)
    state = train_step.init()
    state, _ = train_step(state, batch_of(4))
    train_step.engine.layout.model.inp.requires_grad_(True)
    with pytest.raises(
        errors.ReplacedParameterError, match=r"inp\.weight, inp\.bias takes a gradient"
    ) as raised:
        train_step(state, batch_of(4))
    assert "starting_at" in str(raised.value)
    train_step.engine.layout.model.inp.requires_grad_(False)
    train_step(state, batch_of(4))
