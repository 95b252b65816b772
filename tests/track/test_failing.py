"""Trackers that fail: training and the other trackers go on, and the errors are counted."""

from __future__ import annotations

import json
import logging
import sys

import pytest

import fnaccel as fa
from fnaccel.track import JsonlTracker, TensorBoardTracker, WandbTracker, read_jsonl
from tests.tiny_models import batch_of, program
from tests.track import full_disk


class Failing:
    """A tracker that raises in one of its methods."""

    def __init__(self, method):
        self.method = method

    def start(self, config):
        self._call("start")

    def log(self, step, metrics):
        self._call("log")

    def finish(self):
        self._call("finish")

    def log_images(self, step, name, images):
        self._call("log_images")

    def log_figure(self, step, name, figure):
        self._call("log_figure")

    def log_table(self, step, name, columns, rows):
        self._call("log_table")

    def _call(self, method):
        if method == self.method:
            raise ConnectionError(f"no route in {method}")


def shards():
    from torch.utils.data import DataLoader, TensorDataset

    return fa.shard(DataLoader(TensorDataset(*batch_of(12)), batch_size=4))


def train(trackers, caplog, level=logging.ERROR, **options):
    """The steps of a training with these trackers, and the lines that were logged as errors."""
    with fa.start(device="cpu"), caplog.at_level(level, logger="fnaccel"):
        train_step = program()
        states = fa.scan(train_step, train_step.init(), shards(), track=trackers, **options)
        steps = [state.step for state, _ in states]
    return steps, [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("method", "count"), [("log", 3), ("finish", 1)])
def test_errors_are_logged_once_and_counted(tmp_path, caplog, method, count):
    good = JsonlTracker(tmp_path / "good.jsonl")
    steps, lines = train([Failing(method), good], caplog)
    assert steps == [record["step"] for record in read_jsonl(good.path)[1:]] == [1, 2, 3]
    assert lines == [
        f"Failing.{method}() raised; training goes on",
        f"Failing raised {count} times; training went on",
    ]


def test_an_error_in_start_is_raised_before_training(tmp_path, caplog):
    good = JsonlTracker(tmp_path / "good.jsonl")
    with pytest.raises(ConnectionError, match="no route in start"):
        train([good, Failing("start")], caplog)
    assert len(read_jsonl(good.path)) == 1
    with pytest.raises(fa.errors.ArgumentError, match="not started"):
        good.log(1, {})


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [
        (WandbTracker(mode="offline"), "wandb", "wandb"),
        (TensorBoardTracker("unused"), "torch.utils.tensorboard", "tensorboard"),
        (fa.track.AimTracker(), "aim", "aim"),
        (fa.track.ClearMLTracker(), "clearml", "clearml"),
        (fa.track.CometTracker(), "comet_ml", "comet"),
        (fa.track.DVCLiveTracker(), "dvclive", "dvclive"),
        (fa.track.MLflowTracker(), "mlflow", "mlflow"),
        (fa.track.SwanLabTracker(), "swanlab", "swanlab"),
        (fa.track.TrackioTracker(), "trackio", "trackio"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_package_leaves_its_tracker_out(tmp_path, caplog, monkeypatch, tracker, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    good = JsonlTracker(tmp_path / "good.jsonl")
    steps, lines = train([tracker, good], caplog)
    assert steps == [record["step"] for record in read_jsonl(good.path)[1:]] == [1, 2, 3]
    name = type(tracker).__name__
    assert lines[0].startswith(f"{name} is left out: ")
    assert fa.errors.install_line(extra) in lines[0]
    assert lines[1:] == [f"{name} raised 1 times; training went on"]
    assert tracker.native is None
    with pytest.raises(fa.errors.ArgumentError, match="not started"):
        tracker.log(1, {"loss": 1.0})
    tracker.finish()


@pytest.mark.parametrize("method", ["log_images", "log_figure", "log_table"])
def test_an_error_of_an_ability_is_counted_too(tmp_path, method):
    arguments = {"log_images": ([],), "log_figure": (None,), "log_table": ([], [])}[method]
    with fa.start(device="cpu"), fa.tracked(Failing(method)) as run:
        getattr(run, method)(1, "x", *arguments)
        getattr(run, method)(2, "x", *arguments)
        assert run.failures == {"Failing": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "options", "raises"),
    [
        ("jsonl", "64k", {}, True),
        ("tensorboard", "64k", {}, True),
        ("wandb", "512k", {"mode": "offline"}, False),  # its service process logs the error
    ],
)
def test_a_full_disk_does_not_end_training(tmp_path, name, size, options, raises):
    failures, printed = full_disk.start(name, tmp_path, size, **options)
    assert sum(failures.values()) > 100 if raises else failures == {}
    assert ("No space left on device" in printed or "bytes of a line" in printed) == raises


def test_a_line_that_the_disk_did_not_take_is_not_left_in_part(tmp_path, monkeypatch):
    import os

    write, tracker = os.write, JsonlTracker(tmp_path / "run")
    tracker.start({})
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(OSError, match="5 of"):
            tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": 2.0})
    tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "run").read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 2]


@pytest.mark.parametrize(
    ("track", "name", "file"),
    [
        (lambda folder: JsonlTracker(folder / "run.jsonl"), "JsonlTracker", "run.jsonl"),
        (lambda folder: fa.Tracking(report=folder / "run.html"), "ReportTracker", "run.jsonl"),
        (lambda folder: TensorBoardTracker(folder / "run"), "TensorBoardTracker", "run"),
    ],
    ids=["jsonl", "report", "tensorboard"],
)
def test_a_disk_that_is_full_at_the_start_is_named(tmp_path, caplog, monkeypatch, track, name, file):
    import os

    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventFileWriter, "flush", full)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(fa.errors.ArgumentError) as caught:
        train(track(tmp_path), caplog)
    assert caught.value.what == f"{name} can't write {tmp_path / file}: No space left on device"
    assert "free space" in caught.value.fix
