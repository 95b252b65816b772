"""Windows over the end of an epoch, windows that grow, and their counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.data import windows
from tests.tiny_models import batch_of, loss_fn, program, whole_params


def shards(n=10, batch=4, **options):
    return fa.shard(DataLoader(TensorDataset(*batch_of(n)), batch_size=batch), **options)


def growing(step):
    return 1 + step


def run(data, stop=None, directory=None, **options):
    """(step, epoch, samples, micro-batches) of each update, and the parameters at the end."""
    sizes = []

    def counted(model, batch):
        sizes[-1] += 1
        return loss_fn(model, batch)

    train_step = program(counted)
    state = train_step.init(seed=0)
    if directory is not None:
        state = fa.restore(directory, like=state)
    found = []
    sizes.append(0)
    for state, _ in fa.scan(train_step, state, data, **options):
        found.append((state.step, state.data.epoch, state.data.samples, sizes[-1]))
        sizes.append(0)
        if state.step == stop:
            break
    return found, state


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


def test_windows_go_over_the_end_of_an_epoch(world):
    """Three batches an epoch, two a window: 3 epochs are 9 batches, so 4 windows and one half window."""
    found, _ = run(shards(window=2, across_epochs=True), epochs=3)
    assert found == [(1, 0, 8, 2), (2, 1, 4, 2), (3, 2, 0, 2), (4, 2, 8, 2), (5, 3, 0, 1)]
    found, _ = run(shards(window=2, across_epochs=True), steps=4)
    assert [size for *_, size in found] == [2] * 4
    found, _ = run(shards(window=2), epochs=3)
    assert [size for *_, size in found] == [2, 1] * 3


def test_windows_that_grow_with_the_step(world):
    found, _ = run(shards(window=growing), epochs=3)
    assert [size for *_, size in found] == [1, 2, 3, 3]
    found, _ = run(shards(window=growing, across_epochs=True), epochs=3)
    assert [size for *_, size in found] == [1, 2, 3, 3]
    assert found[-1][:3] == (4, 3, 0)


@pytest.mark.parametrize("size", [2, growing])
@pytest.mark.parametrize("across", [False, True])
def test_a_run_that_is_resumed_sees_the_same_windows(world, tmp_path, size, across):
    data = shards(window=size, across_epochs=across)
    straight, end = run(data, epochs=4)
    first, state = run(data, stop=3, epochs=4)
    fa.save(tmp_path, state)
    rest, resumed = run(data, directory=tmp_path, epochs=4)
    assert first + rest == straight
    for name, value in whole_params(end).items():
        torch.testing.assert_close(whole_params(resumed)[name], value, rtol=0, atol=0)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_count_of_updates_is_that_of_a_run(n, batch, epochs, across, grows):
    with fa.start():
        data = shards(n, batch, window=growing if grows else 3, across_epochs=across)
        found, _ = run(data, epochs=epochs)
        assert data.updates_per_epoch(epochs=epochs) == len(found)


def test_len_and_iteration_by_hand(world):
    data = shards(window=growing)
    assert [len(window) for window in data] == [1, 2]
    assert len(data) == 2
    at = data.at(fa.state.Position(1), step=1)
    assert [len(window) for window in at] == [2, 1]
    assert len(at) == 2
    with pytest.raises(errors.ArgumentError, match=r"fa\.scan"):
        next(iter(shards(window=2, across_epochs=True)))


def test_an_epoch_without_batches_raises(world):
    with pytest.raises(errors.LoaderError):
        run(shards(3, 4, remainder="drop", window=2, across_epochs=True), epochs=2)


def zero(step):
    return 0


def half(step):
    return 1.5


@pytest.mark.parametrize("size", [0, -1, True, 1.5, zero, half])
def test_sizes_that_are_none(size):
    with pytest.raises(errors.ArgumentError):
        shards(window=size)


def test_a_function_that_fails_later_says_so(world):
    with pytest.raises(errors.ArgumentError, match="gives 0 for step 2"):
        run(shards(window=lambda step: 2 - step), epochs=3)
    with pytest.raises(errors.ArgumentError, match="there are none"):
        shards(across_epochs=True)


def test_progress_knows_the_total(world, monkeypatch):
    totals = []
    monkeypatch.setattr("fnaccel.loop.tracked.open_bar", lambda total, first: totals.append(total) or _Bar())
    run(shards(window=growing, across_epochs=True), epochs=3, progress=True)
    assert totals == [4]


class _Bar:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self):
        """One step."""

    def set_postfix(self, *_, **__):
        """Show metrics."""


def ramped(n):
    return windows.count(growing, n, 0)


def test_a_window_in_a_recipe(world):
    data = fa.config.DataRecipe(window="tests.data.test_windows:growing", across_epochs=True, prefetch=3)
    made = shards(**fa.config.shard_options(fa.config.Recipe(data=data)))
    assert (made.window, made.across_epochs, made.prefetch) == (growing, True, 3)
    assert [ramped(n) for n in (0, 1, 2, 3, 4)] == [0, 1, 2, 2, 3]
