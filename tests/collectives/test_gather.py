"""gather: the rows of all ranks, in rank order (law 1)."""

from __future__ import annotations

from collections import UserDict

import attrs
import pytest
import torch
from hypothesis import given, settings

import fnaccel as fa
from fnaccel import errors, tree
from fnaccel.collectives import gather, split_between_processes
from fnaccel.errors import ArgumentError, RankMismatchError
from fnaccel.testing import count_collectives
from fnaccel.world import world
from fnaccel.world.world import current
from tests.random_inputs import DTYPES, lengths, tensors, trees, worlds
from tests.tiny_models import batch_of, program


@attrs.frozen
class Pair:
    left: object
    right: object
    name: str = "pair"


tree.register(Pair, children=("left", "right"))


def rank() -> int:
    return world.current().rank


def shifted(value, by):
    """What rank `by` passes: the same shapes, other numbers."""
    return tree.map(lambda x: (x + by).to(x.dtype) if x.dtype != torch.bool else x ^ bool(by % 2), value)


def equal(first, second):
    same = [
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True)
    ]
    return tree.structure(first) == tree.structure(second) and all(same)


def fact():
    size = world.current().size
    x = torch.arange(size) + 1 + size * rank()
    return gather(x).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_stand_in_rank_order(pools, size):
    assert pools.run(size, fact) == [list(range(1, size**2 + 1))] * size


def gather_shifted(value):
    before = tree.map(torch.clone, value)
    mine = shifted(value, rank())
    found = gather(mine)
    assert equal(value, before)
    expected = tree.map(
        lambda *parts: torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts]),
        *[shifted(value, other) for other in range(world.current().size)],
    )
    return equal(found, expected)


@settings(max_examples=60, deadline=None)
@given(value=trees(tensors()), size=worlds)
def test_any_tree_of_any_dtypes(pools, value, size):
    assert all(pools.run(size, gather_shifted, value))


def round_trip(n, width):
    x = torch.arange(n * width).reshape(n, width)
    padded = gather(split_between_processes(x, pad=True))[:n]
    part = split_between_processes({"x": x, "y": x.bool()})
    uneven = gather(part, valid=len(part["x"]))
    return equal(padded, x) and equal(uneven, {"x": x, "y": x.bool()})


@settings(max_examples=40, deadline=None)
@given(n=lengths, width=lengths, size=worlds)
def test_gather_of_a_split_is_the_whole(pools, n, width, size):
    assert all(pools.run(size, round_trip, n, width))


def custom_node():
    found = gather(Pair(torch.tensor(rank()), [torch.ones(1, 2, dtype=torch.bool)]))
    return found.left.tolist(), found.right[0].shape, found.name


def test_registered_classes_are_walked(pools):
    assert pools.run(3, custom_node) == [([0, 1, 2], (3, 2), "pair")] * 3


class Encoding(UserDict):
    """A mapping that is no dict, as tokenizers return them."""


def unseen_mapping():
    found = gather([Encoding(x=torch.tensor([rank()]), more=Encoding(y=torch.tensor([1])))])
    return type(found[0]), found[0]["x"].tolist(), type(found[0]["more"]), found[0]["more"]["y"].tolist()


def test_mappings_are_walked_on_sight(pools):
    assert pools.run(2, unseen_mapping) == [(Encoding, [0, 1], Encoding, [1, 1])] * 2


def strided():
    x = (torch.arange(12.0).reshape(3, 4) + 100 * rank()).t()
    assert not x.is_contiguous()
    parameter = torch.nn.Parameter(x)
    found = gather([x[::2], parameter])
    return torch.equal(found[0][:2], found[1][:4][::2]), found[1].requires_grad, type(found[1])


def test_non_contiguous_tensors_and_parameters(pools):
    assert pools.run(2, strided) == [(True, False, torch.Tensor)] * 2


def uneven(rows, valid):
    mine = torch.full((rows[rank()], 2), rank(), dtype=torch.int16)
    found = gather({"a": mine, "b": mine.bool()}, valid=valid[rank()])
    return found["a"][:, 0].tolist(), found["b"].dtype


