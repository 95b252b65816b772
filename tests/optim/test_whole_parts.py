"""Parts of one's own: rules that read whole parameters, on every strategy, and results that are refused by name."""

from __future__ import annotations

import attrs
import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


@attrs.frozen(repr=False)
class Polar(fa.extend.Part):
    """Momentum whose matrices are divided by their spectral norm, as a step of Muon."""

    whole = True

    def init(self, params):
        return {"sum": [torch.full_like(param, float(param.mean())) for param in params]}

    def update(self, ops, grads, slots, params, info):
        sums = ops.add_(ops.mul_(slots["sum"], 0.9), grads)
        moved = [s / torch.linalg.matrix_norm(s, 2) if s.ndim > 1 else s / s.norm() for s in sums]
        return [m + 0.1 * p.mean() for m, p in zip(moved, params, strict=True)], {"sum": sums}

    def after(self, ops, params, slots, info):
        return [param - 0.01 * param.mean() for param in params], slots


def by_hand(steps=3):
    with fa.start():
        state = program(strategy="local").init(seed=0)
        values = whole_params(state)
    model = Net()
    model.load_state_dict(values)
    sums = {
        name: torch.full_like(param.detach(), float(param.detach().mean()))
        for name, param in model.named_parameters()
    }
    for step in range(steps):
        model.zero_grad()
        x, y = batch_of(8, step)
        torch.nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                s = sums[name].mul_(0.9).add_(param.grad)
                moved = s / torch.linalg.matrix_norm(s, 2) if s.ndim > 1 else s / s.norm()
                param -= 0.05 * (moved + 0.1 * param.mean())
                param -= 0.01 * param.mean()
    return {name: param.detach() for name, param in model.named_parameters()}, sums


def trained(strategy, compiled=False, masked=False):
    step = fa.compile(loss_fn, "step", backend="aot_eager") if compiled else loss_fn
    part = fa.optim.masked(Polar(), "*") if masked else Polar()
    train_step = program(step, strategy=strategy, optimizer=fa.optim.chain(part, lr=0.05))
    state = train_step.init(seed=0)
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    for number in range(3):
        state, _ = train_step(state, tuple(part.chunk(count)[rank] for part in batch_of(8, number)))
    return whole_params(state), {n: fa.tree.whole(s["sum"]) for n, s in state.opt.items()}


@pytest.mark.long_except(r"^(?!hsdp|.*True)")
@pytest.mark.parametrize(
    ("strategy", "ranks", "compiled", "masked"),
    [
        ("local", 1, False, False), ("local", 1, True, False), ("ddp(2)", 2, False, False), ("fsdp(2)", 2, False, False),
        ("fsdp(2)", 2, True, False), ("fsdp(2)", 2, False, True), ("hsdp(2, 2)", 4, False, False),
    ],
)  # fmt: skip
def test_a_whole_part_equals_the_loop_by_hand(pools, strategy, ranks, compiled, masked):
    params, sums = by_hand()
    for found, slots in pools.run(ranks, trained, strategy, compiled, masked):
        assert_close(found, params)
        assert_close(slots, sums)


def test_a_whole_part_as_a_function_of_tensors():
    with fa.start():
        train_step = program(strategy="local", optimizer=fa.optim.chain(Polar(), lr=0.05))
        update = fa.pure(train_step)
        values = update.init(seed=0)
        for number in range(3):
            values, _ = update(values, batch_of(8, number))
    assert_close(values["params"], by_hand()[0])


class Wrong(fa.extend.Part):
    """A part that returns what it is given."""

    def __init__(self, result, write=False):
        self.result, self.write = result, write

    def init(self, params):
        return {"seen": [torch.zeros_like(param) for param in params]}

    def update(self, ops, grads, slots, params, info):
        if self.write:
            params[0].mul_(0.5)
        return self.result(grads, slots)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("result", "write", "text"),
    [
        (lambda grads, _: grads, False, "returned list"),
        (lambda *_: None, False, "returned NoneType"),
        (lambda grads, slots: (None, slots), False, "returned NoneType in the place of"),
        (lambda grads, slots: (grads[:-1], slots), False, "returned a list of . tensors for ."),
        (
            lambda grads, slots: ([g.sum() for g in grads], slots),
            False,
            r"returned a tensor of shape \[\] for",
        ),
        (lambda grads, slots: ([None for _ in grads], slots), False, "returned NoneType for"),
        (lambda grads, _: (grads, {}), False, "returned other slots than it was given: seen is missing"),
        (
            lambda grads, slots: (grads, {**slots, "more": grads}),
            False,
            "returned other slots .*: more is unknown",
        ),
        (lambda grads, slots: (grads, None), False, "returned NoneType in the place of slots"),
        (lambda grads, slots: (grads, {"seen": slots["seen"][:0]}), False, "returned a list of 0 tensors"),
        (lambda grads, slots: (grads, slots), True, "wrote to the parameters"),
    ],
)
def test_wrong_results_are_named(result, write, text, whole):
    part = Wrong(result, write)
    part.whole = whole
    with fa.start():
        train_step = program(optimizer=fa.optim.chain(part, fa.optim.trace(0.9), lr=0.1))
        with pytest.raises(errors.ArgumentError, match=rf"wrong {text}[\s\S]*Wrong\.update"):
            train_step(train_step.init(), batch_of(4))
