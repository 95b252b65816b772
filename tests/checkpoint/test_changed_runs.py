"""A run that goes on with something changed says what, in one line."""

from __future__ import annotations

import logging

import attrs
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

import fnaccel as fa
from fnaccel.checkpoint.changed_plan import changes_of
from tests.tiny_models import Net, batch_of, loss_fn, program


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def lines(caplog):
    return [record.getMessage() for record in caplog.records if "another plan" in record.getMessage()]


def resumed(folder, train_step, caplog):
    """The lines that are logged when a run of `train_step` goes on with a checkpoint of the plain step."""
    first = program()
    state, _ = first(first.init(), batch_of(4))
    fa.save(folder, state)
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        fa.resume_or_init(folder, train_step)
    return lines(caplog)


CHANGED = {
    "clip": (lambda: program(fa.clip_norm(loss_fn, 0.5)), "clip_norm (max_norm=0.5) is new"),
    "schedule": (
        lambda: program(optimizer=fa.sgd(fa.schedules.cosine(0.1, 10))),
        "sgd is sgd(lr=cosine(start=0.1, total=10, end=0.0)",
    ),
    "accumulation": (lambda: program(fa.accumulate(loss_fn, 2)), "accumulate (n=2"),
    "loss": (lambda: program(lambda model, batch: loss_fn(model, batch)), "loss is "),
}


@pytest.mark.parametrize("name", CHANGED)
def test_each_change_is_named(tmp_path, caplog, name):
    make, says = CHANGED[name]
    (line,) = resumed(tmp_path, make(), caplog)
    assert line.startswith("the run goes on from step 1 with another plan: ")
    assert says in line


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp", "hsdp(1)"])
def test_another_layout_is_no_change(tmp_path, caplog, strategy):
    assert resumed(tmp_path, program(strategy=strategy), caplog) == []


def test_what_is_gone_and_what_differs():
    step = fa.clip_norm(fa.accumulate(loss_fn, 2), 1.0)
    before, now = (
        str(fa.train_step(each, model=fa.distribute(Net, "local"), optimizer=optimizer).plan)
        for each, optimizer in ((step, fa.sgd(0.1)), (fa.with_ema(loss_fn, 0.9), fa.adamw(0.1)))
    )
    changes = changes_of(before, now)
    assert [change.partition(" ")[0] for change in changes] == [
        "accumulate",
        "clip_norm",
        "sgd",
        "adamw",
        "with_ema",
    ]
    assert changes[1] == "clip_norm (max_norm=1.0) is gone"
    assert changes_of(before, before) == []


def test_a_snapshot_and_a_part_say_nothing(tmp_path, caplog):
    first = program()
    state, _ = first(first.init(), batch_of(4))
    fa.save(tmp_path, state)
    other = program(fa.clip_norm(loss_fn, 0.5))
    fa.restore(tmp_path, like=fa.snapshot(other.init()))
    fa.restore(tmp_path, like=other.live_state, only="params")
    assert lines(caplog) == []


def test_a_state_that_two_transforms_shared_goes_to_both(tmp_path):
    def add(grads, own, info):
        return grads, own + 1

    def counted(**options):
        return fa.Transform(
            "count", fa.Phase.GRADS, apply=add, init=lambda params: torch.zeros(()), **options
        )

    first = program(counted()(loss_fn))
    state, _ = first(first.init(), batch_of(4))
    fa.save(tmp_path, state)
    twice = counted(repeatable=True)
    train_step = program(twice(twice(loss_fn)))
    with pytest.warns(UserWarning, match=r"one state for count, which was applied several times: count\.1"):
        state = fa.resume_or_init(tmp_path, train_step)
    assert state.transforms == {"count": torch.ones(()), "count.1": torch.ones(())}
    state, _ = train_step(state, batch_of(4))
    assert attrs.asdict(state, recurse=False)["transforms"]["count.1"] == 2


def rows(n=12):
    x, y = batch_of(n)
    return TensorDataset(x, y)


def loader(n=12, batch_size=4, shuffle=True):
    return DataLoader(rows(n), batch_size=batch_size, shuffle=shuffle)


def begun(folder, shards):
    """A checkpoint in the middle of an epoch."""
    train_step = program()
    for state, _ in fa.scan(train_step, train_step.init(), shards, save=folder):
        if state.step == 2:
            break
    assert 0 < state.data.samples < 12


