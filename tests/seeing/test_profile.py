"""Traces of real runs, read back: phases on every rank, and shares of time that add up."""

from __future__ import annotations

import gzip
import json
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fnaccel as fa
from fnaccel.cli import trace
from fnaccel.errors import ArgumentError, UnknownNameError
from fnaccel.seeing.timeline import summarize
from fnaccel.world.progress_marks import NOW, listening
from tests.tiny_models import batch_of, program


class Slow(Dataset):
    """Rows that take time: more on rank 1."""

    def __init__(self, rows, milliseconds):
        self.rows = batch_of(rows)
        self.seconds = milliseconds / 1e3

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, row):
        time.sleep(self.seconds)
        return self.rows[0][row], self.rows[1][row]


def _events(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def _train(directory, rows=48, milliseconds=0.0, strategy="local", **options):
    train_step = program(strategy=strategy)
    profile = fa.profile(directory, **options)
    shards = fa.shard(DataLoader(Slow(rows, milliseconds), batch_size=4))
    for _ in fa.scan(train_step, train_step.init(), shards, watch=fa.Watch(profile=profile)):
        pass
    train_step.close()
    return profile


def test_a_trace_holds_the_phases_of_the_active_steps(tmp_path):
    profile = _train(tmp_path, skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    assert [path.name for path in profile.files] == ["rank0.5.pt.trace.json.gz", "rank0.9.pt.trace.json.gz"]
    for path in profile.files:
        names = [event["name"] for event in _events(path) if event.get("ph") == "X"]
        for phase in ("data", "forward", "backward", "gradients", "update"):
            assert names.count(f"fnaccel.{phase}") == 2, phase
        assert sum(name.startswith("ProfilerStep#") for name in names) == 2


def test_a_context_around_a_loop_of_ones_own(tmp_path):
    with fa.profile(tmp_path, wait=0, warmup=1, active=2) as profile:
        for _ in range(4):
            torch.ones(3) + 1
            profile.step()
    (summary,) = summarize(tmp_path)
    assert summary.steps == 2
    assert summary.communication == 0


def test_the_callback_takes_the_place_of_the_file(tmp_path):
    seen = []
    profile = _train(tmp_path, active=1, on_trace_ready=lambda it: seen.append(len(it.events())))
    assert len(seen) == profile.recorded == 1
    assert seen[0] > 0
    assert list(tmp_path.iterdir()) == []


def test_shapes_stacks_and_memory_are_recorded_if_asked_for(tmp_path):
    _train(tmp_path, active=1, shapes=True, memory=True, stacks=True, flops=True, activities="cpu")
    (path,) = tmp_path.iterdir()
    events = _events(path)
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event["name"] == "[memory]" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)


def test_shares_add_up_and_agree_with_the_clock(tmp_path):
    """Steps of 40 ms: the wall time of the summary is that of a clock beside it, to 5 %."""
    before, after = [], []  # at the ends of steps, before and after the profile begins or writes a recording

    def noting(ends):
        newest = [NOW.step]

        def note(mark):
            if mark.phase == "outside" and mark.step != newest[0]:
                newest[0] = mark.step
                ends.append(time.perf_counter())

        return listening(note)

    train_step = program()
    shards = fa.shard(DataLoader(Slow(48, 10.0), batch_size=4))
    state = train_step.init()
    with noting(before), fa.profile(tmp_path, wait=1, warmup=1, active=4), noting(after):
        for _ in fa.scan(train_step, state, shards):
            pass
    (summary,) = summarize(tmp_path)
    clock = (before[5] - after[1]) / 4 * 1e3
    assert summary.wall == pytest.approx(clock, rel=0.05)
    assert summary.compute + summary.communication + summary.data + summary.idle == pytest.approx(
        summary.wall
    )
    assert summary.data > 39  # a loaded machine adds to the rest
    assert sum(summary.phases.values()) == pytest.approx(summary.wall, rel=0.05)


def _two(directory):
    with fa.start() as world:
        _train(directory, rows=48, milliseconds=20.0 if world.rank else 1.0, strategy="ddp", active=3)


def test_each_rank_writes_a_trace_and_the_slowest_is_named(pools, tmp_path, capsys):
    pools.run(2, _two, tmp_path)
    first, second = summarize(tmp_path)
    assert (first.rank, second.rank) == (0, 1)
    assert all(
        {"data", "forward", "backward", "gradients", "update"} <= set(rank.phases) for rank in (first, second)
    )
    assert first.communication / first.wall > 0.5
    assert second.data / second.wall > 0.5
    assert trace.run(["summarize", str(tmp_path)]) == 0
    assert "Rank 1 is the slowest" in capsys.readouterr().out
    assert trace.run(["summarize", str(tmp_path), "--json"]) == 0
    assert [rank["rank"] for rank in json.loads(capsys.readouterr().out)] == [0, 1]


def _event(cat, name, begin, end):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin}


