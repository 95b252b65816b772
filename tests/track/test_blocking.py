"""Trackers that block, or that end the process: training goes on, and what is lost is counted by name."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time

import pytest
import torch

import fnaccel as fa
from fnaccel.track import JsonlTracker, calls, read_jsonl
from fnaccel.track.log import Log
from tests.track.test_failing import train


class Blocking:
    """A tracker that blocks in one method until `gate` is set, and then waits so many seconds for each row."""

    def __init__(self, method="", seconds=0.0):
        self.method, self.seconds = method, seconds
        self.gate, self.entered = threading.Event(), threading.Event()
        self.said, self.threads = [], set()

    def start(self, config):
        self._enter("start", config)

    def log(self, step, metrics):
        self._enter("log", step)
        time.sleep(self.seconds)

    def finish(self):
        self._enter("finish", "finish")

    def log_images(self, step, name, *shown):
        self._enter("log_images", name)

    log_figure = log_table = log_images

    def _enter(self, method, said):
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        if method == self.method:
            assert self.gate.wait(60)
        self.said.append(said)


class Leaving:
    """A tracker that ends the process in one method."""

    def __init__(self, method):
        self.method = method

    def _leave(self, method):
        if method == self.method:
            sys.exit(3)

    def start(self, config):
        self._leave("start")

    def log(self, step, metrics):
        self._leave("log")

    def finish(self):
        self._leave("finish")


@pytest.fixture
def small(monkeypatch):
    """Small limits, for trackers that block for ever: those that are only slow would be lost on a slow machine."""
    monkeypatch.setattr(calls, "ROWS", 2)
    monkeypatch.setattr(calls, "PATIENCE", 0.05)
    monkeypatch.setattr(calls, "LIMIT", 0.2)


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_tracker_that_blocks_in_log_loses_rows_and_the_others_do_not(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(calls, "ROWS", 2)
    good, bad, other = JsonlTracker(tmp_path / "good.jsonl"), Blocking("log"), Blocking()
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        log = Log([bad, good, other], {})
        log._open[0]._patience = 0.05
        for step in range(1, 9):
            log.put(step, {"loss": 1.0})
            assert bad.entered.wait(60)
        bad.gate.set()
        log.close()
    assert [record["step"] for record in read_jsonl(good.path)[1:]] == list(range(1, 9))
    assert other.said[1:] == [*range(1, 9), "finish"]
    assert bad.said[1:] == [1, 2, 3, "finish"]
    assert lines_of(caplog) == [
        "Blocking blocks in log(), and training waited 10 s for it: what it can't take is dropped from here on, and "
        "counted at the end",
        "Blocking blocked: 5 of its rows were dropped; training went on",
    ]


def test_a_tracker_that_blocks_for_ever_is_left_at_the_end(caplog, small):
    bad = Blocking("log")
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        log = Log([bad], {})
        log.put(1, {"loss": 1.0})
        assert bad.entered.wait(60)
        log.put(2, {"loss": 1.0})
        log.put(3, {"loss": 1.0})
        log.close()
        log.close()
    assert lines_of(caplog)[:2] == [
        "Blocking did not end within 0.2 s: training goes on without it, and 2 rows of its queue are lost",
        "Blocking blocked: 2 of its rows were dropped; training went on",
    ]
    [thread] = [each for each in threading.enumerate() if each.name == "fnaccel-Blocking" and each.is_alive()]
    bad.gate.set()
    thread.join(60)
    assert bad.said[1:] == [1], "it may have been started again by then"


def test_a_tracker_that_blocks_in_finish_is_left(tmp_path, caplog, small):
    bad, good = Blocking("finish"), JsonlTracker(tmp_path / "good.jsonl")
    steps, lines = train([bad, good], caplog, logging.WARNING)
    assert steps == [record["step"] for record in read_jsonl(good.path)[1:]] == [1, 2, 3]
    assert "Blocking did not end within 0.2 s" in lines[-1]
    bad.gate.set()


@pytest.mark.long
def test_the_process_ends_though_trackers_block():
    """A process of its own: a thread that is no daemon would keep it alive."""
    code = """
import threading
from fnaccel.track import calls
from fnaccel.track.log import Log

class Quiet:
    def start(self, config): pass
    def log(self, step, metrics): pass
    def finish(self): threading.Event().wait()

class Silent(Quiet):
    def log(self, step, metrics): threading.Event().wait()

calls.LIMIT = 0.2
log = Log([Silent(), Quiet()], {})
log.put(1, {"loss": 1.0})
log.close()
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ended\n"


