"""Reports of logs that are long, hostile or damaged: read by line, thinned, and named if they are left out."""

from __future__ import annotations

import json
import logging
import math
import random
import tracemalloc

import pytest

from fnaccel.cli.main import main
from fnaccel.errors import ArgumentError
from fnaccel.seeing import runs as runs_of
from fnaccel.seeing.runs import find_runs, read_run

GOOD = '{"time": 1.0, "config": {"lr": 0.1}}\n{"step": 1, "time": 2.0, "loss": 1.0}\n{"step": 2, "time": 3.0, "loss": 0.5}\n'


def long_log(path, steps, restarts=()):
    """Write a log, and return the rows that count."""
    drawn, rows, step = random.Random(0), [], 0
    with path.open("w") as file:
        file.write('{"time": 0.0, "config": {"lr": 0.1}}\n')
        for line in range(steps):
            if line in restarts:
                step -= 150
                file.write('{"time": 0.0, "config": {"lr": 0.1}}\n')
                rows = [row for row in rows if row[0] <= step]
            step += 1
            value = math.inf if step == 777 else drawn.random()
            rows.append((step, value))
            shown = "Infinity" if math.isinf(value) else value
            file.write(json.dumps({"step": step, "time": line / 10, "loss": shown}) + "\n")
    return rows


def test_a_long_log_keeps_its_smallest_its_largest_and_its_last_values(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_of, "_MOST", 200)
    rows = long_log(tmp_path / "a.jsonl", 5_000, restarts=(2_000, 4_900))
    run = read_run(tmp_path / "a.jsonl")
    points = run.columns["loss"]
    assert 20 < len(points) <= 200
    assert set(points) <= set(rows)
    assert points == sorted(points)
    finite = [(value, step) for step, value in rows if math.isfinite(value)]
    assert min(finite) == min((value, step) for step, value in points if math.isfinite(value))
    assert max(finite) == max((value, step) for step, value in points if math.isfinite(value))
    assert (777, math.inf) in points
    assert points[-1] == rows[-1]
    assert run.steps == rows[-1][0]
    assert run.restarts == (1_851, 4_601)


def test_a_log_of_ordinary_length_is_kept_whole(tmp_path):
    rows = long_log(tmp_path / "a.jsonl", 3_000)
    run = read_run(tmp_path / "a.jsonl")
    assert run.columns["loss"] == rows
    assert len(run.columns["steps_per_second"]) == 2_999
    assert run.seconds == pytest.approx(299.9)


def test_memory_does_not_grow_with_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_of, "_MOST", 500)
    peaks = []
    for steps in (2_000, 20_000):
        long_log(tmp_path / "a.jsonl", steps)
        tracemalloc.start()
        read_run(tmp_path / "a.jsonl")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


LINES = [
    '{"config": 3, "time": 1}', '{"config": [1], "time": 1}', '{"config": {"a": "\\ud800"}, "time": 1}',
    '{"config": {"a": ' + "[" * 200 + "]" * 200 + "}}", '{"step": "NaN", "time": 1.0}', '{"step": NaN, "time": 1}',
    '{"step": 1, "time": Infinity}', '{"step": 1e400, "time": 1}', '{"step": 3, "time": "Infinity"}',
    '{"step": true, "time": 1}', '{"step": ' + "9" * 4_000 + ', "time": 1}', '{"step": 3, "time": ' + "9" * 400 + "}",
    '{"step": 3, "time": 4.0, "\\ud800": 1}', '{"step": 3, "time": 4.0, "loss": ' + "9" * 4_000 + "}",
    '{"step": 3, "time": 4.0, "loss": ' + "9" * 5_000 + "}", '{"step": 3, "time": 4.0, "loss": {"a": [1]}}',
    "[" * 100_000, "3", "null", '"text"', "\x00", "x" * 100_000, '{"step": 3}', '{"time": 3}', "{}",
    '{"step": 3, "time": 4.0, "step": 5}', '{"step": -1, "time": 4.0, "loss": 1}',
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{len(line)} {line[:60]!a}")
def test_hostile_lines_are_a_page_or_an_error_of_three_lines(tmp_path, capsys, line):
    for text in (GOOD + line + "\n", GOOD + line + "\n" + GOOD, line + "\n" + GOOD):
        (tmp_path / "a.jsonl").write_text(text)
        code = main(["report", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "a.html")])
        said = capsys.readouterr().err
        assert code == 0 or (code == 2 and "where:" in said), said


def test_many_names_of_metrics_do_not_fill_the_memory(tmp_path):
    lines = (json.dumps({"step": step, "time": step, f"m{step}": 1.0}) for step in range(1, 1_500))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert len(read_run(tmp_path / "a.jsonl").columns) == 1_000


def test_a_line_without_an_end_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("fnaccel.track.jsonl._LONGEST", 1_000)
    (tmp_path / "a.jsonl").write_text(GOOD + "x" * 10_000 + "\n" + GOOD.splitlines()[0] + "\n")
    assert read_run(tmp_path / "a.jsonl").steps == 2, "a torn line before a restart"


def test_a_bad_log_of_a_folder_is_named_and_left_out(tmp_path, caplog):
    import os

    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "metrics.jsonl").write_text(GOOD)
    (tmp_path / "bad.jsonl").write_text(GOOD + "broken\n" + GOOD.splitlines()[1] + "\n")
    (tmp_path / "data.jsonl").write_text('{"text": "a data set"}\n')
    os.mkfifo(tmp_path / "pipe.jsonl")
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        assert [run.name for run in find_runs([tmp_path])] == ["good/metrics"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"{tmp_path / 'bad.jsonl'} is left out: line 4 is no record"
    with pytest.raises(ArgumentError, match="line 4 is no record"):
        find_runs([tmp_path / "bad.jsonl"])
    (tmp_path / "good" / "metrics.jsonl").unlink()
    with pytest.raises(ArgumentError, match="line 4 is no record"):
        find_runs([tmp_path])
