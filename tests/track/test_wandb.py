"""Weights & Biases for real, offline: what was logged is read back from the file that it wrote."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from fnaccel.errors import ArgumentError, MissingBackendError, install_line
from fnaccel.track import WandbTracker
from fnaccel.track.tracker import Tracker
from tests.track.read_back import wandb_named, wandb_records


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    wandb.teardown()  # it keeps the first settings that it read, and a service process
    yield tmp_path
    wandb.teardown()


def read_back(folder):
    """(the config, the steps' metrics) of the one offline run in a folder."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # `finish` can return before the service process has written its last block out
    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    config, history, run = {}, [], None
    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            config |= wandb_named(run.config.update)
        elif kind == "config":
            config |= wandb_named(record.config.update)
        elif kind == "history":
            history.append(wandb_named(record.history.item))
    return run, config, history


def test_it_is_a_tracker():
    assert isinstance(WandbTracker(), Tracker)


@pytest.mark.long
def test_a_run_is_written(offline):
    tracker = WandbTracker(project="parity", run_name="first", tags=["t"])
    tracker.start({"lr": 0.1, "plan": "as it runs"})
    tracker.log(3, {"loss": 0.5})
    tracker.log(4, {"loss": 0.25, "grad_norm": 2.0})
    tracker.finish()
    run, config, history = read_back(offline)
    assert (run.project, run.display_name, list(run.tags)) == ("parity", "first", ["t"])
    assert (config["lr"], config["plan"]) == (0.1, "as it runs")
    assert [(h["_step"], h["loss"], h.get("grad_norm")) for h in history] == [(3, 0.5, None), (4, 0.25, 2.0)]


@pytest.mark.long
def test_a_run_of_the_script_is_used_and_left_running(offline):
    import wandb

    with wandb.init(project="own", config={"lr": 1.0}) as run:
        tracker = WandbTracker()
        tracker.start({"lr": 2.0})
        tracker.log(1, {"loss": 0.5})
        tracker.finish()
        assert wandb.run is run
        run.log({"after": 1.0}, step=2)
    _, config, history = read_back(offline)
    assert config["lr"] == 2.0, config
    assert [(h["_step"], h.get("loss"), h.get("after")) for h in history] == [(1, 0.5, None), (2, None, 1.0)]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingBackendError, match=re.escape(install_line("wandb"))) as raised:
        WandbTracker().start({})
    assert "WandbTracker.start" in raised.value.where


def test_it_must_be_started():
    with pytest.raises(ArgumentError, match="not started"):
        WandbTracker().log(1, {"loss": 1.0})


def test_importing_trackers_imports_no_wandb():
    code = "import fnaccel.track, sys; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
