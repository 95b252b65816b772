from __future__ import annotations

import random
from collections import Counter

import attrs
import numpy
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

import fnaccel as fa
import fnaccel.world.world
from fnaccel.data import Batch, Window, order, shard, steps_per_epoch
from fnaccel.errors import ArgumentError, LoaderError, UnknownNameError
from fnaccel.state import Position
from fnaccel.world import world as worlds

from .reading import counted, members, numbers, read, read_all, samples, values

REMAINDERS = st.sampled_from(order.REMAINDERS)


def loader(n, batch_size=4, **options):
    return torch_data.DataLoader(numbers(n), batch_size=batch_size, **options)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), REMAINDERS, st.booleans(), st.booleans())
def test_all_ranks_run_the_same_number_of_forwards(n, batch_size, ranks, remainder, per_rank, shuffle):
    shards = shard(loader(n, batch_size, shuffle=shuffle), remainder=remainder, per_rank=per_rank, seed=n)
    step = batch_size * ranks if per_rank else batch_size
    if remainder == "drop" and n < step:
        with pytest.raises(LoaderError, match="leaves no batch"):
            read(shards, 0, ranks)
        return
    per_rank_batches = read_all(shards, ranks)
    assert {len(one) for one in per_rank_batches} == {steps_per_epoch(shards, ranks)}
    assert all(values(batch.data) for one in per_rank_batches for batch in one)
    seen = Counter(samples(per_rank_batches))
    if remainder == "keep":
        assert seen == Counter(range(n))
    elif remainder == "drop":
        assert (sum(seen.values()), max(seen.values())) == (n // step * step, 1)
    else:
        in_order = order.permutation(n, n, 0) if shuffle else list(range(n))
        total = -(-n // step) * step
        assert seen == Counter(in_order[row % n] for row in range(total))
    positions = [[batch.position for batch in one] for one in per_rank_batches]
    assert all(one == positions[0] for one in positions)
    assert positions[0][-1] == Position(1, 0)
    assert [p.samples for p in positions[0][:-1]] == [(j + 1) * step for j in range(len(positions[0]) - 1)]


@given(
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 9),
    st.booleans(),
)
def test_resuming_on_other_ranks_repeats_and_skips_nothing(n, batch_size, before, after, done, per_rank):
    shards = shard(loader(n, batch_size, shuffle=True), per_rank=per_rank)
    first = [one[:done] for one in read_all(shards, before)]
    position = first[0][-1].position if first[0] else Position()
    if position.epoch == 1:
        assert sorted(samples(first)) == list(range(n))
        return
    rest = read_all(shards.at(position), after)
    assert sorted(samples(first) + samples(rest)) == list(range(n))
    if before == after:
        whole = samples(read_all(shards, before))
        assert samples(first) + samples(rest) == whole


@given(st.integers(1, 30), st.integers(1, 5), REMAINDERS, st.integers(1, 3))
def test_at_a_position_is_exactly_the_rest(n, batch_size, remainder, ranks):
    shards = shard(loader(n, batch_size, shuffle=True), remainder=remainder)
    if remainder == "drop" and n < batch_size:
        return
    for rank in range(ranks):
        whole = read(shards, rank, ranks)
        for done, batch in enumerate(whole[:-1], start=1):
            rest = read(shards.at(batch.position), rank, ranks)
            assert [(values(b.data), b.valid, b.position) for b in rest] == [
                (values(b.data), b.valid, b.position) for b in whole[done:]
            ]


def test_a_rank_without_rows_runs_rank_0s():
    first, second = read_all(shard(loader(5, 4)), 2)
    assert (values(first[-1].data), first[-1].valid) == ([4], 1)
    assert (values(second[-1].data), second[-1].valid, second[-1].rows) == ([4], 0, 2)


def test_an_uneven_batch_size_is_cut_by_divmod():
    parts = read_all(shard(loader(10, 5)), 3)
    assert [[counted(batch) for batch in one] for one in parts] == [
        [[0, 1], [5, 6]],
        [[2, 3], [7, 8]],
        [[4], [9]],
    ]
    assert [one[0].rows for one in parts] == [2, 2, 1]


def test_a_default_remainder_is_the_loaders_own():
    assert shard(loader(9)).remainder == "keep"
    dropping = shard(loader(9, drop_last=True))
    assert dropping.remainder == "drop"
    assert samples([read(dropping)]) == list(range(8))
    assert samples([read(dropping, remainder="keep")]) == list(range(9))


def test_order_is_a_function_of_seed_and_epoch_only():
    shuffled = loader(20, shuffle=True, generator=torch.Generator().manual_seed(5))
    shards = shard(shuffled, seed=2)
    torch.manual_seed(1)
    first = samples([read(shards)])
    assert first == samples([read(shards)]) == order.permutation(20, 2, 0)
    assert samples([read(shards.at(Position(3)))]) == order.permutation(20, 2, 3)
    assert samples([read(shard(shuffled, shuffle=False))]) == list(range(20))
    assert samples([read(shard(loader(20), shuffle=True))]) == order.permutation(20, 0, 0)


def test_a_sampler_of_the_users_own_decides_each_epoch():
    class Backwards(torch_data.Sampler):
        def __init__(self):
            self.epoch = None

        def __iter__(self):
            return iter(range(6 - self.epoch, -1, -1))

        def set_epoch(self, epoch):
            self.epoch = epoch

    shards = shard(torch_data.DataLoader(numbers(7), batch_size=4, sampler=Backwards()))
    assert samples(read_all(shards, 2)) == [6, 5, 4, 3, 2, 1, 0]
    assert samples(read_all(shards.at(Position(1)), 2)) == [5, 4, 3, 2, 1, 0]
    assert steps_per_epoch(shards, 2) is None
    assert steps_per_epoch(attrs.evolve(shards, shuffle=True), 2) == 2


def test_samplers_with_replacement_are_iterated():
    sampler = torch_data.RandomSampler(numbers(5), replacement=True, num_samples=12)
    shards = shard(torch_data.DataLoader(numbers(5), batch_size=4, sampler=sampler))
    assert len(samples([read(shards)])) == 12
    assert steps_per_epoch(shards, 2) == 3


@pytest.mark.parametrize("own", [None, 1, 2])
def test_a_sampler_that_draws_gives_an_epoch_the_same_order_each_time(own):
    """A run that goes on in the middle of an epoch has to see the order that it began with."""

    def fresh():
        generator = None if own is None else torch.Generator().manual_seed(own)
        torch.manual_seed(torch.seed())
        sampler = torch_data.WeightedRandomSampler([1.0] * 9, 9, generator=generator)
        return shard(torch_data.DataLoader(numbers(9), batch_size=2, sampler=sampler), seed=3), generator

    shards, generator = fresh()
    before = torch.get_rng_state(), generator and generator.get_state()
    first = samples([read(shards)])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert generator is None or torch.equal(generator.get_state(), before[1])
    assert first == samples([read(fresh()[0])])
    assert first[4:] == samples([read(fresh()[0].at(Position(0, 4)))])
    assert first != samples([read(shards.at(Position(1)))])


def test_windows_hold_up_to_their_size():
    windows = read(shard(loader(22, 4), window=4))
    assert [type(window) for window in windows] == [Window, Window]
    assert [len(window) for window in windows] == [4, 2]
    assert samples([members(windows)]) == list(range(22))
    assert steps_per_epoch(shard(loader(22, 4), window=4), 1) == 2


def test_custom_batch_samplers():
    groups = [[0, 1, 2], [3, 4], [5], [6, 7, 8]]
    dynamic = torch_data.DataLoader(numbers(9), batch_sampler=groups)
    parts = read_all(shard(dynamic), 2)
    assert [[counted(batch) for batch in one] for one in parts] == [
        [[0, 1], [3], [5], [6, 7]],
        [[2], [4], [], [8]],
    ]
    assert [batch.position.samples for batch in parts[0]] == [3, 5, 6, 0]
    assert samples(read_all(shard(dynamic).at(Position(0, 4)), 2)) == [4, 5, 6, 7, 8]
    dealt = shard(dynamic, per_rank=True)
    parts = read_all(dealt.at(Position(0, 3)), 2)
    assert [[counted(batch) for batch in one] for one in parts] == [[[3, 4], [6, 7, 8]], [[5], []]]
    assert values(parts[1][1].data) == [6, 7, 8]
    assert (steps_per_epoch(dealt, 3), steps_per_epoch(shard(dynamic), 3)) == (2, 4)


@pytest.mark.parametrize("remainder", order.REMAINDERS)
def test_dealt_batches_go_on_exactly(remainder):
    groups = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9]]
    dynamic = torch_data.DataLoader(numbers(10), batch_sampler=groups)
    shards = shard(dynamic, per_rank=True, remainder=remainder)
    for whole in read_all(shards, 2):
        rank = 0 if values(whole[0].data) == [0, 1, 2] else 1
        rest = read(shards.at(whole[0].position), rank, 2)
        assert [values(b.data) for b in rest] == [values(b.data) for b in whole[1:]]


