"""Buffers that grow in forward, such as rotary caches: a resumed run goes on as if it had not stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.tiny_models import Net, program, whole_params


class Cached(nn.Module):
    """Positions are added from a table that grows with the longest batch, and is not saved."""

    def __init__(self, persistent=False, lazy=False):
        super().__init__()
        self.net = Net()
        first = None if lazy else torch.zeros(2)
        self.register_buffer("table", first, persistent=persistent)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), device=x.device) / 7
        self.seen += 1
        return self.net(x) + self.table[: len(x), None]


def squares(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def batches(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2 * step + 2, 3, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


def trained(strategy, folder, steps, lazy=False):
    train_step = program(
        squares, strategy=strategy, model=lambda: Cached(lazy=lazy), optimizer=fa.adamw(0.01)
    )
    state = fa.resume_or_init(folder, train_step)
    assert state.step == steps[0]
    for number in range(*steps):
        state, _ = train_step(state, batches(number))
    fa.save(folder, state)
    return whole_params(state), float(state.buffers["seen"])


@pytest.mark.parametrize("lazy", [False, True], ids=["grows", "lazy"])
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_cache_that_grew_is_resumed(pools, tmp_path, strategy, ranks, lazy):
    expected = pools.run(ranks, trained, strategy, tmp_path / "whole", (0, 4), lazy)
    pools.run(ranks, trained, strategy, tmp_path / "parts", (0, 3), lazy)
    found = pools.run(ranks, trained, strategy, tmp_path / "parts", (3, 4), lazy)
    for (params, seen), (wanted, count) in zip(found, expected, strict=True):
        assert_close(params, wanted)
        assert seen == count


def test_a_buffer_that_is_saved_and_grew_is_named_at_the_first_save(tmp_path):
    with fa.start():
        train_step = program(squares, model=lambda: Cached(persistent=True))
        state = train_step.init()
        fa.save(tmp_path, state)
        state, _ = train_step(state, batches(3))
        with pytest.warns(RuntimeWarning, match=r"table was \[2\] after init, and is \[8\]"):
            fa.save(tmp_path, state)
        state, _ = train_step(state, batches(3))
        fa.save(tmp_path, state)  # once
        with pytest.raises(errors.TreeMismatchError, match="buffers/table"):
            fa.resume_or_init(tmp_path, program(squares, model=lambda: Cached(persistent=True)))


class Headed(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.body(x)).sum(1, keepdim=True)


def test_a_changed_model_is_resumed_by_skip_and_rename(tmp_path):
    """A restart of the changed run finds a checkpoint that fits, and takes all of it."""
    options = {"optimizer": fa.sgd(0.01, momentum=0.9)}
    skip = ("params/head*", "opt/head*")
    with fa.start():
        first = program(squares, model=lambda: Headed(2), **options)
        state, _ = first(first.init(), batches(1))
        fa.save(tmp_path, state)
        body = whole_params(state)["body.weight"]
        step = program(squares, model=lambda: Headed(5), **options)
        with pytest.raises(errors.TreeMismatchError, match=r"head\.weight"):
            fa.resume_or_init(tmp_path, step)
        step = program(squares, model=lambda: Headed(5), **options)
        state = fa.resume_or_init(tmp_path, step, seed=3, skip=skip)
        assert state.step == 1
        assert torch.equal(whole_params(state)["body.weight"], body)
        state, _ = step(state, batches(2))
        fa.save(tmp_path, state)
        head = whole_params(state)["head.weight"]
        again = program(squares, model=lambda: Headed(5), **options)
        state = fa.resume_or_init(tmp_path, again, seed=3, skip=skip, rename={"no_such": "path"})
        assert torch.equal(whole_params(state)["head.weight"], head)
        assert state.opt["head.weight"]["momentum_buffer"].any()