def test_valid_rows_may_differ_between_ranks(pools):
    assert pools.run(3, uneven, [4, 1, 2], [3, 0, 2]) == [([0, 0, 0, 2, 2], torch.bool)] * 3
    assert pools.run(1, uneven, [4], [3]) == [([0, 0, 0], torch.bool)]


def one_for_all_dtypes(rows):
    leaves = [torch.ones(rows, 2).to(dtype) for dtype in DTYPES]
    with count_collectives() as even:
        gather(leaves)
    with count_collectives() as cut:
        gather(leaves, valid=2)
    with count_collectives() as empty:
        gather([torch.ones(0, 3)])
    return even.counts, cut.counts, empty.counts


def test_one_collective_carries_all_dtypes(pools):
    one, two = {"all_gather": 1}, {"all_gather": 2}  # the signature, and the data
    assert pools.run(2, one_for_all_dtypes, 999) == [(two, two, one)] * 2
    assert pools.run(2, one_for_all_dtypes, 3) == [(one, two, one)] * 2
    assert pools.run(1, one_for_all_dtypes, 3) == [({}, {}, {})]


def larger_than_a_signature():
    value = [torch.arange(1001).to(dtype) for dtype in DTYPES if dtype != torch.bool]
    mine = shifted(value, rank())
    return equal(gather(mine), [torch.cat([x, (x + 1).to(x.dtype)]) for x in value])


def test_data_too_large_for_a_signature(pools):
    assert pools.run(2, larger_than_a_signature) == [True, True]


def two_calls(leaves, items):
    first = {str(i): torch.full((items, 2), 10.0 * rank() + i) for i in range(leaves)}
    found = gather(first)
    kept = tree.map(torch.clone, found)
    gather(tree.map(lambda x: x - 1000, first))
    gather(tree.map(lambda x: x - 1000, first), valid=1)
    alone = all(
        one.untyped_storage().nbytes() == one.nbytes and one.is_contiguous() for one in tree.leaves(found)
    )
    return equal(found, kept), alone, found["0"][-1, 0].item()


@pytest.mark.parametrize("leaves", [1, 3])
@pytest.mark.parametrize("items", [1, 3, 2000])
def test_a_later_call_leaves_the_results_of_earlier_ones_alone(pools, leaves, items):
    assert pools.run(2, two_calls, leaves, items) == [(True, True, 10.0)] * 2


def one_large_leaf():
    mine = torch.arange(3000.0).reshape(2, 1500) + rank()
    x = torch.complex(mine, mine).t().conj()
    expected = torch.cat([torch.complex(mine, -mine).t() + (1 - 1j) * (other - rank()) for other in (0, 1)])
    found = [gather(x), gather(mine.bfloat16()), gather(torch.empty(0, 9)), gather(mine > 5)]
    return torch.equal(found[0], expected), [(part.dtype, tuple(part.shape)) for part in found[1:]]


def test_one_leaf_travels_as_it_is(pools):
    kinds = [(torch.bfloat16, (4, 1500)), (torch.float32, (0, 9)), (torch.bool, (4, 1500))]
    assert pools.run(2, one_large_leaf) == [(True, kinds)] * 2


def while_another_thread_gathers():
    import threading

    from fnaccel.world import mesh

    groups = [mesh.build(world.current(), {"dp_shard": 2})["dp_shard"].group, torch.distributed.new_group()]
    mine = [
        [torch.full((500,), 100.0 * thread + 10 * leaf + rank()) for leaf in range(4)] for thread in (0, 1)
    ]
    fine = [True, True]

    def run(thread):
        for _ in range(20):
            found = gather(mine[thread], over=groups[thread])
            for leaf, part in enumerate(found):
                expected = torch.tensor([100.0 * thread + 10 * leaf + one for one in (0, 1)])
                fine[thread] &= torch.equal(part, expected.repeat_interleave(500))

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    return fine


def test_threads_share_no_buffer(pools):
    assert pools.run(2, while_another_thread_gathers) == [[True, True]] * 2