def test_a_plain_batch_sampler_is_arithmetic():
    batching = torch_data.BatchSampler(torch_data.RandomSampler(numbers(9)), 4, drop_last=True)
    shards = shard(torch_data.DataLoader(numbers(9), batch_sampler=batching), seed=4)
    assert shards.remainder == "drop"
    assert samples([read(shards)]) == order.permutation(9, 4, 0)[:8]


def test_tensor_datasets_read_as_the_plain_loader_does():
    data = torch_data.TensorDataset(
        torch.randn(10, 3), torch.arange(20).reshape(2, 10).T, torch.ones(10).bool()
    )
    plain = torch_data.DataLoader(data, batch_size=4)
    for ours, theirs in zip(read(shard(plain)), plain, strict=True):
        assert type(ours.data) is type(theirs)
        for a, b in zip(ours.data, theirs, strict=True):
            assert (a.dtype, a.stride(), a.shape) == (b.dtype, b.stride(), b.shape)
            assert torch.equal(a, b)


def test_a_changed_default_collate_is_kept(monkeypatch):
    from torch.utils.data._utils.collate import default_collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda rows, **_: torch.stack(rows) + 1)
    assert samples([read(shard(loader(3)))]) == [1, 2, 3]


def test_samplers_may_count_from_the_end():
    sampled = torch_data.DataLoader(numbers(4), batch_size=2, sampler=[-1, 0, -2])
    assert samples([read(shard(sampled))]) == [3, 0, 2]


