"""`scan` and its counts, bar and trackers, on one process."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.loop import scanning
from fnaccel.world.world import current
from tests.tiny_models import batch_of, program


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


def shards(n=10, batch=4, **options):
    return fa.shard(DataLoader(TensorDataset(*batch_of(n)), batch_size=batch), **options)


def positions(train_step, state, data, **options):
    found = []
    for state, _ in fa.scan(train_step, state, data, **options):
        found.append((state.step, state.data.epoch, state.data.samples))
    return state, found


def test_the_rest_of_the_epoch_by_default():
    train_step = program()
    _state, found = positions(train_step, train_step.init(), shards())
    assert found == [(1, 0, 4), (2, 0, 8), (3, 1, 0)]


def test_steps_count_from_the_beginning_of_the_run():
    train_step = program()
    state, found = positions(train_step, train_step.init(), shards(), steps=5)
    assert found == [(1, 0, 4), (2, 0, 8), (3, 1, 0), (4, 1, 4), (5, 1, 8)]
    state, found = positions(train_step, state, shards(), steps=7)
    assert found == [(6, 2, 0), (7, 2, 4)]
    _, found = positions(train_step, state, shards(), steps=7)
    assert found == []


def test_epochs_too():
    train_step = program()
    state, found = positions(train_step, train_step.init(), shards(), epochs=2)
    assert (len(found), found[-1]) == (6, (6, 2, 0))
    _, found = positions(train_step, state, shards(), epochs=2)
    assert found == []


def test_a_run_in_two_halves_sees_what_one_run_sees():
    data = fa.shard(DataLoader(TensorDataset(*batch_of(11)), batch_size=4, shuffle=True), seed=4)
    train_step = program()
    state, _ = positions(train_step, train_step.init(), data, steps=7)
    other = program()
    half, _ = positions(other, other.init(), data, steps=2)
    half, _ = positions(other, half, data, steps=7)
    assert fa.tree.allclose(fa.snapshot(state), fa.snapshot(half), rtol=0, atol=0)


def test_windows_are_one_update_each():
    train_step = program()
    _, found = positions(train_step, train_step.init(), shards(window=2))
    assert found == [(1, 0, 8), (2, 1, 0)]


def test_the_bar_shows_steps_and_loss(capsys):
    train_step = program()
    positions(train_step, train_step.init(), shards(), steps=4, progress=True)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "loss=" in shown


class Recorder:
    def __init__(self):
        self.seen = []

    def start(self, config):
        self.seen.append(("start", sorted(config)))

    def log(self, step, metrics):
        self.seen.append((step, sorted(metrics)))

    def finish(self):
        self.seen.append("finish")


def test_trackers_see_each_step_and_the_end_also_when_the_loop_breaks():
    train_step, recorder = program(fa.clip_norm(program_loss, 1.0)), Recorder()
    for state, _ in fa.scan(
        train_step, train_step.init(), shards(), track=fa.Tracking(recorder, config={"a": 1})
    ):
        if state.step == 2:
            break
    del state
    import gc

    gc.collect()
    names = ["grad_norm", "loss", "lr", "weight"]
    assert recorder.seen == [("start", ["a", "environment", "plan"]), (1, names), (2, names), "finish"]


def program_loss(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def test_what_scan_refuses():
    train_step = program()
    state = train_step.init()
    with pytest.raises(errors.ArgumentError, match="says nothing of how ranks share it"):
        fa.scan(train_step, state, DataLoader([1]))
    with pytest.raises(errors.LoaderError):
        list(fa.scan(train_step, state, fa.shard(iter([]))))
    with pytest.raises(errors.ArgumentError, match="every is 1 or more"):
        fa.Tracking(every=0)
    with pytest.raises(errors.ArgumentError, match="no averaged parameters"):
        fa.evaluate(train_step, state, lambda m, b: torch.ones(()), shards(), ema=True)


def test_states_are_saved_as_it_goes_and_at_the_end(tmp_path):
    train_step = program()
    recipe = fa.config.Recipe(checkpoint=fa.config.CheckpointRecipe(directory=str(tmp_path), every=2))
    positions(train_step, train_step.init(), shards(), steps=5, **fa.config.scan_options(recipe))
    assert [one.step for one in fa.checkpoint.checkpoints(tmp_path)] == [2, 4, 5]
    state = fa.restore(tmp_path, like=train_step.init(seed=1), step=4)
    _, found = positions(train_step, state, shards(), steps=5)
    assert found == [(5, 1, 8)]
    for wrong in {"every": 0}, {"keep": 0}, {"keep_every": 3}:
        with pytest.raises(errors.ArgumentError, match=r"where: fa\.Autosave"):
            fa.Autosave(tmp_path, **wrong)


def test_only_what_is_to_be_kept_stays_also_in_the_background(tmp_path):
    for background in (False, True):
        root = tmp_path / str(background)
        plan = fa.config.CheckpointRecipe(
            directory=str(root), every=1, keep=2, keep_every=3, background=background
        )
        train_step = program()
        options = fa.config.scan_options(fa.config.Recipe(checkpoint=plan))
        positions(train_step, train_step.init(), shards(), steps=7, **options)
        assert [one.step for one in fa.checkpoint.checkpoints(root)] == [3, 6, 7]


def test_what_is_saved_in_the_background_is_there_however_the_loop_ends(tmp_path):
    train_step = program()

    def loop(name, end):
        save = fa.Autosave(tmp_path / name, every=2, background=True)
        for state, _ in fa.scan(train_step, train_step.init(), shards(), steps=6, save=save):
            if state.step == 5:
                end()

    with pytest.warns(UserWarning, match="step 5 is not saved"), pytest.raises(ZeroDivisionError):
        loop("error", lambda: 1 / 0)
    save = fa.Autosave(tmp_path / "closed", every=1, background=True)
    held = fa.scan(train_step, train_step.init(), shards(), save=save)
    next(held)
    next(held)
    held.close()
    assert [one.step for one in fa.checkpoint.checkpoints(tmp_path / "error")] == [2, 4]
    assert [one.step for one in fa.checkpoint.checkpoints(tmp_path / "closed")] == [1, 2]


def test_a_save_that_failed_in_the_background_is_told(tmp_path, monkeypatch):
    from fnaccel.checkpoint.disk import publish as commit

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "commit", refuse)
    train_step = program()
    save = fa.Autosave(tmp_path, every=2, background=True)
    with pytest.raises(errors.CheckpointError, match="No space left"):
        positions(train_step, train_step.init(), shards(), steps=3, save=save)


def test_a_run_stops_when_its_time_is_over(monkeypatch, tmp_path):
    clock = iter(range(100))
    monkeypatch.setattr(scanning.time, "monotonic", lambda: next(clock))
    train_step = program()
    state = train_step.init()
    for state, _ in fa.scan(train_step, state, shards(), steps=50, max_seconds=3, save=tmp_path):
        pass
    assert state.step == 3
    assert fa.checkpoint.latest(tmp_path).name.endswith("3")
    with pytest.raises(errors.ArgumentError, match="max_seconds"):
        fa.scan(train_step, state, shards(), max_seconds=0)


def out_of_time_on_one_rank(rank):
    """The steps of a run in which the clock of one rank is far ahead."""
    train_step = program(strategy="ddp")
    state = train_step.init()
    ahead = 1e9 if current().rank == rank else 0.0
    begun = time.monotonic()
    with mock.patch.object(
        scanning.time, "monotonic", side_effect=lambda: begun + (ahead if state.step else 0.0)
    ):
        for state, _ in fa.scan(train_step, state, shards(), steps=50, max_seconds=1e6):
            pass
    return state.step


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_stop_together(pools, rank):
    steps = pools.run(2, out_of_time_on_one_rank, rank)
    assert steps[0] == steps[1] < 5


def test_progress_over_any_iterable(capsys):
    assert list(fa.progress(range(3), unit="row")) == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err
    assert list(fa.progress(iter("ab"))) == ["a", "b"]


def rows_with_bar():
    return list(fa.progress(range(2)))


def test_every_rank_reads_what_the_main_one_shows(pools):
    assert pools.run(2, rows_with_bar) == [[0, 1]] * 2


@pytest.mark.parametrize(
    "gone",
    [
        "directory",
        "save_every",
        "keep",
        "keep_every",
        "each_machine",
        "background",
        "signals",
        "trackers",
        "log_every",
        "config",
        "report",
        "profile",
        "throughput",
        "memory",
    ],
)
def test_an_argument_that_scan_no_longer_takes_says_where_it_went(gone):
    train_step = program()
    with pytest.raises(errors.ArgumentError, match=f"there is no argument {gone}= any more") as raised:
        fa.scan(train_step, train_step.init(), shards(), **{gone: 1})
    assert eval(raised.value.fix.split(", or ")[0].split("=", 1)[1]), "the fix can be written as it stands"


def test_tracked_takes_the_record_of_scan(tmp_path):
    track = fa.Tracking("jsonl", config={"lr": 1}, directory=tmp_path, report=tmp_path / "run.html")
    with fa.start(device="cpu"), fa.tracked(track) as run:
        run.log(3, {"loss": 1.0})
    assert "Loss" in (tmp_path / "run.html").read_text()
    first, second = fa.track.read_jsonl(tmp_path / "logs" / "metrics.jsonl")
    assert (first["config"], second["step"]) == ({"lr": 1}, 3)
    with fa.start(device="cpu"):
        for wrong in (
            lambda: fa.tracked(fa.Tracking("jsonl", every=2)),
            lambda: fa.tracked("jsonl", config={}),
        ):
            with pytest.raises(errors.ArgumentError, match=r"where: fa\.tracked"), wrong():
                pass