def error_of(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except (RankMismatchError, ArgumentError) as error:
        # whoever raised must still be in step with the others
        return type(error), error.what, error.fix, gather(torch.tensor(rank())).tolist()
    return None


def ragged():
    return error_of(gather, {"x": {"tokens": torch.ones(2 + rank() // 2, 4)}, "y": torch.ones(1)})


def test_ragged_shapes_raise_on_every_rank(pools):
    for kind, what, fix, after in pools.run(3, ragged):
        assert kind is RankMismatchError
        assert "x/tokens is [2, 4] float32 on ranks 0 and 1, [3, 4] float32 on rank 2" in what
        assert "y" not in what.split("x/tokens")[1]
        assert "pad_across_processes" in fix
        assert after == [0, 1, 2]


def other_dtype():
    return error_of(gather, torch.ones(2, dtype=torch.float32 if rank() else torch.int32))


def other_structure():
    return error_of(gather, {"a": torch.ones(2)} if rank() else {"b": torch.ones(2)})


def other_container():
    return error_of(gather, [torch.ones(2)] if rank() else (torch.ones(2),))


@pytest.mark.parametrize(
    ("fn", "part"),
    [
        (other_dtype, "(root) is [2] int32 on rank 0, [2] float32 on rank 1"),
        (other_structure, "b is [2] float32 on rank 0, missing on rank 1"),
        (other_container, "the containers around them do not"),
    ],
)
def test_every_difference_is_named(pools, fn, part):
    for kind, what, fix, after in pools.run(2, fn):
        assert (kind, after) == (RankMismatchError, [0, 1])
        assert part in what
        assert "same structure" in fix or "pad" in fix


def python_number_on_rank_one():
    return error_of(gather, {"loss": 0.5 if rank() else torch.tensor(0.5)})


def test_a_problem_of_one_rank_reaches_all(pools):
    waited, failed = pools.run(2, python_number_on_rank_one)
    assert failed[0] is ArgumentError
    assert failed[1] == "loss is float, not a tensor"
    assert "gather_objects" in failed[2]
    assert waited[0] is RankMismatchError
    assert waited[1] == "rank 1 can't take part: loss is float, not a tensor"
    assert waited[3] == failed[3] == [0, 1]


def too_many_valid():
    return error_of(gather, torch.ones(2), valid=3), error_of(gather, torch.tensor(1), valid=0)


@pytest.mark.parametrize("size", [1, 2])
def test_valid_beyond_the_rows(pools, size):
    for rows, scalar in pools.run(size, too_many_valid):
        assert rows[0] is ArgumentError
        assert "has 2 rows, and valid=3" in rows[1]
        assert "0-d" in scalar[1]


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    return error_of(gather, {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])})


def test_a_dtensor_is_refused(pools):
    for kind, what, fix, _ in pools.run(2, sharded):
        assert kind is ArgumentError
        assert "w is a DTensor" in what
        assert "full_tensor()" in fix


def without_values(everywhere):
    value = torch.empty(3, device="meta") if everywhere or current().rank == 0 else torch.ones(3)
    try:
        return fa.gather(value)
    except errors.FnaccelError as error:
        return str(error)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_tensor_without_values_raises_on_all_ranks(pools, everywhere):
    first, second = pools.run(2, without_values, everywhere)
    assert "a tensor on the meta device, which has no values" in first
    assert isinstance(second, str)
    assert "meta device" in second


COLLECTIVES = {
    "gather": fa.gather,
    "gather of some": lambda x: fa.gather(x, valid=1),
    "reduce": fa.reduce,
    "broadcast": fa.broadcast,
    "pad": fa.pad_across_processes,
}


def in_a_loss(name, detached):
    """A loss over the embeddings of all ranks."""

    def loss(model, batch):
        own = model(batch[0])
        everyone = COLLECTIVES[name](own.detach() if detached else own)
        return fa.Mean((own - everyone.mean()).square().sum(), weight=len(own))

    train_step = program(loss, strategy="ddp")
    try:
        return train_step(train_step.init(), batch_of(4))[0].step
    finally:
        train_step.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_gradient_is_not_cut_in_silence(pools, name, ranks):
    assert pools.run(ranks, in_a_loss, name, True) == [1] * ranks
    with pytest.raises(ArgumentError, match=r"part of a graph[\s\S]*detach\(\)"):
        pools.run(ranks, in_a_loss, name, False)
