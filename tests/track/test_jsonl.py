"""JSON lines: strict, appended, whole after a crash."""

from __future__ import annotations

import json
import math

import pytest

from fnaccel.errors import ArgumentError
from fnaccel.track import JsonlTracker, read_jsonl
from fnaccel.track.tracker import Tracker


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def write(path, steps, **config):
    tracker = JsonlTracker(path)
    tracker.start(config)
    for step, metrics in steps:
        tracker.log(step, metrics)
    tracker.finish()


def test_it_is_a_tracker(tmp_path):
    assert isinstance(JsonlTracker(tmp_path / "x"), Tracker)


def test_a_line_for_the_config_and_one_for_each_step(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    write(path, [(1, {"loss": 0.5}), (2, {"loss": 0.25})], lr=0.1)
    first, *rest = read_jsonl(path)
    assert first["config"] == {"lr": 0.1}
    assert [(r["step"], r["loss"]) for r in rest] == [(1, 0.5), (2, 0.25)]
    assert first["time"] <= rest[0]["time"] <= rest[1]["time"]


def test_lines_are_readable_while_the_run_goes_on(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    tracker.start({})
    tracker.log(1, {"loss": 1.0})
    assert read_jsonl(tmp_path / "run")[-1]["loss"] == 1.0
    tracker.finish()


def test_a_second_run_is_appended(tmp_path):
    path = tmp_path / "run"
    write(path, [(1, {"loss": 1.0})])
    write(path, [(2, {"loss": 2.0})])
    assert ["config" in r or r["step"] for r in read_jsonl(path)] == [True, 1, True, 2]


def test_two_writers_never_mix_within_a_line(tmp_path):
    one, two = (JsonlTracker(tmp_path / "run") for _ in range(2))
    one.start({"who": 1})
    two.start({"who": 2})
    for step in range(3):
        one.log(step, {"x": 1})
        two.log(step, {"x": 2})
    one.finish()
    two.finish()
    assert [r["x"] for r in read_jsonl(tmp_path / "run")[2:]] == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("keep", [1, 20])
def test_a_torn_last_line_is_left_out_and_the_next_run_begins_a_new_one(tmp_path, keep):
    path = tmp_path / "run"
    write(path, [(1, {"loss": 1.0}), (2, {"loss": 2.0})])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:keep])
    assert [r.get("step") for r in read_jsonl(path)] == [None, 1]
    write(path, [(3, {"loss": 3.0})])
    assert [r.get("step") for r in read_jsonl(path)] == [None, 1, None, 3]


def test_a_line_that_no_crash_explains_is_an_error(tmp_path):
    path = tmp_path / "run"
    write(path, [(1, {"loss": 1.0}), (2, {"loss": 2.0})])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{oops\n" + lines[2])
    with pytest.raises(ArgumentError, match="line 2 is no record"):
        read_jsonl(path)


def test_what_is_not_finite_is_strict_json_and_comes_back(tmp_path):
    path = tmp_path / "run"
    write(path, [(1, {"a": math.nan, "b": math.inf, "c": -math.inf})], bound=math.inf, word="NaN")
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    config, record = read_jsonl(path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)
    assert config["config"] == {"bound": "Infinity", "word": "NaN"}


def test_a_config_may_hold_anything(tmp_path):
    write(tmp_path / "run", [], folder=tmp_path, nested={"x": (1, {2})})
    assert read_jsonl(tmp_path / "run")[0]["config"] == {"folder": str(tmp_path), "nested": {"x": [1, "{2}"]}}


@pytest.mark.parametrize("name", ["step", "time", "config"])
def test_names_of_columns_are_taken(tmp_path, name):
    tracker = JsonlTracker(tmp_path / "run")
    tracker.start({})
    with pytest.raises(ArgumentError, match=f"called '{name}'"):
        tracker.log(1, {name: 1.0})
    tracker.finish()


def test_it_must_be_started(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    with pytest.raises(ArgumentError, match="not started"):
        tracker.log(1, {"loss": 1.0})
    tracker.finish()
    assert not (tmp_path / "run").exists()
