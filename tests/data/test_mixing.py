"""Mixtures of data sets: shares, orders, ends, and exact resumes on other numbers of ranks."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import fnaccel as fa
from fnaccel.errors import ArgumentError, LoaderError


class Numbers(Dataset):
    """Rows `first`, `first + 1`, ... as dicts."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": torch.tensor(self.first + index)}


class Counted(IterableDataset):
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __iter__(self):
        return ({"x": torch.tensor(self.first + at)} for at in range(self.count))


def loaders(sizes=(40, 12), batch=4, shuffle=True, kind=Numbers):
    options = {"shuffle": shuffle} if kind is Numbers else {}
    names = "abcdef"
    return {
        name: DataLoader(kind(100 * at, size), batch_size=batch, **options)
        for at, (name, size) in enumerate(zip(names, sizes, strict=False))
    }


def rows(mixed, epoch=0, samples=0):
    return [batch.data for batch in fa.shard(mixed).at(fa.state.Position(epoch, samples))]


def drawn(mixed, epoch=0, key="x"):
    return torch.cat([batch[key] for batch in rows(mixed, epoch)]).tolist()


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (5, 2, 3), (0.7, 0.2, 0.05, 0.05)])
def test_shares_hold_at_every_point(weights):
    given = dict(zip("abcd", weights, strict=False))
    with fa.start():
        found = drawn(fa.data.mix(loaders([60] * len(weights)), weights=given, label="source"), key="source")
    seen = Counter()
    for count, source in enumerate(found, 1):
        seen[source] += 1
        for at, weight in enumerate(weights):
            assert abs(seen[at] - count * weight / sum(weights)) <= 1.0 + 1e-6


def test_an_epoch_ends_with_the_first_source_or_with_the_last():
    with fa.start():
        first = drawn(fa.data.mix(loaders(), weights={"a": 1, "b": 1}))
        last = drawn(fa.data.mix(loaders(), weights={"a": 1, "b": 1}, stop="last"))
    a, b = [x for x in first if x < 100], [x for x in first if x >= 100]
    assert sorted(b) == list(range(100, 112))
    assert len(set(a)) == len(a) == 13  # up to the turn of b that finds nothing
    a, b = [x for x in last if x < 100], [x for x in last if x >= 100]
    assert sorted(a) == list(range(40))
    assert [sorted(b[at : at + 12]) for at in (0, 12, 24)] == [list(range(100, 112))] * 3
    assert b[:12] != b[12:24]  # shuffled anew


