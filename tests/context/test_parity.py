"""Context parallelism trains as one process does: against a raw PyTorch loop on the whole batch."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel.testing import oracle_run
from tests.context.model import CUT, LAYERS, LENGTHS, STEPS, Net, batch_of, loss_fn, trained


def text(strategy, **options):
    return strategy.replace("context(2)", str(fa.context(2, cut=CUT, **options)))


def check(results, copies, mask="causal", clip=None, precision="fp32", tolerance=1e-5, lengths=LENGTHS):
    batches = [[batch_of(step, rank, lengths) for rank in range(copies)] for step in range(STEPS)]
    expected = oracle_run(lambda: Net(mask), loss_fn, batches, lr=0.3, clip=clip, precision=precision)
    whole = Net(mask)
    for losses, norms, params, score, _ in results:
        assert losses == pytest.approx(expected.losses, abs=tolerance)
        if clip:
            assert norms == pytest.approx(expected.grad_norms, abs=tolerance)
        for name, value in expected.params.items():
            torch.testing.assert_close(params[name], value, atol=tolerance, rtol=tolerance)
        whole.load_state_dict(params)
        with torch.no_grad():
            loss = loss_fn(whole, batch_of(9, 0, lengths, rows=4))
        assert score == pytest.approx(float(loss.total / loss.weight), abs=max(tolerance, 1e-5))


ROWS = [
    ("causal", {}, {}),
    ("causal", {"balance": False}, {}),
    ("none", {}, {"clip": 0.1}),
    ("keys", {}, {}),
    ("keys", {"balance": False}, {"remat": True}),
    ("added", {}, {}),
    ("rows", {}, {"clip": 0.1, "accumulate": 2}),
    ("causal", {}, {"remat": True, "clip": 0.1, "accumulate": 2}),
    ("causal", {}, {"weigh": True, "accumulate": 2}),
]


@pytest.mark.parametrize(("mask", "options", "step"), ROWS)
def test_two_ranks_share_a_sequence(pools, mask, options, step):
    results = pools.run(2, trained, text("context(2)", **options), mask, **step)
    check(results, 1, mask, step.get("clip"))


def test_bf16(pools):
    results = pools.run(2, trained, text("context(2)"), precision="bf16")
    check(results, 1, precision="bf16", tolerance=0.02)


PRODUCTS = [
    ("fsdp(2) * context(2)", 4, {"clip": 0.1}),
    ("ddp(2) * context(2)", 4, {"clip": 0.1, "accumulate": 2}),
    ("hsdp(1, 2) * context(2)", 4, {}),
]


@pytest.mark.parametrize(("strategy", "ranks", "step"), PRODUCTS)
def test_products(pools, strategy, ranks, step):
    check(pools.run(ranks, trained, text(strategy), **step), 2, clip=step.get("clip"))


COMPILED = [
    ("context(2)", "step", "aot_eager", "causal"),
    ("context(2)", "loss", "eager", "causal"),  # runs the traced graph under the replaced names again
    ("context(2)", "block", "aot_eager", "keys"),
    ("fsdp(1) * context(2)", "step", "aot_eager", "keys"),
]


@pytest.mark.parametrize(("strategy", "scope", "backend", "mask"), COMPILED)
def test_compiled(pools, strategy, scope, backend, mask):
    options = {"clip": 0.1, "lengths": (8,)}
    check(
        pools.run(2, trained, text(strategy), mask, compiled=(scope, backend), **options), 1, mask, **options
    )


@pytest.mark.parametrize(("remat", "gathers"), [(False, LAYERS), (True, 2 * LAYERS)])
def test_collectives_of_a_step(pools, remat, gathers):
    for *_, counts in pools.run(2, trained, text("context(2)"), remat=remat):
        # gradients and the report: one all-reduce each
        assert counts == {"all_gather": gathers, "reduce_scatter": LAYERS, "all_reduce": 2}
