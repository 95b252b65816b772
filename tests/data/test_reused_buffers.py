"""Loaders that fill one buffer again: what was read stays what it was, and other loaders are not copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fnaccel as fa
from tests.data.reading import read, read_all

N = 24


class Ring:
    """Batches 1 to n, as views of `buffers` buffers in turn. `kind` is what holds the values."""

    def __init__(self, buffers=1, n=N, kind="torch", rows=2):
        self.n, self.kind = n, kind
        self.memory = np.zeros((buffers, rows), dtype=np.float32)
        self.nodes = [[] for _ in range(buffers)]

    def __iter__(self):
        for i in range(self.n):
            at = i % len(self.memory)
            self.memory[at] = i + 1
            array = self.memory[at]
            if self.kind == "dict":
                self.nodes[at][:] = [i + 1.0] * array.size
                yield self.nodes[at]
            else:
                yield array if self.kind == "numpy" else torch.from_numpy(array)


class Stream(IterableDataset):
    """A ring behind a DataLoader, whose batches it passes on."""

    def __init__(self, *args, **options):
        self.ring = Ring(*args, **options)

    def __iter__(self):
        return iter(self.ring)


RINGS = [  # (buffers, window, prefetch)
    (buffers, window, prefetch)
    for buffers in (1, 2, 3, 5)
    for window in (None, 1, 4)
    for prefetch in (0, 1, 3)
]


def first_values(batches):
    """The first value of every batch, in windows or not. Windows are looked at once they are complete."""
    flat = []
    for batch in batches:
        members = batch if isinstance(batch, fa.data.Window) else [batch]
        flat += [float(member.data[0]) for member in members]
    return flat


@pytest.mark.parametrize("kind", ["torch", "numpy", "dict"])
@pytest.mark.parametrize(("buffers", "window", "prefetch"), RINGS)
def test_rings(buffers, window, prefetch, kind):
    loader = Ring(buffers, kind=kind)
    with fa.start():
        shards = fa.shard(loader, window=window, prefetch=prefetch)
        assert first_values(iter(shards)) == list(range(1, N + 1))


@pytest.mark.parametrize(("buffers", "window", "prefetch"), RINGS)
def test_rings_of_a_data_set(buffers, window, prefetch):
    with fa.start():
        loader = DataLoader(Stream(buffers), batch_size=None)
        assert first_values(fa.shard(loader, window=window, prefetch=prefetch)) == list(range(1, N + 1))


@pytest.mark.parametrize("buffers", [1, 2, 3, 5])
def test_windows_that_grow_and_go_over_the_end_of_an_epoch(buffers):
    """Windows of 1, 1, 1, 4, 4, ... batches, in a scan over two epochs of a ring."""
    seen = []

    def loss_fn(model, batch):
        seen.append(float(batch[0]))
        return model(batch[:, None]).mean()

    for across in (False, True):
        seen.clear()
        with fa.start():
            factory = fa.distribute(lambda: torch.nn.Linear(1, 1), fa.local())
            train_step = fa.train_step(loss_fn, model=factory, optimizer=fa.sgd(0.0))
            sizes = fa.shard(Ring(buffers), window=lambda step: 1 if step < 7 else 4, across_epochs=across)
            for state, _ in fa.scan(train_step, train_step.init(seed=0), sizes, epochs=2):
                pass
        assert seen == [*range(1, N + 1)] * 2


def test_ranks_that_share_a_ring():
    """`per_rank`, `wrap` and `presplit` hold more batches, and the first of the epoch."""
    every = read_all(fa.shard(Ring(3, n=7), per_rank=True, remainder="wrap"), 4)
    seen = [[batch.data[0].item() for batch in rank] for rank in every]
    assert seen == [[1, 5], [2, 6], [3, 7], [4, 1]]
    alone = read(fa.shard(DataLoader(Stream(2, n=5), batch_size=None), presplit=True, window=5))
    assert first_values(alone) == [1, 2, 3, 4, 5]


def test_rows_of_an_evaluation_outlive_the_buffer():
    """Rows that a metric function returns as they stand in the batch, in a ring longer than batches wait."""
    with fa.start():
        factory = fa.distribute(lambda: torch.nn.Linear(1, 1), fa.local())
        train_step = fa.train_step(lambda model, x: model(x).mean(), model=factory, optimizer=fa.sgd(0.0))
        state = train_step.init(seed=0)
        for buffers in (1, 5):
            rows = fa.evaluate(
                train_step, state, lambda model, x: fa.Concat(x), fa.shard(Ring(buffers, rows=1))
            )
            assert rows.tolist() == list(range(1, N + 1))


def test_batches_that_a_loader_collates_are_not_copied():
    """Nor those of an iterable whose user says that it fills no buffer again."""
    made = []

    def fresh(rows):
        made.append(torch.tensor(rows))
        return made[-1]

    class Rows(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(40.0).tolist())

    parts = list(torch.arange(40.0).split(2))
    with fa.start():
        for data in (torch.arange(40.0).tolist(), Rows()):
            made.clear()
            seen = [batch.data for batch in fa.shard(DataLoader(data, batch_size=2, collate_fn=fresh))]
            assert all(one is batch for one, batch in zip(made, seen, strict=True))
        for copies in (True, False):
            seen = [batch.data for batch in fa.shard(parts, copies=copies)]
            assert [one is part for one, part in zip(seen, parts, strict=True)] == [not copies] * 20


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_batches_that_come_twice_do_not_raise(kind):
    """A data set that holds its batches, read with replacement."""
    held = [np.full(2, float(i)) for i in range(8)]
    held = held if kind == "numpy" else [torch.from_numpy(one) for one in held]
    order = [0, 1, 2, 3, 4, 4, 5, 6, 7, 0, 1, 1, 1, 2, 3, 4, 5, 5]
    with fa.start():
        found = [float(batch.data[0]) for batch in fa.shard([held[i] for i in order], prefetch=0)]
    assert found == order


def test_a_copy_keeps_what_a_batch_is():
    """Objects that stand twice, gradients, memory layout, and a mapping's own attributes."""
    transformers = pytest.importorskip("transformers")
    x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    y = torch.ones(2, requires_grad=True)
    batch = transformers.BatchEncoding({"x": x, "same": x, "y": y, "names": ["a", "b"]})
    batch.own = "kept"
    with fa.start():
        got = next(iter(fa.shard([batch]))).data
    assert type(got) is type(batch)
    assert got.own == "kept"
    assert got["x"] is got["same"]
    assert got["x"] is not x
    assert got["x"].is_contiguous(memory_format=torch.channels_last)
    assert got["y"].requires_grad
    assert got["y"].is_leaf
    assert got["names"] == ["a", "b"]
    assert batch["x"] is x