def goes_on(folder, shards):
    train_step = program()
    return [state.data for state, _ in fa.scan(train_step, fa.resume_or_init(folder, train_step), shards)]


MEANS_OTHER_SAMPLES = {
    "a longer data set, shuffled": (lambda: fa.shard(loader(16)), "samples was 12 and is 16"),
    "another seed": (lambda: fa.shard(loader(), seed=1), "seed was 0 and is 1"),
    "no order any more": (lambda: fa.shard(loader(shuffle=False)), "shuffled was True and is False"),
}


@pytest.mark.parametrize("name", MEANS_OTHER_SAMPLES)
def test_a_position_that_means_other_samples_raises(tmp_path, caplog, name):
    """Some samples came twice in this epoch, and others not at all, without a word."""
    make, says = MEANS_OTHER_SAMPLES[name]
    begun(tmp_path, fa.shard(loader()))
    with pytest.raises(
        fa.errors.LoaderError, match=rf"{says}[\s\S]*fa.state.Position\(1\)[\s\S]*accept_changes"
    ):
        goes_on(tmp_path, make())
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        assert goes_on(tmp_path, attrs.evolve(make(), accept_changes=True))
    assert any(says in record.getMessage() for record in caplog.records)


class Counted(Sampler):
    """Its order depends on how often it was iterated, which nothing can put back."""

    def __init__(self):
        self.times = 0

    def __iter__(self):
        self.times += 1
        return iter(range(11, -1, -1) if self.times % 2 else range(12))


class Fours(BatchSampler):
    """A batch sampler that is not torch's own."""


@pytest.mark.parametrize("grouped", [False, True])
def test_a_sampler_in_the_order_of_another_epoch_raises(tmp_path, grouped):
    def shards():
        batching = {"batch_sampler": Fours(Counted(), 4, drop_last=False)} if grouped else {}
        options = batching or {"batch_size": 4, "sampler": Counted()}
        return fa.shard(DataLoader(rows(), **options))

    train_step = program()
    for state, _ in fa.scan(train_step, train_step.init(), shards(), steps=4, save=tmp_path):
        pass
    assert state.data == fa.state.Position(1, 4)
    with pytest.raises(fa.errors.LoaderError, match=r"order was \w{8} and is \w{8}[\s\S]*attributes"):
        goes_on(tmp_path, shards())
    assert goes_on(tmp_path, attrs.evolve(shards(), accept_changes=True))


def test_another_batch_size_is_one_line(tmp_path, caplog):
    begun(tmp_path, fa.shard(loader()))
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        assert len(goes_on(tmp_path, fa.shard(loader(batch_size=2)))) == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the data is not that of the checkpoint: batch_size was 4 and is 2"


def test_rows_that_are_appended_are_one_line(tmp_path, caplog):
    begun(tmp_path, fa.shard(loader(shuffle=False)))
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        assert len(goes_on(tmp_path, fa.shard(loader(16, shuffle=False)))) == 2
    assert ["samples was 12 and is 16" in record.getMessage() for record in caplog.records] == [True]


def test_batches_of_parts_keep_their_size(tmp_path):
    """Parts of unequal length: which rows of a part were read follows from the size of its batches."""
    begun(tmp_path, fa.shard(loader(shuffle=False), presplit=True))
    with pytest.raises(fa.errors.LoaderError, match="batch_size was 4 and is 2"):
        goes_on(tmp_path, fa.shard(loader(batch_size=2, shuffle=False), presplit=True))


def test_nothing_is_said_of_the_same_data_or_at_the_end_of_an_epoch(tmp_path, caplog):
    shards = fa.shard(loader())
    begun(tmp_path / "middle", shards)
    train_step = program()
    for _ in fa.scan(train_step, train_step.init(), shards, save=tmp_path / "end"):
        pass
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        goes_on(tmp_path / "middle", fa.shard(loader()))
        goes_on(tmp_path / "end", fa.shard(loader(16), seed=3))
    assert not caplog.records


def test_an_evaluation_in_between_changes_no_facts(tmp_path):
    train_step = program()
    for state, _ in fa.scan(train_step, train_step.init(), fa.shard(loader()), save=tmp_path):
        fa.evaluate(train_step, state, loss_fn, fa.shard(loader(8, shuffle=False)))
        if state.step == 2:
            break
    assert goes_on(tmp_path, fa.shard(loader()))
