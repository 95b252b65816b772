"""Law 7: a compiled step is the eager step, in every scope, on one rank and on two."""

from __future__ import annotations

import functools
import secrets
import tempfile
from unittest import mock

import pytest
import torch

import fnaccel as fa
from fnaccel import _torch, errors
from fnaccel.strategies import fsdp_captured
from fnaccel.strategies import fsdp_regather as regather
from tests.parity.compiled import SETUPS, run_in_two_parts, run_kind

# FSDP2 takes no parameter that is not contiguous, and an optimizer of torch its own way with shards
UNSHARDED = ("some", "skipping", "foreign", "strided", "strided clip", "strided foreign")
FEW = ("plain", "rich", "fp16", "ema", "ragged")
CASES = [
    *(("local", "step", kind) for kind in SETUPS),
    *(("ddp", "step", kind) for kind in SETUPS if kind not in ("spare", "some", "skipping")),
    *(("local", "loss", kind) for kind in FEW),
    *(("ddp", "loss", kind) for kind in FEW),
    *((strategy, "block", kind) for strategy in ("local", "ddp") for kind in FEW),
    *(("fsdp", "block", kind) for kind in ("plain", "ragged", "ema")),
    *(("fsdp", "step", kind) for kind in SETUPS if kind not in UNSHARDED),
]  # fmt: skip
RANKS = {"local": 1, "ddp": 2, "fsdp": 2}
LOOSE = {"bf16": 2e-2, "fp16": 2e-3, "fp16 weight": 2e-3}


@functools.cache
def eager(pools, strategy, kind):
    return pools.run(RANKS[strategy], run_kind, kind, strategy, None)


def _row(strategy, scope, kind):
    return pytest.param(strategy, scope, kind, id="-".join((strategy, scope, kind)).replace(" ", "_"))


@pytest.mark.long_except(
    r"local-step-(ragged|fp16|own)$|(local|ddp|fsdp)-(block|step)-plain|local-loss-plain"
)
@pytest.mark.parametrize(("strategy", "scope", "kind"), [_row(*case) for case in CASES])
def test_compiled_equals_eager(pools, strategy, scope, kind):
    expected = eager(pools, strategy, kind)
    found = pools.run(RANKS[strategy], run_kind, kind, strategy, scope)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one["out"], other["out"], LOOSE.get(kind, 2e-6))
        assert one["compilation"].graphs > 0
        assert one["compilation"].scope == scope


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "kind"), [("local", "ragged"), ("local", "fp16"), ("ddp", "aux"), ("fsdp", "ragged")]
)
def test_inductor_equals_eager(pools, strategy, kind):
    expected = eager(pools, strategy, kind)
    found = pools.run(RANKS[strategy], run_kind, kind, strategy, "step", "inductor")
    for one, other in zip(found, expected, strict=True):
        assert_alike(one["out"], other["out"], LOOSE.get(kind, 1e-5))


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_goes_on_in_another_scope(pools, tmp_path, strategy):
    unbroken = pools.run(2, run_kind, "rich", strategy, "step")
    straight = [{name: one["out"][name] for name in ("params", "opt")} for one in unbroken]
    again = pools.run(2, run_in_two_parts, str(tmp_path / "again"), strategy, "step", "step")
    assert_alike(again, straight, 0.0)  # to the bit, through a checkpoint
    for first, second in (("step", None), (None, "step")):
        root = str(tmp_path / f"{first}")
        assert_alike(pools.run(2, run_in_two_parts, root, strategy, first, second), straight, 2e-6)


def test_a_parameter_without_a_gradient_is_an_error_on_several_ranks(pools):
    with pytest.raises(
        errors.CapabilityError, match=r"spare\.weight, spare\.bias got no gradient on any rank"
    ):
        pools.run(2, run_kind, "spare", "ddp", "step")


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "kind", "backend"),
    [
        ("ddp", "some", "aot_eager"),
        ("fsdp", "some", "aot_eager"),
        # whose passes move collectives to where a rank uses them
        ("ddp", "skipping", "inductor"),
        ("fsdp", "skipping", "inductor"),
    ],
)
def test_a_parameter_that_one_rank_uses_is_trained_on_all(pools, strategy, kind, backend):
    expected = pools.run(2, run_kind, kind, "ddp(unused_parameters=True)", None)
    found = pools.run(2, run_kind, kind, strategy, "step", backend)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one["out"]["params"], other["out"]["params"], 2e-6)


@pytest.mark.long
def test_the_global_stream_is_eager_s(pools):
    expected = pools.run(2, run_kind, "rich", "ddp", None, rng="stream")
    found = pools.run(2, run_kind, "rich", "ddp", "step", rng="stream")
    for one, other in zip(found, expected, strict=True):
        assert_alike(one["out"], other["out"], 2e-6)


def gathers(strategy):
    """How often a captured step of two blocks and a root gathers: as written, and as it is run."""
    counts = []

    def counting(graph, units):
        def count():
            return sum("all_gather_into_tensor" in str(node.target) for node in graph.nodes)

        before = count()
        regather.regather(graph, units)
        counts.append((before, count()))

    with tempfile.NamedTemporaryFile() as file:
        file.write(secrets.token_bytes())  # another key in the compile cache, or the pass runs once ever
        file.flush()

        def own(units):
            return _torch.graph_pass(functools.partial(counting, units=units), (file.name,))

        with mock.patch.object(fsdp_captured, "zero3_pass", own):
            run_kind("plain", strategy, "step", "inductor")
    return counts


@pytest.mark.long
def test_zero_3_gathers_blocks_again_for_backward(pools):
    assert pools.run(2, gathers, "fsdp") == [[(3, 5)]] * 2
    assert pools.run(2, gathers, "fsdp(reshard_after_forward=False)") == [[]] * 2


def assert_alike(found, expected, tolerance):
    assert fa.tree.structure(found) == fa.tree.structure(expected)
    for (path, value), other in zip(fa.tree.items(found), fa.tree.leaves(expected), strict=True):
        one = torch.as_tensor(value, dtype=torch.float64)
        two = torch.as_tensor(other, dtype=torch.float64)
        assert one.shape == two.shape, path
        close = torch.isclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert bool(close.all()), f"{path}: {one} is not {two}"