def _shares(directory, events):
    """Compute, communication, hidden communication, data and idle, in microseconds."""
    path = directory / "rank0.4.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (found,) = summarize(directory)
    shares = (found.compute, found.communication, found.hidden, found.data, found.idle)
    return [round(1e3 * share, 6) for share in shares]


def test_a_device_hides_communication_behind_its_kernels(tmp_path):
    events = [
        _event("user_annotation", "ProfilerStep#3", 0, 100),
        _event("user_annotation", "fnaccel.data", 0, 30),
        _event("kernel", "gemm", 10, 50),
        _event("kernel", "ncclDevKernel_AllReduce", 40, 70),
        _event("cpu_op", "aten::mm", 0, 90),
    ]
    assert _shares(tmp_path, events) == [40, 20, 10, 10, 30]


def test_operators_that_prepare_a_batch_are_waiting_on_the_cpu(tmp_path):
    events = [
        _event("user_annotation", "ProfilerStep#3", 0, 100),
        _event("user_annotation", "fnaccel.data", 0, 30),
        _event("cpu_op", "aten::stack", 10, 20),
        _event("cpu_op", "aten::mm", 40, 60),
        _event("cpu_op", "c10d::allreduce_", 60, 62),
        _event("user_annotation", "gloo:all_reduce", 50, 80),
    ]
    assert _shares(tmp_path, events) == [20, 20, 10, 30, 30]


@pytest.mark.parametrize("options", [{"active": 0}, {"wait": -1}, {"repeat": -1}])
def test_bad_counts_raise(options):
    with pytest.raises(ArgumentError, match="counts of steps"):
        fa.profile("never", **options)


def test_unknown_activities_raise():
    with pytest.raises(UnknownNameError, match="cuda"):
        fa.profile("never", activities="cudaa")


def test_too_few_steps_warn(tmp_path):
    with pytest.warns(RuntimeWarning, match="recorded nothing: 2 steps ran"):
        _train(tmp_path, rows=8, wait=5)


def test_no_traces_and_torn_traces_raise(tmp_path):
    with pytest.raises(ArgumentError, match="no traces"):
        summarize(tmp_path)
    (tmp_path / "rank0.1.pt.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [')[:-4])
    with pytest.raises(ArgumentError, match="cut off"):
        summarize(tmp_path)


def test_an_error_in_the_loop_ends_the_profile(tmp_path):
    def fails(model, batch):
        raise ValueError("of the loss")

    train_step = program(fails)
    shards = fa.shard(DataLoader(Slow(8, 0.0), batch_size=4))
    with pytest.raises(ValueError, match="of the loss"):
        list(fa.scan(train_step, train_step.init(), shards, watch=fa.Watch(profile=tmp_path)))
    _train(tmp_path, active=1)  # another one can begin
    assert len(summarize(tmp_path)) == 1


def test_a_profile_inside_of_another_is_an_error_and_both_can_run_afterwards(tmp_path):
    with fa.profile(tmp_path / "a", wait=0, warmup=0, active=1) as outer:
        with pytest.raises(ArgumentError, match="another profile is running"):
            fa.profile(tmp_path / "b", wait=0).__enter__()
        outer.step()
    with torch.profiler.profile(), pytest.raises(ArgumentError, match="another profile is running"):
        fa.profile(tmp_path / "b", wait=0).__enter__()
    assert len(_train(tmp_path / "c", wait=0, warmup=0, active=1).files) == 1


def test_a_profile_that_can_not_begin_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(**options):
        raise RuntimeError("no profiler")

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler, "profile", broken)
        with pytest.raises(RuntimeError, match="no profiler"):
            fa.profile(tmp_path).__enter__()
    assert len(_train(tmp_path, wait=0, warmup=0, active=1).files) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"wait": "1"},
        {"active": 1.5},
        {"directory": True},
        {"directory": ""},
        {"activities": []},
        {"on_trace_ready": 3},
    ],
)
def test_wrong_options_of_a_profile_are_errors_before_training(wrong):
    with pytest.raises(ArgumentError, match=r"where: fa\.profile"):
        fa.profile(**{"directory": "trace", **wrong})


def test_a_step_outside_of_the_profile_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match="the profile is not running"):
        fa.profile(tmp_path).step()