@pytest.mark.parametrize(("places", "rows"), [(100, 200), pytest.param(1_000, 2_000, marks=pytest.mark.long)])
def test_a_tracker_of_five_milliseconds_a_row_loses_none(monkeypatch, places, rows):
    monkeypatch.setattr(calls, "ROWS", places)
    slow = Blocking(seconds=0.005)
    log = Log([slow], {})
    for step in range(1, rows + 1):
        log.put(step, {"loss": 1.0})
    log.close()
    assert slow.said[1:] == [*range(1, rows + 1), "finish"]


def test_images_are_shown_when_the_call_returns(caplog):
    tracker = Blocking()
    with fa.start(device="cpu"), fa.tracked(tracker) as run:
        run.log(1, {"loss": torch.tensor(1.0)})
        run.log_images(1, "first", [])
        assert tracker.said[1:] == [1, "first"]
        run.log_table(2, "second", [], [])
        assert tracker.said[1:] == [1, "first", "second"]


def test_a_tracker_that_blocks_on_an_image_is_not_waited_for_again(caplog, small):
    bad = Blocking("log_images")
    caplog.set_level(logging.WARNING, logger="fnaccel")
    with fa.start(device="cpu"), fa.tracked(bad) as run:
        run.log_images(1, "first", [])
        run.log_images(2, "second", [])
        bad.gate.set()
        assert run._log._open[0]._late[1].wait(60)
        calls.LIMIT = 60.0
        run.log_images(3, "third", [])
        assert run.failures == {}
    assert bad.said[1:] == ["first", "third", "finish"]
    assert lines_of(caplog) == [
        "Blocking blocks in log_images(): training waited 0.2 s for it",
        "Blocking blocks in log_images(): what it can't take is dropped from here on, and counted at the end",
        "Blocking blocked: 1 of its rows were dropped; training went on",
    ]


@pytest.mark.parametrize(("method", "count"), [("log", 3), ("finish", 1)])
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_tracker_that_ends_the_process_is_a_tracker_that_fails(tmp_path, caplog, method, count, in_loop):
    bad, good = Leaving(method), JsonlTracker(tmp_path / "good.jsonl")
    bad.in_loop = in_loop
    steps, lines = train([bad, good], caplog)
    assert steps == [record["step"] for record in read_jsonl(good.path)[1:]] == [1, 2, 3]
    assert lines == [
        f"Leaving.{method}() raised; training goes on",
        f"Leaving raised {count} times; training went on",
    ]


def test_a_tracker_that_ends_the_process_in_start_raises(caplog):
    with pytest.raises(fa.errors.ArgumentError, match=r"Leaving.start\(\) called sys.exit\(3\)"):
        train([Leaving("start")], caplog)


def test_each_tracker_has_metrics_and_a_config_of_its_own(caplog):
    class Changing(Blocking):
        def start(self, config):
            config["model"]["width"] = 0

        def log(self, step, metrics):
            metrics["loss"] = -1.0
            metrics.pop("lr", None)
            self.said.append(metrics)

    class Reading(Changing):
        def start(self, config):
            self.said.append(json.dumps(config))

        def log(self, step, metrics):
            self.said.append(dict(metrics))

    for in_loop in (True, False):
        first, second, shown, config = Changing(), Reading(), [], {"model": {"width": 2}, "tags": ["a"]}
        first.in_loop = second.in_loop = in_loop
        log = Log([first, second], config, shown.append)
        log.put(1, {"loss": 2.0, "lr": 0.5})
        log.close()
        assert second.said == [json.dumps(config), {"loss": 2.0, "lr": 0.5}, "finish"]
        assert shown == [{"loss": 2.0, "lr": 0.5}]


def test_jsonl_writes_in_the_loop_and_others_in_threads_of_their_own(tmp_path, caplog):
    class Lines(JsonlTracker):
        def log(self, step, metrics):
            threads.append(threading.current_thread())

    threads, others = [], [Blocking(), Blocking()]
    train([Lines(tmp_path / "a.jsonl"), *others], caplog)
    assert {*threads} == {threading.current_thread()}
    assert [other.threads - {threading.current_thread().name} for other in others] == 2 * [
        {"fnaccel-Blocking"}
    ]


def test_the_thread_of_a_tracker_knows_the_world(caplog):
    class Asking(Blocking):
        def log(self, step, metrics):
            self.said.append(fa.collectives.any_process(False))

    asking = Asking()
    train(asking, caplog)
    assert asking.said[1:4] == [False, False, False]


def test_what_a_library_keeps_for_each_thread_is_released_in_the_loop(caplog):
    class PerThread(Blocking):
        def release(self):
            self.said.append(threading.current_thread())

    tracker = PerThread()
    train(tracker, caplog)
    assert tracker.said[-2:] == ["finish", threading.current_thread()]