def test_reading_does_not_expose_the_dataset():
    source = torch.arange(4)
    (batch,) = read(shard(torch_data.DataLoader(torch_data.TensorDataset(source), batch_size=4)))
    batch.data[0].zero_()
    assert source.tolist() == [0, 1, 2, 3]


def test_collate_functions_and_getitems_are_kept():
    class Lists(torch_data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            raise AssertionError

        def __getitems__(self, indices):
            return [index * 10 for index in indices]

    shards = shard(
        torch_data.DataLoader(Lists(), batch_size=4, collate_fn=lambda rows: {"x": torch.tensor(rows)})
    )
    assert [batch.data["x"].tolist() for batch in read(shards)] == [[0, 10, 20, 30], [40, 50]]


def test_nothing_is_read_before_the_first_batch():
    class Untouchable(torch_data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError

    shards = shard(torch_data.DataLoader(Untouchable(), batch_size=2))
    assert shards.at(Position(1, 2)).start == Position(1, 2)
    assert steps_per_epoch(shards, 2) == 2


def test_a_hand_loop_reads_the_world():
    shards = shard(loader(6))
    with fnaccel.world.world.start(device="cpu"):
        batches = list(shards)
        assert all(isinstance(batch, Batch) for batch in batches)
        assert samples([batches]) == list(range(6))
        with pytest.raises(LoaderError, match="nothing is left of epoch 0"):
            list(shards.at(Position(0, 6)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"remainder": "wrapp"}, UnknownNameError, "did you mean 'wrap'"),
        ({"window": 0}, ArgumentError, "window=0"),
        (
            {"dispatch": True, "per_rank": True},
            ArgumentError,
            r"dispatch=True .*\n.*\n.* batch_size=\d+ \* world.size",
        ),
    ],
)
def test_bad_arguments_raise_at_once(options, error, words):
    with pytest.raises(error, match=words):
        shard(loader(3), **options)


