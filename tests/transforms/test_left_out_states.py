"""The states of users' transforms: beside updates that are left out, and of transforms that stand twice."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.program.tail import Tail
from fnaccel.step import loss
from fnaccel.world.world import current
from tests.tiny_models import batch_of, loss_fn, program, whole_params

BAD = 3  # the step whose gradients are not finite


def begin(params):
    return {"count": 0, "moments": {name: torch.zeros_like(value) for name, value in params.items()}}


def momentum(grads, own, info):
    moments = {name: 0.9 * own["moments"][name] + grad for name, grad in grads.items()}
    return moments, {"count": own["count"] + 1, "moments": moments}


def in_place(grads, own, info):
    own["count"] += 1
    own["moments"] |= {name: 0.9 * own["moments"][name] + grad for name, grad in grads.items()}
    return dict(own["moments"]), own


def counted(params, own, info):
    return own + 1


MOMENTUM = fa.Transform("momentum", fa.Phase.GRADS, apply=momentum, init=begin)
WRITES = fa.Transform("momentum", fa.Phase.GRADS, apply=in_place, init=begin)
COUNTED = fa.Transform("counted", fa.Phase.UPDATE, apply=counted, init=lambda params: 0)
STEPS = {
    "before": lambda loss: fa.skip_nonfinite(MOMENTUM(loss)),
    "after": lambda loss: MOMENTUM(fa.skip_nonfinite(loss)),
    "writes": lambda loss: WRITES(fa.skip_nonfinite(loss)),
    "spike": lambda loss: fa.transforms.on_spike(MOMENTUM(loss), do="skip"),
}


def rows(number, bad):
    x, y = batch_of(8, seed=number)
    return x, y * torch.nan if bad and number == BAD else y


def trained(kind, strategy, compiled, bad):
    """The states and parameters after steps of which one is bad, or after the others alone."""
    step = COUNTED(STEPS[kind](loss_fn))
    train_step = program(fa.compile(step, "step", backend="eager") if compiled else step, strategy=strategy)
    state = train_step.init(seed=0)
    for number in range(6):
        if bad or number != BAD:
            state, metrics = train_step(state, rows(number, bad))
            assert float(metrics["skipped"]) == (number == BAD)
    found = fa.snapshot(state).transforms
    own = {name: found[name] for name in ("momentum", "counted")}
    return fa.tree.map(fa.tree.whole, own), whole_params(state), current().rank


@pytest.mark.long_except("fsdp-eager")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "local"), (2, "ddp"), (2, "fsdp")])
@pytest.mark.parametrize("kind", STEPS)
def test_an_update_that_is_left_out_leaves_them(pools, kind, ranks, strategy, compiled):
    """A NaN stayed in the moments, and all updates after it were left out too."""
    expected = pools.run(ranks, trained, kind, strategy, compiled, bad=False)
    for (own, params, _), (expected_own, expected_params, _) in zip(
        pools.run(ranks, trained, kind, strategy, compiled, bad=True), expected, strict=True
    ):
        assert own["counted"] == own["momentum"]["count"] == 5
        assert fa.tree.allclose(own, expected_own, rtol=0, atol=0)
        assert fa.tree.allclose(params, expected_params, rtol=0, atol=0)


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


def test_an_overflow_of_fp16_leaves_them(world):
    """The first scale is too large for the first gradient."""
    step = MOMENTUM(fa.with_precision(loss_fn, fa.transforms.Precision(compute="fp16", init_scale=2.0**120)))
    train_step = program(step)
    state, metrics = train_step(train_step.init(), batch_of(8))
    assert metrics["skipped"] == 1
    own = state.transforms["momentum"]
    assert own["count"] == 0
    assert all(not moment.any() for moment in own["moments"].values())


def test_what_is_decided_is_told(world):
    seen = []

    def look(grads, own, info):
        seen.append(float(info.skip))
        return grads, own

    train_step = program(fa.skip_nonfinite(fa.Transform("look", fa.Phase.GRADS, apply=look)(loss_fn)))
    state = train_step.init()
    for number in range(BAD + 2):
        state, _ = train_step(state, rows(number, bad=True))
    assert seen == [float(number == BAD) for number in range(BAD + 2)]


def test_a_tensor_that_was_changed_in_place_raises(world):
    def change(grads, own, info):
        return grads, own.add_(1)

    step = fa.Transform("change", fa.Phase.GRADS, apply=change, init=lambda params: torch.zeros(()))(loss_fn)
    train_step = program(fa.skip_nonfinite(step))
    with pytest.raises(
        errors.ArgumentError, match=r"changed a tensor of its state in place[\s\S]*new tensors"
    ):
        train_step(train_step.init(), batch_of(4))
    train_step = program(step)  # no update is left out here
    assert train_step(train_step.init(), batch_of(4))[0].transforms["change"] == 1


def traced(decay):
    """Keeps a trace of the gradients, and passes it on."""

    def apply(grads, own, info):
        own = {name: decay * own[name] + grad for name, grad in grads.items()}
        return own, own

    return fa.Transform(
        "trace",
        fa.Phase.GRADS,
        apply=apply,
        init=lambda params: {name: torch.zeros_like(value) for name, value in params.items()},
        repeatable=True,
    )


def test_a_transform_that_stands_twice_has_two_states(world, tmp_path):
    twice = traced(0.5)(traced(0.9)(loss_fn))
    plain = program(
        fa.Transform("other", fa.Phase.GRADS, apply=traced(0.5).apply, init=traced(0.5).init)(
            traced(0.9)(loss_fn)
        )
    )
    train_step = program(twice)
    assert [row.what for row in train_step.plan.rows if row.what.startswith("trace")] == ["trace", "trace.1"]
    state, expected = train_step.init(), plain.init()
    for number in range(4):
        state, _ = train_step(state, batch_of(8, seed=number))
        expected, _ = plain(expected, batch_of(8, seed=number))
    assert fa.tree.allclose(whole_params(state), whole_params(expected), rtol=0, atol=0)
    fa.save(tmp_path, state)
    restored = fa.restore(tmp_path, like=program(twice).init(seed=1))
    assert fa.tree.allclose(restored.transforms["trace.1"], expected.transforms["other"], rtol=0, atol=0)


def of_no_row(model, batch):
    """A step in which no row counts, by a weight that is a tensor."""
    x, y = batch
    return fa.Mean(((model(x) - y) ** 2).sum(), weight=torch.zeros(()))


@pytest.fixture
def unread(world, monkeypatch):
    """The host reads no weight, as on an accelerator."""
    monkeypatch.setattr(loss, "readable", lambda value: False)


def test_a_step_that_the_device_leaves_out_leaves_them(unread):
    """Nothing asks for a skip, and only the device knows that no row counts."""
    train_step = program(COUNTED(MOMENTUM(of_no_row)))
    state = train_step.init()
    before = fa.snapshot(state)
    for _ in range(2):
        state, metrics = train_step(state, batch_of(4))
    assert metrics["weight"] == 0
    assert fa.tree.allclose(state.transforms, before.transforms, rtol=0, atol=0)
    assert fa.tree.allclose(state.params, before.params, rtol=0, atol=0)


def test_steps_without_a_row_are_no_gradients_that_are_not_finite(unread):
    train_step = program(fa.skip_nonfinite(of_no_row, max_skipped=2))
    state = train_step.init()
    for _ in range(4):
        state, metrics = train_step(state, batch_of(4))
        assert metrics["skipped"] == 1
    assert state.updates == 0


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_a_state_on_the_host_beside_a_device_that_decides(skipped):
    """`torch.where` takes no tensors of two devices."""

    class Flag(torch.Tensor):
        """A flag of another device, which can be read."""

        device = torch.device("cuda")

    first, last = torch.zeros(3), torch.ones(3)
    states = {"mine": last}
    tail = Tail(skips=True, gradients=(), updates=(), users=("mine",))
    tail._stay_if_skipped({"mine": first}, states, torch.tensor(skipped).as_subclass(Flag))
    assert states["mine"] is (first if skipped else last)
