from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fnaccel.data import order, split_sizes
from fnaccel.errors import ArgumentError, UnknownNameError

DYNAMIC = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13]]
REMAINDERS = st.sampled_from(order.REMAINDERS)


def by_hand(n, batch_size, rank, ranks, remainder, split):
    """Row by row through the whole epoch, from the words of the facts page."""
    step = batch_size if split else batch_size * ranks
    owner = [r for r, size in enumerate(split_sizes(step, ranks)) for _ in range(size)]
    found: dict[int, list[int]] = {}
    total = n // step * step if remainder == "drop" else -(-n // step) * step
    for row in range(total):
        if owner[row % step] == rank and (row < n or remainder == "wrap"):
            found.setdefault(row // step, []).append(row % n)
    return list(found.values())


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5), REMAINDERS, st.booleans())
def test_every_rank_reads_what_the_facts_say(n, batch_size, ranks, remainder, split):
    for rank in range(ranks):
        got = order.batches(n, batch_size, rank=rank, ranks=ranks, remainder=remainder, split=split)
        assert list(got) == by_hand(n, batch_size, rank, ranks, remainder, split)


def test_facts_spot_checks():
    wrapped = order.batches(22, 3, rank=1, ranks=2, remainder="wrap", split=False)
    assert wrapped[-1] == [21, 0, 1]
    tiny = [order.batches(2, 3, rank=r, ranks=2, remainder="wrap", split=False)[:] for r in (0, 1)]
    assert tiny == [[[0, 1, 0]], [[1, 0, 1]]]


def test_batches_behave_as_a_list():
    got = order.batches(10, 4, ranks=2, rank=1)
    assert (len(got), got[-1], got[0:2], list(got)) == (2, [6, 7], [[2, 3], [6, 7]], [[2, 3], [6, 7]])
    with pytest.raises(IndexError):
        got[2]


def test_batches_follow_an_order_from_a_start():
    assert list(order.batches(5, 2, order=[4, 3, 2, 1, 0], start=2)) == [[2, 1], [0]]
    assert list(order.batches(5, 2, order=list("abcde"), start=2, remainder="wrap")) == [
        ["c", "d"],
        ["e", "a"],
    ]


@pytest.mark.parametrize(
    "wrong", [{"n": -1}, {"batch_size": 0}, {"rank": 2}, {"rank": -1}, {"start": 6}, {"ranks": 0, "rank": 0}]
)
def test_batches_out_of_range_raise(wrong):
    arguments = {"n": 5, "batch_size": 2, "rank": 0, "ranks": 2} | wrong
    with pytest.raises(ArgumentError, match="describe no batches"):
        order.batches(arguments.pop("n"), arguments.pop("batch_size"), **arguments)


def test_unknown_remainder_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'keep'"):
        order.batches(4, 2, remainder="kept")
    with pytest.raises(UnknownNameError, match="remainder"):
        order.deal(DYNAMIC, rank=0, ranks=2, remainder="dorp")


@given(st.integers(0, 50), st.integers(1, 9))
def test_split_sizes_and_span_agree(n, parts):
    sizes = split_sizes(n, parts)
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    starts = [sum(sizes[:rank]) for rank in range(parts)]
    assert [order.span(n, rank=r, ranks=parts) for r in range(parts)] == list(zip(starts, sizes, strict=True))


def test_split_sizes_out_of_range_raise():
    with pytest.raises(ArgumentError, match="3 rows can't be cut into 0 parts"):
        split_sizes(3, 0)


def test_permutation_is_pure_and_frozen():
    before = torch.random.get_rng_state()
    first = order.permutation(8, seed=3, epoch=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first == order.permutation(8, 3, 1)
    assert sorted(first) == list(range(8))
    assert len({tuple(order.permutation(8, seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6
    # other values here mean another algorithm: give ORDER_VERSION another number
    assert order.ORDER_VERSION == "randperm-splitmix64/1"
    assert order.permutation(8, 0, 0) == PINNED


PINNED = [0, 2, 5, 1, 3, 4, 7, 6]


def test_deal_per_rank_matches_the_facts():
    def dealt(remainder):
        return [order.deal(DYNAMIC, rank=r, ranks=2, per_rank=True, remainder=remainder) for r in (0, 1)]

    assert dealt("wrap")[1][-1] == [0, 1, 2]
    assert [len(one) for one in dealt("wrap")] == [3, 3]
    assert [len(one) for one in dealt("keep")] == [3, 2]
    assert [len(one) for one in dealt("drop")] == [2, 2]


def test_deal_wraps_more_than_once():
    dealt = [order.deal([[0], [1]], rank=r, ranks=5, per_rank=True, remainder="wrap") for r in range(5)]
    assert dealt == [[[0]], [[1]], [[0]], [[1]], [[0]]]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 12))
def test_deal_cuts_every_batch(sizes, ranks, start):
    groups, first = [], 0
    for size in sizes:
        groups.append(list(range(first, first + size)))
        first += size
    start = min(start, first)
    dealt = [order.deal(groups, rank=r, ranks=ranks, start=start) for r in range(ranks)]
    assert [row for step in zip(*dealt, strict=True) for part in step for row in part] == list(
        range(start, first)
    )
    assert order.skip(groups, start) == [part for g in groups if (part := [row for row in g if row >= start])]