def test_an_epoch_has_an_order_of_its_own_and_a_seed_too():
    with fa.start():
        orders = [drawn(fa.data.mix(loaders(), seed=seed), epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
        assert drawn(fa.data.mix(loaders(), seed=0)) == orders[0]
        plain = drawn(fa.data.mix(loaders(shuffle=False)))
    assert len({tuple(order) for order in orders}) == 3
    assert [x for x in plain if x < 100] == list(range(len([x for x in plain if x < 100])))


def test_weights_are_sizes_by_default_and_a_temperature_flattens_them():
    with fa.start():
        counts = Counter(x >= 100 for x in drawn(fa.data.mix(loaders((64, 16)))))
        flat = Counter(x >= 100 for x in drawn(fa.data.mix(loaders((64, 16)), temperature=2.0)))
    assert counts == {False: 64, True: 16}
    assert flat[False] / flat[True] == pytest.approx(2.0, abs=0.1)  # the square root of 4


def half_way(samples):
    return {"a": 1, "b": 0} if samples < 30 else {"a": 0, "b": 1}


def test_weights_may_follow_the_samples_of_the_run():
    with fa.start():
        mixed = fa.data.mix(loaders(), weights=half_way)
        first, second = drawn(mixed), drawn(mixed, epoch=1)
    assert [x >= 100 for x in first] == [False] * 30 + [True] * 12
    assert sorted(second) == list(range(100, 112))  # the run has drawn 42 samples before


def without_d(samples):
    """Weights by which "d" is furthest behind as its weight becomes 0."""
    first, rest = {"a": 28, "b": 24, "c": 22, "d": 26}, {"a": 967, "b": 7, "c": 27, "d": 0}
    return rest if samples else first


@pytest.mark.parametrize("stop", ["first", "last"])
def test_a_source_of_weight_0_gives_nothing_and_is_not_waited_for(stop):
    with fa.start():
        found = drawn(fa.data.mix(loaders((12, 2, 2, 12)), weights=without_d, stop=stop))
    assert set(range(12)) < set(found)
    assert {200, 201, 100, 101} <= set(found) or stop == "first"
    assert max(found) < 300


def test_epochs_of_a_schedule_have_no_common_length():
    with fa.start():
        shards = fa.shard(fa.data.mix(loaders(), weights=half_way))
        assert [len(list(shards.at(fa.state.Position(epoch)))) for epoch in (0, 1)] == [11, 3]
        with pytest.raises(LoaderError, match="number of batches in an epoch is not known"):
            shards.updates_per_epoch()


@pytest.mark.parametrize(
    "weights", [(3, 1, 1, 1, 1, 1), (0.5, 0.2, 0.1, 0.1, 0.05, 0.05), (9, 8, 5, 2, 1, 1)]
)
def test_shares_of_many_sources_have_bounds(weights):
    given = dict(zip("abcdef", weights, strict=True))
    with fa.start():
        found = drawn(fa.data.mix(loaders([90] * 6), weights=given, label="source"), key="source")
    seen = Counter()
    for count, source in enumerate(found, 1):
        seen[source] += 1
        ahead = [seen[at] - count * weight / sum(weights) for at, weight in enumerate(weights)]
        assert max(ahead) < 1
        assert min(ahead) > -5


def test_settings_of_workers_are_those_of_the_first_source():
    options = {"num_workers": 1, "prefetch_factor": 7, "multiprocessing_context": "spawn", "timeout": 30}
    first = DataLoader(Numbers(0, 8), batch_size=4, shuffle=True, **options)
    mixed = fa.data.mix({"a": first, "b": loaders()["b"]})
    assert (mixed.prefetch_factor, mixed.timeout) == (7, 30)
    assert mixed.multiprocessing_context.get_start_method() == "spawn"


@pytest.mark.parametrize("kind", [Numbers, Counted])
def test_batches_are_of_one_source(kind):
    weights = {"a": 3, "b": 1}
    with fa.start():
        mixed = fa.data.mix(loaders((40, 10), kind=kind), by="batches", weights=weights, label="source")
        found = rows(mixed)
    assert all(len(set(batch["source"].tolist())) == 1 for batch in found)
    names = [int(batch["source"][0]) for batch in found]
    assert names[:8] == [0, 0, 1, 0, 0, 0, 1, 0]
    of_b = [x for batch in found for x in batch["x"].tolist() if x >= 100]
    assert sorted(of_b) == list(range(100, 100 + len(of_b)))


@pytest.mark.parametrize("kind", [Numbers, Counted])
def test_the_last_of_batches_ends_once_all_were_through(kind):
    with fa.start():
        mixed = fa.data.mix(loaders((40, 8), kind=kind), by="batches", weights={"a": 1, "b": 1}, stop="last")
        found = [batch["x"].tolist() for batch in rows(mixed)]
    assert sorted(x for batch in found for x in batch if x < 100) == list(range(40))
    assert sum(batch[0] >= 100 for batch in found) >= 9


class Shuffled(Counted):
    """A stream that draws its order from the global random stream."""

    def __iter__(self):
        return ({"x": torch.tensor(self.first + at)} for at in torch.randperm(self.count).tolist())


class ByEpoch(Counted):
    """A stream that shuffles by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        return ({"x": torch.tensor(self.first + at)} for at in order.tolist())


def sources_of(kind):
    """A stream, and map-style data with a generator of its own beside it."""
    numbers, generator = Numbers(100, 14), torch.Generator().manual_seed(3)
    beside = DataLoader(numbers, batch_size=4, shuffle=True, generator=generator)
    return {"a": loaders((30,), kind=kind)["a"], "b": beside}


def streamed_mixture(kind, begun):
    """Such a mixture, after other draws from the global random stream."""
    torch.manual_seed(begun)
    mixed = fa.data.mix(sources_of(kind), by="batches", weights={"a": 3, "b": 2}, stop="last")
    return fa.shard(mixed, seed=5)


def resumed(kind, epoch, samples, begun):
    """What this rank reads of it from a position on, in a process that has read nothing before."""
    place = fa.state.Position(epoch, samples)
    return [
        (batch.first, batch.data["x"][: batch.valid].tolist())
        for batch in streamed_mixture(kind, begun).at(place)
    ]


@pytest.mark.parametrize("kind", [Shuffled, ByEpoch])
def test_a_stream_is_resumed_in_its_order_with_map_style_data_beside_it(pools, kind):
    with fa.start():
        shards = streamed_mixture(kind, 0)
        epochs = [
            [x for batch in shards.at(fa.state.Position(epoch)) for x in batch.data["x"].tolist()]
            for epoch in (0, 1)
        ]
    assert epochs[0] != epochs[1]
    for order in epochs:
        a, b = [x for x in order if x < 100], [x for x in order if x >= 100]
        assert sorted(a) == list(range(30))
        assert sorted(b[:14]) == list(range(100, 114)) != b[:14]
        assert b[14:] != b[: len(b) - 14]
    for ranks, samples in [(1, 10), (2, 0), (2, 12)]:
        parts = pools.run(ranks, resumed, kind, 1, samples, 7 + ranks)
        together = [
            [x for _, part in sorted(each for each in batch if each[1]) for x in part]
            for batch in itertools.zip_longest(*parts)
        ]
        assert [x for batch in together for x in batch] == epochs[1][samples:]


def test_a_stream_is_told_another_epoch_for_each_walk():
    mixed = fa.data.mix(loaders((24, 8), kind=ByEpoch), by="batches", weights={"a": 1, "b": 1}, stop="last")
    with fa.start():
        of_b = [[x for x in drawn(mixed, epoch) if x >= 100] for epoch in (0, 1)]
    walks = [tuple(found[at : at + 8]) for found in of_b for at in (0, 8, 16)]
    assert all(sorted(walk) == list(range(100, 108)) for walk in walks)
    assert len(set(walks)) == 6


def read_from(kind, by, samples):
    """What this rank reads of an epoch from a position on."""
    weights = {"a": 3, "b": 2}
    mixed = fa.data.mix(loaders((30, 14), kind=kind), by=by, weights=weights, seed=5)
    return [
        (batch.first, batch.data["x"][: batch.valid].tolist())
        for batch in fa.shard(mixed).at(fa.state.Position(0, samples))
    ]


@pytest.mark.parametrize(("kind", "by"), [(Numbers, "rows"), (Numbers, "batches"), (Counted, "batches")])
def test_a_position_is_resumed_on_another_number_of_ranks(pools, kind, by):
    with fa.start():
        whole = [x for _, part in read_from(kind, by, 0) for x in part]
    for ranks, samples in [(1, 8), (2, 0), (2, 12), (3, 8)]:
        parts = pools.run(ranks, read_from, kind, by, samples)
        together = [
            [x for _, part in sorted(each for each in batch if each[1]) for x in part]
            for batch in itertools.zip_longest(*parts)
        ]
        assert [x for batch in together for x in batch] == whole[samples:]


def loss_fn(model, batch):
    x = batch["x"].float()[:, None] / 100
    counts = {name: fa.Sum((batch["source"] == at).sum()) for at, name in enumerate("ab")}
    return fa.Mean(model(x).square().sum(), weight=len(x), aux=counts)


def scanned(folder, stops):
    """Losses and counts of a run that is saved and begun anew at some steps."""
    mixed = fa.data.mix(loaders((30, 14), batch=6), weights={"a": 2, "b": 1}, label="source")
    found = []
    for stop in stops:
        model = fa.distribute(lambda: torch.nn.Linear(1, 1))
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(0.1))
        state = fa.resume_or_init(folder, train_step, seed=0)
        for _, metrics in fa.scan(train_step, state, fa.shard(mixed), steps=stop, save=folder):
            found.append((float(metrics["loss"]), int(metrics["a"]), int(metrics["b"])))
        train_step.close()
    return found


def test_a_loop_resumes_and_counts_by_source(pools, tmp_path):
    with fa.start():
        whole = scanned(tmp_path / "whole", [12])
    first = pools.run(2, scanned, tmp_path / "parts", [4, 7])
    assert first[0] == first[1]
    with fa.start():
        rest = scanned(tmp_path / "parts", [12])
    found = first[0] + rest
    assert [(a, b) for _, a, b in found] == [(a, b) for _, a, b in whole]
    assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in whole], rel=1e-6)
    assert whole[0][1:] == (4, 2)


def test_lengths_are_known_of_map_style_data():
    with fa.start():
        shards = fa.shard(fa.data.mix(loaders(), weights={"a": 1, "b": 1}))
        assert len(shards) == len(list(shards)) == shards.updates_per_epoch() == 7


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": {"a": 1, "c": 1}}, "there is no source 'c'"),
        ({"weights": {"a": -1, "b": 1}}, "weights of"),
        ({"weights": {}}, "weights of"),
        ({"weights": {"a": float("nan"), "b": 1}}, "weights of"),
        ({"weights": {"a": 1}, "stop": "last"}, "a source of weight 0 is never through"),
        ({"by": "row"}, "by='row'"),
        ({"stop": "all"}, "stop='all'"),
        ({"temperature": 0}, "temperature=0"),
    ],
)
def test_a_mixture_that_can_not_be_raises(options, text):
    with pytest.raises(ArgumentError) as error:
        fa.data.mix(loaders(), **options)
    assert text in str(error.value)


def drawn_with(**options):
    numbers = Numbers(0, 8)
    return DataLoader(numbers, batch_size=4, sampler=RandomSampler(numbers, **options))


def test_an_empty_source_raises_with_its_name():
    with pytest.raises(LoaderError, match="holds nothing") as error:
        fa.data.mix(loaders() | {"c": DataLoader([])})
    assert error.value.__notes__ == ["it is the source 'c' of fa.data.mix"]


def test_sources_that_fit_no_mixture_raise():
    one, stream = loaders(), loaders(kind=Counted)
    own = DataLoader(Numbers(0, 8), batch_size=4, sampler=[0, 1, 2])
    for sources, options, text in [
        ({}, {}, "no source"),
        (stream, {"weights": {"a": 1}}, "a, b can only be read in order"),
        (stream, {"by": "batches"}, "can only be read in order"),
        ({"a": one["a"], "b": stream["b"]}, {"weights": {"a": 1}}, "b can only be read in order"),
        ({"a": one["a"], "b": stream["b"]}, {"by": "batches"}, "b can only be read in order"),
        ({"a": one["a"], "b": own}, {}, "b has a sampler of its own"),
        ({"a": one["a"], "b": drawn_with(replacement=True)}, {}, "b has a sampler of its own"),
        ({"a": one["a"], "b": drawn_with(num_samples=3)}, {}, "b has a sampler of its own"),
        ({"a": fa.shard(one["a"]), "b": one["b"]}, {}, "a is the result of fa.shard"),
        ({"a": one["a"], "b": loaders(batch=2)["b"]}, {}, "batch_size differs"),
    ]:
        with pytest.raises(ArgumentError) as error:
            fa.data.mix(sources, **options)
        assert text in str(error.value)
    tensors = {"a": DataLoader(torch.arange(8), batch_size=4)}
    with fa.start(), pytest.raises(ArgumentError, match="an item is Tensor"):
        rows(fa.data.mix(tensors, label="source"))
    with fa.start(), pytest.raises(ArgumentError, match="the items have 'x' already"):
        rows(fa.data.mix(loaders(), label="x"))
