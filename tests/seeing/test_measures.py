"""Throughput and memory in the metrics of a step, and the account of memory that ran out."""

from __future__ import annotations

import gc
import itertools
import mmap
import pickle
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import ArgumentError
from fnaccel.seeing import throughput as seen
from fnaccel.seeing.memory import live_storages
from fnaccel.seeing.throughput import Meter, Throughput
from fnaccel.world.progress_marks import enter
from tests.tiny_models import batch_of, loss_fn, program


def _shards(rows=24, **options):
    return fa.shard(DataLoader(TensorDataset(*batch_of(rows)), batch_size=4), **options)


def _metrics(step=loss_fn, shards=None, **measured):
    train_step, watch = program(step), fa.Watch(**measured)
    return [dict(m) for _, m in fa.scan(train_step, train_step.init(), shards or _shards(), watch=watch)]


def test_a_meter_counts_over_its_window(monkeypatch):
    clock = itertools.count()  # a second for each look at it
    monkeypatch.setattr(seen.time, "perf_counter", lambda: float(next(clock)))
    with Meter(window=2) as meter:
        for _ in range(3):
            next(clock)
        assert meter.ended(8, 80) == (2.0, 20.0, 0.0)  # the first step, which compiles
        assert meter.ended(8, 80) == (8.0, 80.0, 0.0)
        enter("data")
        enter("outside")
        # two looks for the waiting, one for the end: 16 rows in 4 seconds since the first step
        assert meter.ended(8, 80) == (4.0, 40.0, 0.25)
        assert meter.ended(8, 80) == (4.0, 40.0, 0.25)


def test_throughput_joins_the_metrics():
    first, *_, last = _metrics(throughput=True)
    assert first.keys() == last.keys() >= {"rows_per_second", "data_wait"}
    assert last["rows_per_second"] > 0
    assert 0 <= last["data_wait"] <= 1
    assert {"tokens_per_second", "mfu"}.isdisjoint(last)
    assert {"rows_per_second", "peak_mib"}.isdisjoint(_metrics()[-1])


def test_garbage_is_collected_after_the_same_steps_and_not_between():
    train_step, seen, frozen = program(loss_fn), [], gc.get_freeze_count()
    watch, steps = fa.Watch(gc_every=2), []

    def noted(phase, info):
        if phase == "start" and not gc.isenabled():  # inside of the loop
            seen.append(len(steps))

    gc.callbacks.append(noted)
    try:
        for _ in fa.scan(train_step, train_step.init(), _shards(), watch=watch):
            assert not gc.isenabled()
            steps.append([[] for _ in range(10_000)])  # Python would collect
    finally:
        gc.callbacks.remove(noted)
    assert len(steps) == 6
    assert seen == [1, 3, 5]
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) == (frozen > 0)


def test_a_loop_that_is_left_lets_python_collect_again():
    train_step = program(loss_fn)
    loop = fa.scan(train_step, train_step.init(), _shards(), watch=fa.Watch(gc_every=100))
    next(loop)
    assert not gc.isenabled()
    loop.close()
    assert gc.isenabled()


def test_tokens_follow_rows_also_in_windows():
    measure = Throughput(tokens=lambda batch: 7 * len(batch[0]))
    for metrics in _metrics(throughput=measure), _metrics(shards=_shards(window=2), throughput=measure):
        for each in metrics:
            assert each["tokens_per_second"] == pytest.approx(7 * each["rows_per_second"])


def _ranks():
    with fa.start():
        train_step = program(strategy="ddp")
        measure = Throughput(tokens=lambda batch: len(batch[0]))
        last = [
            m
            for _, m in fa.scan(
                train_step, train_step.init(), _shards(32), watch=fa.Watch(throughput=measure)
            )
        ][-2]
    return last["rows_per_second"] / last["tokens_per_second"]


def test_rates_are_those_of_all_ranks(pools):
    assert pools.run(2, _ranks) == pytest.approx([1.0, 1.0])


def test_flops_of_a_row_are_three_forwards():
    train_step = program()
    state = train_step.init()
    # inp 3 x 6, two blocks 6 x 6, out 6 x 1; a multiplication and an addition each
    assert train_step.flops(state, batch_of(5)) == 3 * 2 * (18 + 2 * 36 + 6)
    assert train_step.live_state is state


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.mix(x).view(len(x), 4, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x).sum()


def test_flops_of_attention_are_those_of_its_products():
    train_step = program(lambda model, batch: model(batch), model=Attends)
    tokens, width = 4, 8
    forward = 2 * tokens * width * width + 2 * (2 * tokens * tokens * width)
    assert train_step.flops(train_step.init(), torch.randn(3, tokens, width)) == 3 * forward


def test_utilisation_is_the_rate_times_flops_over_the_peak():
    last = _metrics(throughput=Throughput(flops=2e6, peak=0.5))[-1]
    assert last["mfu"] == pytest.approx(last["rows_per_second"] * 2e6 / 0.5e12)
    counted = _metrics(throughput=Throughput(peak=0.5))[-1]
    assert counted["mfu"] == pytest.approx(counted["rows_per_second"] * 3 * 2 * 96 / 0.5e12)