def test_bad_loaders_raise_at_once():
    with pytest.raises(LoaderError, match="not iterable"):
        shard(3)
    with pytest.raises(LoaderError, match="holds nothing"):
        shard(loader(0))
    with pytest.raises(LoaderError, match="holds nothing"):
        shard([])
    with pytest.raises(LoaderError, match="shuffle=True can't change"):
        shard([torch.ones(2)], shuffle=True)
    with pytest.raises(LoaderError, match="shuffle=False can't change"):
        shard(torch_data.DataLoader(numbers(2), batch_sampler=[[0], [1]]), shuffle=False)
    split = torch_data.DistributedSampler(numbers(4), num_replicas=2, rank=0)
    with pytest.raises(LoaderError, match="a part of a part"):
        shard(torch_data.DataLoader(numbers(4), sampler=split))


def test_a_position_past_the_end_raises():
    with pytest.raises(LoaderError, match="9 samples into an epoch of 6"):
        read(shard(loader(6)).at(Position(0, 9)))
    assert read(shard(loader(6)).at(Position(0, 6))) == []


def test_dispatch_needs_a_group():
    with pytest.raises(ArgumentError, match="no process group joins them"):
        read(shard(loader(6), dispatch=True), 0, 2)
    assert samples([read(shard(loader(6), dispatch=True))]) == list(range(6))


def lengths(start):
    world = worlds.current()
    shards = shard(loader(22, 4)).at(Position(0, start))
    return len(shards), len(list(shards)), shard(loader(22, 4)).updates_per_epoch(), world.size


@pytest.mark.parametrize(("ranks", "start", "left"), [(1, 0, 6), (2, 0, 6), (2, 8, 4), (3, 20, 1)])
def test_a_length_is_the_number_of_batches_that_are_left(pools, ranks, start, left):
    assert pools.run(ranks, lengths, start) == [(left, left, 6, ranks)] * ranks


def test_lengths_before_a_world():
    assert len(shard(loader(22, 4))) == 6
    assert len(shard(loader(22, 4), window=4)) == 2
    assert shard(loader(22, 4)), "true, whatever its length"


def updates(strategy):
    return shard(loader(24, 4), per_rank=True).updates_per_epoch(fa.strategy(strategy))


def test_updates_count_the_ranks_that_share_a_batch(pools):
    assert pools.run(2, updates, "ddp") == [3, 3]
    with fa.start(device="cpu"):
        assert shard(loader(24, 4), window=3).updates_per_epoch() == 2


def test_a_stream_has_no_length():
    class Endless(torch_data.IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)

    endless = shard(torch_data.DataLoader(Endless(), batch_size=2))
    with fa.start(device="cpu"):
        with pytest.raises(TypeError, match="not known"):
            len(endless)
        with pytest.raises(LoaderError, match="not known"):
            endless.updates_per_epoch()
        assert endless, "a stream is true"
        assert len(list(endless)) == 1


class Drawing(torch_data.Sampler):
    """Draws from a generator of its own, which moves from epoch to epoch."""

    def __init__(self, seed, kind):
        self.kind, self.source = kind, GENERATORS[kind](seed)

    def __iter__(self):
        if self.kind == "torch":
            return iter(torch.randperm(12, generator=self.source).tolist())
        order = list(range(12))
        self.source.shuffle(order)
        return iter(order)


GENERATORS = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "Python": random.Random,
    "NumPy": numpy.random.default_rng,
    "NumPy, old": numpy.random.RandomState,
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_sampler_with_a_generator_of_its_own_goes_on_in_the_order_of_the_epoch(kind, grouped):
    """A process that resumes in epoch 1 has drawn nothing in epoch 0: 4 of 12 rows came twice."""

    def fresh(seed=0):
        sampler = Drawing(seed, kind)
        if grouped:
            return shard(torch_data.DataLoader(numbers(12), batch_sampler=Twos(sampler)))
        return shard(torch_data.DataLoader(numbers(12), batch_size=2, sampler=sampler))

    run = fresh()
    first, second = (samples([read(run.at(Position(epoch)))]) for epoch in range(2))
    assert first != second
    assert samples(read_all(fresh().at(Position(1, 4)), 2)) == second[4:]
    assert samples([read(fresh(1))]) != first


class Twos:
    """A batch sampler that is no class of torch's."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(torch_data.BatchSampler(self.sampler, 2, drop_last=False))
