"""Numbers and states of a user's transform: whole on every rank, and of one structure."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import Net, batch_of, loss_fn

NAMES = ("norm", "sum", "peak", "weight_norm")


def recorded(strategy, compiled):
    """Metrics of hooks on gradients and parameters, and a state that one of them keeps."""

    def on_gradients(grads, own, info):
        grad = grads["inp.weight"]
        info.record("norm", grad.norm())
        info.record("sum", grad.sum())
        info.record("peak", grad.abs().max())
        return grads, own if compiled else {"norm": grad.norm()}

    def on_update(params, own, info):
        info.record("weight_norm", params["inp.weight"].norm())
        return own

    first = None if compiled else lambda params: {"norm": torch.zeros(())}
    step = fa.Transform("watch", fa.Phase.GRADS, apply=on_gradients, init=first)(loss_fn)
    step = fa.Transform("weights", fa.Phase.UPDATE, apply=on_update)(step)
    step = fa.compile(step, scope="step", backend="eager") if compiled else step
    train_step = fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    state, metrics = train_step(train_step.init(seed=0), batch_of(8))
    kept = None if compiled else fa.snapshot(state).transforms["watch"]["norm"]
    return [float(metrics[name]) for name in NAMES], type(metrics["norm"]).__name__, kept


@pytest.mark.long_except(r"eager|2-ddp-captured")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (2, "fsdp"), (2, "hsdp(1, 2)"), (3, "fsdp")])
def test_recorded_values_are_whole(pools, ranks, strategy, compiled):
    expected, _, own = pools.run(1, recorded, "local", compiled)[0]
    for values, kind, kept in pools.run(ranks, recorded, strategy, compiled):
        assert kind == "Tensor"
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert compiled or float(kept) == pytest.approx(float(own), rel=1e-5)


@pytest.mark.parametrize(
    ("first", "following", "says"),
    [
        ({"norms": []}, lambda own: {"norms": [*own["norms"], 1.0]}, "norms/0 was absent, and is float"),
        ({"ema": 0}, lambda own: {"ema": 0.5}, "ema was int, and is float"),
        ({"last": None}, lambda own: {"last": torch.ones(2)}, "last was absent, and is a tensor of shape"),
        (
            torch.zeros(2),
            lambda own: torch.zeros(3),
            r"it was a tensor of shape \[2\] in float32, and is .* \[3\]",
        ),
        ({"a": 1, "b": 2}, lambda own: {"a": 1}, "b was int, and is absent"),
        (torch.zeros(2), torch.Tensor.double, "in float32, and is a tensor of shape .* in float64"),
    ],
)
def test_a_state_that_changes_its_structure_is_named(first, following, says):
    """A checkpoint of it could not be restored: only its first value exists then."""
    step = fa.Transform(
        "own",
        fa.Phase.GRADS,
        apply=lambda grads, own, info: (grads, following(own)),
        init=lambda params: first,
    )(loss_fn)
    with fa.start():
        train_step = fa.train_step(step, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.1))
        with pytest.raises(errors.ArgumentError, match=says):
            train_step(train_step.init(), batch_of(4))