def test_peaks_are_known_by_name_for_low_precision_only(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert Throughput().peak_of(device, low=True) == 989e12
    assert Throughput().peak_of(device, low=False) is None
    assert Throughput(peak=495.0).peak_of(device, low=False) == 495e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an unknown device")
    assert Throughput().peak_of(device, low=True) is None
    assert Throughput().peak_of(torch.device("cpu"), low=True) is None


@pytest.mark.parametrize("options", [{"window": 0}, {"peak": -1.0}, {"flops": 0.0}])
def test_bad_numbers_raise(options):
    with pytest.raises(ArgumentError, match="more than 0"):
        Throughput(**options)


def _grows(model, batch):
    with mmap.mmap(-1, 48 << 20) as scratch:  # 48 MiB that go back at once: malloc may keep what it is given
        for page in range(0, len(scratch), mmap.PAGESIZE):
            scratch[page] = 1
    return loss_fn(model, batch)


def test_the_peak_of_the_phase_that_allocates_is_the_highest():
    last = _metrics(_grows, memory=True)[-1]
    assert last["peak_mib"] == last["peak_mib/forward"] == max(v for k, v in last.items() if "peak" in k)
    assert last["peak_mib/forward"] - last["peak_mib/update"] == pytest.approx(48, abs=6)


def test_live_storages_count_each_storage_once():
    keep = torch.zeros(123, 457)
    views = [keep[1:], keep.t(), keep.view(-1)[:5]]
    (row,) = [row for row in live_storages({keep.data_ptr(): "kept"}) if set(row.shape) == {123, 457}]
    assert (row.count, row.bytes, row.names) == (1, 123 * 457 * 4, ("kept",))
    assert len(views) == 3


def _runs_out(model, batch):
    activations = torch.zeros(111, 222)
    loss = loss_fn(model, batch)
    torch.empty(1 << 48)
    return loss, activations


def test_memory_that_runs_out_names_phase_step_and_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    train_step = program(_runs_out, optimizer=fa.adamw(0.1))
    state = train_step.init()
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        train_step(state, batch_of(4))
    note, batch = caught.value.__notes__
    assert "micro-batch 0, whose batch is 0: Tensor torch.float32 [4, 3]" in batch
    assert "memory ran out in step 0, forward, micro-batch 0, on rank 0" in note
    path = Path(re.search(r"written: (\S+)", note)[1])
    text = path.read_text()
    assert "1 x float32 [111, 222] on cpu" in text
    assert "params/blocks.0.mix.weight" in text
    assert "opt/out.weight/exp_avg" in text
    assert train_step.live_state is state


def test_gradients_of_earlier_micro_batches_are_named():
    calls = []

    def second_runs_out(model, batch):
        calls.append(1)
        return (_runs_out if len(calls) == 2 else loss_fn)(model, batch)

    train_step = program(fa.accumulate(second_runs_out, 2))
    state = train_step.init()
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        train_step(state, batch_of(8))
    note, _ = caught.value.__notes__
    assert "forward, micro-batch 1" in note
    assert "gradients/blocks.0.mix.weight" in Path(re.search(r"written: (\S+)", note)[1]).read_text()
    assert all(leaf.param.grad is None for leaf in train_step.engine.layout.leaves)


def test_a_snapshot_of_the_device_is_written_beside_it(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"device": 0, "total_size": 1}])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    train_step = program(_runs_out)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train_step(train_step.init(), batch_of(4))
    (path,) = tmp_path.glob("*/rank0.pickle")
    assert pickle.loads(path.read_bytes())["segments"] == [{"device": 0, "total_size": 1}]


def test_other_errors_get_no_note_of_memory():
    def fails(model, batch):
        raise RuntimeError("of the loss")

    train_step = program(fails)
    with pytest.raises(RuntimeError, match="of the loss") as caught:
        train_step(train_step.init(), batch_of(4))
    assert "memory" not in "".join(caught.value.__notes__)


@pytest.mark.parametrize("wrong", [{"window": 2.5}, {"peak": "312"}, {"tokens": 5}])
def test_wrong_options_of_throughput_are_errors(wrong):
    with pytest.raises(ArgumentError, match="where: Throughput"):
        fa.seeing.Throughput(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: {"watch": fa.Watch(throughput="yes")},
        lambda: {"watch": fa.Watch(throughput=50)},
        lambda: {"watch": fa.Watch(gc_every=0)},
        lambda: {"watch": fa.Watch(profile=True)},
        lambda: {"watch": True},
        lambda: {"track": fa.Tracking(report=True)},
        lambda: {"track": fa.Tracking(config="lr")},
        lambda: {"track": fa.Tracking(every="2")},
        lambda: {"save": 3},
        lambda: {"save": True},
    ],
)
def test_wrong_options_of_scan_are_errors_before_training(wrong):
    train_step = program()
    with pytest.raises(ArgumentError, match="where: fa"):
        fa.scan(train_step, train_step.init(), fa.shard(DataLoader(TensorDataset(*batch_of(4)))), **wrong())
