"""Every option of a strategy, crossed once with accumulation, capture, recomputation, averages and fp64."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch

from fnaccel.testing import assert_close, oracle_run
from tests.parity.rows import DECAY, RATES, Net, Row, global_batches, loss_fn, run_row

RANKS = 2
OPTIONS = [
    "ddp(bucket_mb=0.0001)",
    "ddp(static_graph=True)",
    "ddp(buckets='torch')",
    "ddp(unused_parameters=True)",
    "ddp(sync_buffers=False)",
    "ddp(hook='bf16')",
    "fsdp(units=None)",
    "fsdp(units=('Block', 'Embedding'))",
    "fsdp(units=60)",
    "fsdp(reshard_after_forward=False)",
    "fsdp(reshard_after_forward=1)",
    "fsdp(offload=True)",
    "fsdp(ignore=('out.*',))",
    "fsdp(init='rank0')",
    "fsdp(methods=('forward',))",
    "hsdp(2, 1, reshard_after_forward=False)",
]
CROSSED = {
    "accumulate": {"accumulate": 3, "clip": 0.25},
    "compile": {"accumulate": 3, "compile": True},
    "remat": {"remat": True},
    "ema": {"ema": True},
    "fp64": {"precision": "fp64", "accumulate": 3},
}


@functools.cache
def expected(steps, clip, precision):
    batches = global_batches(RANKS)[:steps]
    return oracle_run(Net, loss_fn, batches, lr=RATES["sgd"], clip=clip, precision=precision)


def averages(row):
    """The exponential average of the oracle's parameters."""
    torch.manual_seed(0)
    average = {name: value.detach() for name, value in Net().named_parameters()}
    for steps in range(1, len(global_batches(RANKS)) + 1):
        params = expected(steps, row.clip, row.precision).params
        average = {name: DECAY * value + (1 - DECAY) * params[name] for name, value in average.items()}
    return average


@pytest.mark.long_except(r"accumulate")
@pytest.mark.parametrize("crossed", list(CROSSED))
@pytest.mark.parametrize("strategy", OPTIONS)
def test_an_option_beside_others(pools, strategy, crossed):
    row = Row(strategy=strategy, ranks=RANKS, **CROSSED[crossed])
    oracle = expected(len(global_batches(RANKS)), row.clip, row.precision)
    precision = "bf16" if "hook='bf16'" in strategy else row.precision  # gradients are sent in bf16
    for result in pools.run(RANKS, run_row, row):
        assert_close(result["losses"], oracle.losses, precision=precision)
        assert_close(result["params"], oracle.params, precision=precision)
        if row.ema:
            assert_close(result["ema"], averages(row), precision=precision)


def test_the_matrix_is_not_blind_to_an_option_left_out():
    """A row without its clip is further away than the tolerance."""
    row = Row(strategy="ddp", ranks=RANKS, **CROSSED["accumulate"])
    clipped, plain = (expected(3, clip, "fp32").params for clip in (row.clip, None))
    assert max(float((clipped[name] - plain[name]).abs().max()) for name in plain) > 1e-3
    assert attrs.evolve(row, clip=None) != row
