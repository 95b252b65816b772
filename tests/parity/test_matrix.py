"""The parity matrix: every strategy against a raw PyTorch loop on the concatenated global batch."""

from __future__ import annotations

import functools
from itertools import product

import pytest

from fnaccel.testing import assert_close, oracle_run, tolerance
from tests.parity.rows import RATES, Net, Row, global_batches, loss_fn, run_row

ZERO2 = "fsdp(reshard_after_forward=False)"
LAYOUTS = [
    (1, "local"), (1, "ddp"), (1, "fsdp"), (1, ZERO2),
    (2, "ddp"), (2, "fsdp"), (2, ZERO2), (2, "hsdp(1, 2)"),
    (4, "ddp"), (4, "fsdp"), (4, ZERO2), (4, "hsdp(2, 2)"),
]  # fmt: skip

MATRIX = [
    Row(strategy=strategy, precision=precision, accumulate=accumulate, clip=clip, ranks=ranks)
    for (ranks, strategy), precision, accumulate, clip in product(
        LAYOUTS, ("fp32", "bf16"), (1, 3), (None, 0.25)
    )
]
SECOND = [
    Row(strategy=strategy, accumulate=3, clip=0.25, ranks=ranks, optimizer="adamw")
    for ranks, strategy in LAYOUTS
]
DOUBLE = [
    Row(strategy=strategy, precision="fp64", accumulate=3, clip=0.25, ranks=ranks)
    for ranks, strategy in LAYOUTS
]
EACH = [
    Row(strategy=strategy, accumulate=3, ranks=ranks, sync="each") for ranks, strategy in LAYOUTS if ranks > 1
]


@functools.cache
def expected(ranks, precision, clip, optimizer):
    return oracle_run(
        Net,
        loss_fn,
        global_batches(ranks),
        lr=RATES[optimizer],
        optimizer=optimizer,
        clip=clip,
        precision=precision,
    )


@pytest.mark.long_except("^local|-2-|fp32-acc3-clip-4-sgd")
@pytest.mark.parametrize("row", [*MATRIX, *SECOND, *DOUBLE, *EACH], ids=str)
def test_equals_the_raw_loop(pools, row):
    oracle = expected(row.ranks, row.precision, row.clip, row.optimizer)
    results = pools.run(row.ranks, run_row, row)
    for result in results:
        assert_close(result["losses"], oracle.losses, precision=row.precision)
        if row.clip is not None:
            assert_close(result["norms"], oracle.grad_norms, precision=row.precision)
        assert_close(result["params"], oracle.params, precision=row.precision)
        assert result["counts"] == wanted_collectives(row)
    for result in results[1:]:
        assert result["losses"] == results[0]["losses"]


def test_the_matrix_is_not_blind_to_scale():
    """A gradient 1 % too small moves SGD's parameters further than the tolerance."""
    oracle = expected(2, "fp32", None, "sgd")
    scaled = oracle_run(Net, loss_fn, global_batches(2), lr=RATES["sgd"] / 1.01)
    worst = max(float((oracle.params[k] - scaled.params[k]).abs().max()) for k in oracle.params)
    assert worst > 100 * tolerance("fp32").absolute


def wanted_collectives(row):
    """How many collectives one step takes: two blocks and the root are what fsdp gathers."""
    if row.ranks == 1:
        return {}
    reductions = row.accumulate if row.sync == "each" else 1
    report = 1
    if row.strategy == "ddp":
        return {"all_reduce": reductions + report}
    units = 3
    # ZeRO-3 gathers the two blocks again in backward
    gathers = units if row.strategy == ZERO2 else 2 * units - 1
    clip = 1 if row.clip is not None else 0
    replicas = reductions * units if row.strategy == "hsdp(2, 2)" else 0
    return {
        "all_gather": row.accumulate * gathers,
        "reduce_scatter": reductions * units,
        "all_reduce": report + clip + replicas,
    }
