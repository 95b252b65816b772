"""Context parallelism trains as one process does: against a raw PyTorch loop on the whole batch."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel.testing import oracle_run
from tests.strategies.context.model import (
    CUT,
    LAYERS,
    LENGTHS,
    PLAN,
    STEPS,
    Net,
    batch_of,
    loss_fn,
    restored,
    trained,
)


def text(strategy, **options):
    strategy = strategy.replace("context(2)", str(fa.context(2, cut=CUT, **options)))
    return strategy.replace("context(2, method='ring')", str(fa.context(2, cut=CUT, method="ring")))


def check(
    results,
    copies,
    mask="causal",
    clip=None,
    precision="fp32",
    tolerance=1e-5,
    lengths=LENGTHS,
    layers=LAYERS,
):
    batches = [[batch_of(step, rank, lengths) for rank in range(copies)] for step in range(STEPS)]
    expected = oracle_run(
        lambda: Net(mask, layers=layers), loss_fn, batches, lr=0.3, clip=clip, precision=precision
    )
    whole = Net(mask, layers=layers)
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


ROWS += [
    (mask, {"method": method, "balance": balance}, step)
    for method in ("ring", "heads")
    for mask, balance, step in [
        ("causal", True, {"clip": 0.1}),
        ("causal", False, {"accumulate": 2}),
        ("none", True, {}),
        ("keys", True, {"remat": True}),
        ("added", False, {}),
        ("rows", True, {"clip": 0.1}),
        ("causal", True, {"remat": "attention"}),
    ]
]


@pytest.mark.long_except(
    r"^(?!added).*-nothing$|weigh|causal-method=ring,balance=True|keys-method=ring|rows-(nothing|method=heads)"
)
@pytest.mark.parametrize(("mask", "options", "step"), ROWS)
def test_two_ranks_share_a_sequence(pools, mask, options, step):
    results = pools.run(2, trained, text("context(2)", **options), mask, **step)
    check(results, 1, mask, step.get("clip"))


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_bf16(pools, method):
    results = pools.run(2, trained, text("context(2)", method=method), precision="bf16")
    check(results, 1, precision="bf16", tolerance=0.02)


@pytest.mark.long_except(r"causal")
@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
@pytest.mark.parametrize("mask", ["causal", "keys"])
def test_four_ranks_share_a_sequence(pools, method, mask):
    """More ranks than heads of keys, which are repeated, and rings of more than a pair."""
    strategy = str(fa.context(4, cut=CUT, method=method))
    check(pools.run(4, trained, strategy, mask, layers=1), 1, mask, layers=1)


PRODUCTS = [
    ("fsdp(2) * context(2)", 4, {"clip": 0.1}),
    ("fsdp(2) * context(2, method='ring')", 4, {"remat": True}),
    ("ddp(2) * context(2)", 4, {"clip": 0.1, "accumulate": 2}),
    ("hsdp(1, 2) * context(2)", 4, {}),
    ("local_sgd(2, every=1, weighting='rows') * context(2)", 4, {"weigh": True}),
    (f"{fa.tensor(2, PLAN)} * context(2)", 4, {"clip": 0.1, "accumulate": 2}),
    (f"fsdp(2) * {fa.tensor(2, PLAN)} * context(2)", 8, {"clip": 0.1}),
]


@pytest.mark.long_except(r"^fsdp\(2.*-4-clip")
@pytest.mark.parametrize(("strategy", "ranks", "step"), PRODUCTS)
def test_products(pools, strategy, ranks, step):
    copies = ranks // 4 if "tensor" in strategy else 2
    check(pools.run(ranks, trained, text(strategy), **step), copies, clip=step.get("clip"))


@pytest.mark.parametrize("strategy", ["fsdp(2) * context(2)", f"{fa.tensor(2, PLAN)} * context(2)"])
def test_a_checkpoint_goes_to_one_process(pools, tmp_path, strategy):
    params = pools.run(4, trained, text(strategy), save=tmp_path / "a")[0][2]
    for found in pools.run(1, restored, "local", tmp_path / "a"):
        assert fa.tree.allclose(found, params, rtol=0, atol=0)
    for found in pools.run(2, restored, text("context(2)"), tmp_path / "a"):
        assert fa.tree.allclose(found, params, rtol=0, atol=0)


COMPILED = [
    ("context(2)", "step", "aot_eager", {}),
    ("context(2)", "loss", "eager", {}),  # runs the traced graph under the replaced names again
    ("context(2)", "block", "aot_eager", {"method": "ring"}),
    ("fsdp(1) * context(2)", "step", "aot_eager", {"method": "ring"}),
    ("context(2)", "step", "aot_eager", {"method": "heads"}),
]


@pytest.mark.long_except(r"loss-.*-nothing")
@pytest.mark.parametrize(("strategy", "scope", "backend", "options"), COMPILED)
def test_compiled(pools, strategy, scope, backend, options):
    step = {"clip": 0.1, "lengths": (8,), "layers": 2 if scope == "block" else 1}
    results = pools.run(2, trained, text(strategy, **options), compiled=(scope, backend), **step)
    check(results, 1, **step)


COUNTS = [
    ("gather", False, {"all_gather": 1, "reduce_scatter": 1}),
    ("gather", True, {"all_gather": 2, "reduce_scatter": 1}),
    ("ring", False, {"send": 4, "recv": 4}),
    ("ring", True, {"send": 5, "recv": 5}),
    ("heads", False, {"all_to_all": 4}),
    ("heads", True, {"all_to_all": 6}),
]


@pytest.mark.parametrize(("method", "remat", "each"), COUNTS)
def test_collectives_of_a_step(pools, method, remat, each):
    """One layer's, with two ranks, and one all-reduce each for gradients and the report."""
    for *_, counts in pools.run(2, trained, text("context(2)", method=method), remat=remat):
        assert counts == {kind: LAYERS * number for kind, number in each.items()} | {"all_reduce": 2}
