"""The parity matrix on DeepSpeed: each ZeRO stage against a raw PyTorch loop on the global batch."""

from __future__ import annotations

import functools
from itertools import product

import pytest

from fnaccel.testing import assert_close, oracle_run
from tests.parity.rows import RATES, Net, Row, global_batches, loss_fn, run_row
from tests.strategies.deepspeed.training import train_fp16, train_named, train_unlike

STAGES = (0, 1, 2, 3)
ROWS = [
    Row(strategy=f"deepspeed_zero{stage}", precision=precision, accumulate=accumulate, clip=clip, ranks=ranks)
    for stage, ranks, precision, accumulate, clip in product(
        STAGES, (1, 2), ("fp32", "bf16"), (1, 3), (None, 0.25)
    )
]
ROWS += [
    Row(strategy=f"deepspeed_zero{stage}", accumulate=3, clip=0.25, ranks=ranks, optimizer="adamw")
    for stage, ranks in product(STAGES, (1, 2))
]
EACH = [Row(strategy=f"deepspeed_zero{stage}", accumulate=3, ranks=2, sync="each") for stage in STAGES]


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


@pytest.mark.long_except("acc3.*-2-|zero[23].*acc3")
@pytest.mark.parametrize("row", [*ROWS, *EACH], ids=str)
def test_equals_the_raw_loop(pools, row):
    oracle = expected(row.ranks, row.precision, row.clip, row.optimizer)
    for result in pools.run(row.ranks, run_row, row):
        assert_close(result["losses"], oracle.losses, precision=row.precision)
        if row.clip is not None:
            assert_close(result["norms"], oracle.grad_norms, precision=row.precision)
        assert_close(result["params"], oracle.params, precision=row.precision)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("weighted", [False, True], ids=["weight known after", "weight up front"])
def test_fp16_keeps_the_scale_of_the_state(pools, stage, weighted):
    """fp16 with our own loss scale; an overflow halves it and changes nothing else."""
    oracle = expected(2, "fp32", 0.25, "sgd")
    for result in pools.run(2, train_fp16, stage, weighted):
        assert_close(result["params"], oracle.params, precision="bf16")
        assert result["skipped"] == [1.0, 0.0, 0.0, 0.0]
        assert result["scales"] == [2.0**40, 2.0**10, 2.0**10, 2.0**10]
        assert result["updates"] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_own_optimizer(pools, stage):
    """`"optimizer": {"type": "AdamW"}` in the configuration updates as torch's does."""
    oracle = expected(2, "fp32", None, "adamw")
    row = Row(strategy=f"deepspeed_zero{stage}", ranks=2, optimizer="adamw")
    for result in pools.run(2, train_named, row):
        assert_close(result["losses"], oracle.losses)
        assert_close(result["params"], oracle.params)
        assert result["by"] == "deepspeed"


def test_a_gradient_that_is_not_finite_is_skipped(pools):
    """Every stage leaves the update out and counts none; the next one is as if it had not been."""
    for stage in STAGES:
        for result in pools.run(2, train_unlike, stage):
            assert result["skipped"] == [0.0, 1.0, 0.0], stage
            assert result["unchanged"], stage
            assert result["updates"] == [1.0, 1.0, 2.0], stage
