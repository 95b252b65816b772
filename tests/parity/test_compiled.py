"""Law 7: a compiled step is the eager step, in every scope, on one rank and on two."""

from __future__ import annotations

import functools

import pytest
import torch

import fnaccel as fa
from tests.parity.compiled import SETUPS, run_kind

FEW = ("plain", "rich", "fp16", "ema", "ragged")
CASES = [
    *(("local", "step", kind) for kind in SETUPS),
    *(("ddp", "step", kind) for kind in SETUPS if kind != "spare"),
    *(("local", "loss", kind) for kind in FEW),
    *(("ddp", "loss", kind) for kind in FEW),
    *((strategy, "block", kind) for strategy in ("local", "ddp") for kind in FEW),
    *(("fsdp", "block", kind) for kind in ("plain", "ragged", "ema")),
    *(("fsdp", "step", kind) for kind in SETUPS if kind not in ("spare", "foreign")),
]  # fmt: skip
RANKS = {"local": 1, "ddp": 2, "fsdp": 2}
LOOSE = {"bf16": 2e-2, "fp16": 2e-3, "fp16 weight": 2e-3}


@functools.cache
def eager(pools, strategy, kind):
    return pools.run(RANKS[strategy], run_kind, kind, strategy, None)


@pytest.mark.parametrize(("strategy", "scope", "kind"), CASES, ids=lambda value: value.replace(" ", "_"))
def test_compiled_equals_eager(pools, strategy, scope, kind):
    expected = eager(pools, strategy, kind)
    found = pools.run(RANKS[strategy], run_kind, kind, strategy, scope)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one["out"], other["out"], LOOSE.get(kind, 2e-6))
        assert one["compilation"].graphs > 0
        assert one["compilation"].scope == scope


@pytest.mark.parametrize(("strategy", "kind"), [("local", "ragged"), ("local", "fp16"), ("ddp", "aux")])
def test_inductor_equals_eager(pools, strategy, kind):
    expected = eager(pools, strategy, kind)
    found = pools.run(RANKS[strategy], run_kind, kind, strategy, "step", "inductor")
    for one, other in zip(found, expected, strict=True):
        assert_alike(one["out"], other["out"], LOOSE.get(kind, 1e-5))


def assert_alike(found, expected, tolerance):
    assert fa.tree.structure(found) == fa.tree.structure(expected)
    for (path, value), other in zip(fa.tree.items(found), fa.tree.leaves(expected), strict=True):
        one = torch.as_tensor(value, dtype=torch.float64)
        two = torch.as_tensor(other, dtype=torch.float64)
        assert one.shape == two.shape, path
        close = torch.isclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert bool(close.all()), f"{path}: {one} is not {two}"
