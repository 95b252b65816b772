"""An engine may run the passes of micro-batches in an order of its own: the same gradients come of it."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import CapabilityError
from tests.tiny_models import batch_of, loss_fn, program, whole_params


class Noisy(nn.Module):
    """Dropout draws for each micro-batch, and batch norm's statistics move with each forward."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.4)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.drop(torch.tanh(self.norm(self.inp(x)))))


def forwards_first(n, forward, backward, sync):
    done = [forward(index) for index in range(n)]
    for index in range(n):
        with sync(index == n - 1):
            backward(index, done[index])


def backwards_reversed(n, forward, backward, sync):
    done = [forward(index) for index in range(n)]
    for index in reversed(range(n)):
        with sync(index == 0):
            backward(index, done[index])


def trained(strategy, micro_batches, drive, *, captured=False):
    """Gradients of the first update, and parameters, buffers and losses after three."""
    seen = {}

    def keep(grads, own, info):
        seen.setdefault("grads", {name: fa.tree.whole(grad).clone() for name, grad in grads.items()})
        return grads, own

    step = fa.Transform("keep", fa.Phase.GRADS, apply=keep)(fa.accumulate(loss_fn, micro_batches))
    step = fa.compile(step, scope="step", backend="aot_eager") if captured else step
    train_step = program(step, strategy=strategy, model=Noisy)
    state = train_step.init(seed=0)
    if drive is not None:
        instance = train_step._owner.instance
        forward = attrs.evolve(instance.engine.forward, drive=drive)
        instance.engine = attrs.evolve(instance.engine, forward=forward)
    losses = []
    for call in range(3):
        state, metrics = train_step(state, batch_of(8, call))
        losses.append(float(metrics["loss"]))
    out = seen["grads"], whole_params(state), dict(state.buffers), losses
    out = fa.tree.map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, out)
    train_step.close()
    return out


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("fsdp", 2)])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_all_forwards_first_gives_the_same_bits(pools, strategy, ranks, micro_batches):
    usual = pools.run(ranks, trained, strategy, micro_batches, None)
    for one, other in zip(
        usual, pools.run(ranks, trained, strategy, micro_batches, forwards_first), strict=True
    ):
        fa.tree.map(torch.testing.assert_close, one[:3], other[:3])
        assert all(map(torch.equal, fa.tree.leaves(one[:3]), fa.tree.leaves(other[:3])))
        assert one[3] == other[3]


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("fsdp", 2)])
def test_backwards_in_reverse_differ_by_the_order_of_sums(pools, strategy, ranks):
    for micro_batches in (2, 4):
        usual = pools.run(ranks, trained, strategy, micro_batches, None)
        turned = pools.run(ranks, trained, strategy, micro_batches, backwards_reversed)
        for one, other in zip(usual, turned, strict=True):
            first, second = fa.tree.leaves(one[0]), fa.tree.leaves(other[0])
            if micro_batches == 2:
                assert all(map(torch.equal, first, second))
            norm = torch.cat([grad.flatten() for grad in first]).norm()
            apart = torch.cat([(a - b).flatten() for a, b in zip(first, second, strict=True)]).norm()
            assert apart <= 1e-6 * norm
            assert all(map(torch.equal, fa.tree.leaves(one[2]), fa.tree.leaves(other[2])))


def refused(drive):
    with pytest.raises(CapabilityError, match="ddp runs each backward right after its forward"):
        trained("ddp", 2, drive)
    return trained("ddp", 2, None)[3]


def test_ddp_takes_each_backward_after_its_forward(pools):
    assert len(pools.run(2, refused, forwards_first)[0]) == 3


def captured_refused():
    with pytest.raises(CapabilityError, match="a captured step runs each backward right after its forward"):
        trained("local", 2, forwards_first, captured=True)


def test_a_captured_step_runs_by_the_same_drive(pools):
    pools.run(1, captured_refused)
