"""reduce: the fold over ranks (law 2); any_process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnaccel import tree
from fnaccel.collectives import any_process, gather, reduce
from fnaccel.errors import ArgumentError, RankMismatchError, UnknownNameError
from fnaccel.testing import assert_close, count_collectives
from fnaccel.world import world
from tests.collectives.test_gather import rank, shifted
from tests.random_inputs import REAL_DTYPES, tensors, trees, worlds


def fact(op, **options):
    size = world.current().size
    x = torch.arange(size) + 1 + size * rank()
    found = reduce(x, op, **options)
    return found.tolist(), found.dtype


def test_two_ranks(pools):
    assert pools.run(2, fact, "sum") == [([4, 6], torch.int64)] * 2
    assert pools.run(2, fact, "mean") == [([2.0, 3.0], torch.float32)] * 2
    assert pools.run(2, fact, "max") == [([3, 4], torch.int64)] * 2
    assert pools.run(2, fact, "min") == [([1, 2], torch.int64)] * 2
    assert pools.run(2, fact, "sum", scale=0.5) == [([2.0, 3.0], torch.float32)] * 2


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sum_of_any_world(pools, size):
    expected = [sum(1 + i + size * r for r in range(size)) for i in range(size)]
    assert pools.run(size, fact, "sum") == [(expected, torch.int64)] * size
    assert pools.run(size, fact, "mean") == [([e / size for e in expected], torch.float32)] * size


def folded(value, op, scale, size):
    """The fold, leaf by leaf, in float64; and the dtype that is promised."""

    def fold(*parts):
        stack = torch.stack([part.double() for part in parts])
        out = {"sum": stack.sum(0), "mean": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[op]
        dtype = parts[0].dtype
        if not dtype.is_floating_point and (op == "mean" or scale != 1.0):
            dtype = torch.float32
        elif dtype == torch.bool and op == "sum":
            dtype = torch.int64
        return (out * scale).to(dtype)

    return tree.map(fold, *[shifted(value, other) for other in range(size)])


def reduce_shifted(value, op, scale):
    mine = shifted(value, rank())
    before = tree.map(torch.clone, mine)
    found = reduce(mine, op, scale=scale)
    assert_close(mine, before)
    assert_close(found, folded(value, op, scale, world.current().size))
    assert not any(
        one.data_ptr() == two.data_ptr()
        for one in tree.leaves(found)
        for two in tree.leaves(mine)
        if one.numel()
    )


@settings(max_examples=60, deadline=None)
@given(
    value=trees(tensors(REAL_DTYPES)),
    op=st.sampled_from(["sum", "mean", "max", "min"]),
    scale=st.sampled_from([1.0, 0.5, 2.0]),
    size=worlds,
)
def test_reduce_is_the_fold_over_ranks(pools, value, op, scale, size):
    pools.run(size, reduce_shifted, value, op, scale)


def complex_numbers():
    return reduce(torch.tensor([1 + 2j]) * (rank() + 1), "mean").tolist()


def test_complex_numbers_add_up(pools):
    assert pools.run(3, complex_numbers) == [[2 + 4j]] * 3


def small_floats():
    # in bf16 the ones would be lost, one after the other: 256 + 1 rounds to 256
    return reduce(torch.tensor(256.0 if rank() == 0 else 1.0, dtype=torch.bfloat16)).item()


def test_low_precisions_are_rounded_once(pools):
    assert pools.run(3, small_floats) == [258.0] * 3


def counts(items):
    leaves = [torch.ones(items) for _ in range(8)]
    with count_collectives() as same:
        reduce(leaves)
    with count_collectives() as mixed:
        reduce([*leaves, torch.ones(2).double(), torch.ones(2).int(), torch.ones(3, dtype=torch.bool)])
    with count_collectives() as flag:
        any_process(True)
    return same.counts, mixed.counts, flag.counts


def test_one_collective_a_dtype(pools):
    one = {"all_gather": 1}
    expected = ({**one, "all_reduce": 1}, {**one, "all_reduce": 3}, one)
    assert pools.run(3, counts, 999) == [expected] * 3
    assert pools.run(2, counts, 999) == [({"all_gather": 2}, {"all_gather": 2}, one)] * 2
    assert pools.run(2, counts, 3) == [(one, one, one)] * 2  # with the signature
    assert pools.run(1, counts, 3) == [({}, {}, {})]


def larger_than_a_signature(op):
    value = {str(dtype): (torch.arange(1001) % 50).to(dtype) for dtype in REAL_DTYPES}
    reduce_shifted(value, op, 1.0)
    reduce_shifted(value, op, 0.5)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_data_too_large_for_a_signature(pools, size, op):
    pools.run(size, larger_than_a_signature, op)


def two_calls(leaves, items):
    first = [torch.full((items,), float(rank() + leaf)) for leaf in range(leaves)]
    found = reduce(first)
    kept = [part.clone() for part in found]
    reduce([part - 1000 for part in first])
    alone = all(part.untyped_storage().nbytes() == part.nbytes for part in found)
    same = all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    return same, alone, [part[0].item() for part in first] == [float(rank() + leaf) for leaf in range(leaves)]


@pytest.mark.parametrize("leaves", [1, 3])
@pytest.mark.parametrize("items", [3, 2000, 200_000])  # with the signature, gathered, reduced
def test_a_later_call_leaves_the_results_of_earlier_ones_alone(pools, leaves, items):
    for size in (2, 3):
        assert pools.run(size, two_calls, leaves, items) == [(True, True, True)] * size


def errors():
    found = []
    for call in (
        lambda: reduce(torch.ones(2), "avg"),
        lambda: reduce(torch.ones(2, dtype=torch.complex64), "max"),
        lambda: reduce({"x": 1.0}),
        lambda: reduce(torch.ones(2), "sum", over="dp"),
    ):
        try:
            call()
        except (UnknownNameError, ArgumentError) as error:
            found.append((type(error), error.what, error.fix))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_what_can_not_be_reduced(pools, size):
    for name, complexes, number, over in pools.run(size, errors):
        assert name[0] is UnknownNameError
        assert "max, mean, min, sum" in name[2]
        assert "no max" in complexes[1]
        assert "x is float" in number[1]
        assert "over='dp'" in over[1]


def different_calls():
    try:
        return reduce(torch.ones(2)) if rank() else gather(torch.ones(2))
    except RankMismatchError as error:
        return error.what, any_process(rank() == 1)


def test_different_calls_meet_and_raise(pools):
    for what, after in pools.run(2, different_calls):
        assert what == (
            "ranks make different calls: gather(cpu) on rank 0, reduce(cpu, op=sum, scale=1.0) on rank 1"
        )
        assert after is True


def trigger(flags):
    return any_process(flags[rank()])


@pytest.mark.parametrize("flags", [[False, False, False], [False, False, True], [True, True, True]])
def test_any_process(pools, flags):
    assert pools.run(3, trigger, flags) == [any(flags)] * 3


def over_axes():
    from fnaccel.world import mesh

    here = mesh.build(world.current(), {"dp_replicate": 2, "dp_shard": 2})
    x = torch.tensor(rank())
    sums = [reduce(x, over=here[axis]).item() for axis in ("dp_replicate", "dp_shard", "batch")]
    group = here["dp_shard"].group
    return sums, reduce(x, over=group).item(), gather(x, over=here["dp_replicate"]).tolist()


def test_over_a_mesh_axis_or_a_group(pools):
    assert pools.run(4, over_axes) == [
        ([2, 1, 6], 1, [0, 2]),
        ([4, 1, 6], 1, [1, 3]),
        ([2, 5, 6], 5, [0, 2]),
        ([4, 5, 6], 5, [1, 3]),
    ]
