"""`fa.compile(background=)`: another process compiles, and the steps go over to its code together."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.transforms.background import process
from tests.tiny_models import Net, batch_of, loss_fn, whole_params

SCOPES = ["block", "loss", "step"]
CHILD = "fnaccel.transforms.background.child"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing is compiled before, and nothing is left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


def made(background, scope="loss", strategy="local", loss=loss_fn, model=Net):
    step = fa.clip_norm(fa.compile(loss, scope, background=background, units=("Linear",)), 1.0)
    return fa.train_step(step, model=fa.distribute(model, strategy), optimizer=fa.adamw(1e-2))


def run(train_step, count):
    state, losses = train_step.init(seed=0), []
    for _ in range(count):
        state, metrics = train_step(state, batch_of(4))
        losses.append(float(metrics["loss"]))
    return state, losses


def until_over(train_step):
    """Train until compiled code runs, for two minutes at most. Returns the losses."""
    state, losses, ends = train_step.init(seed=0), [], time.monotonic() + 120
    while train_step.compilation.since is None and time.monotonic() < ends:
        state, metrics = train_step(state, batch_of(4))
        losses.append(float(metrics["loss"]))
        time.sleep(0.01)
    return losses


@pytest.mark.long_except("step")
@pytest.mark.parametrize("scope", SCOPES)
def test_steps_run_uncompiled_before_and_go_over_at_the_step(world, scope):
    train_step = made(3, scope)
    state, before = run(train_step, 3)
    assert (train_step.compilation.graphs, train_step.compilation.since) == (0, None)
    state, metrics = train_step(state, batch_of(4))
    found = train_step.compilation
    assert found.since == 3
    assert found.graphs > 0
    assert (found.cache_hits > 0, found.cache_misses) == (True, 0)
    plain = fa.train_step(
        fa.clip_norm(loss_fn, 1.0), model=fa.distribute(Net, "local"), optimizer=fa.adamw(1e-2)
    )
    _, expected = run(plain, 4)
    torch.testing.assert_close([*before, float(metrics["loss"])], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_run_repeats_to_the_bit(world):
    losses = [run(made(2), 5)[1] for _ in range(2)]
    assert losses[0] == losses[1]


def test_a_resumed_run_that_is_past_the_step_waits_for_no_process(world, monkeypatch):
    monkeypatch.setattr(process.Background, "_start", lambda *_: pytest.fail("a process was started"))
    train_step = made(2)
    state = train_step.adopt(attrs.evolve(fa.snapshot(train_step.init(seed=0)), step=7))
    train_step(state, batch_of(4))
    assert train_step.compilation.since == 7
    assert train_step.compilation.graphs == 1


class Even(nn.Module):
    """Its parameters have equal parts on two ranks."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.inp(x).tanh()).sum(dim=1, keepdim=True)


def over_on_a_rank(folder, strategy, scope):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()
    train_step = made(True, scope, strategy, model=Even)
    losses = until_over(train_step)
    return train_step.compilation, losses


@pytest.mark.long_except("ddp-auto")
@pytest.mark.parametrize(("strategy", "scope"), [("ddp", "auto"), ("ddp", "loss"), ("fsdp", "step")])
def test_ranks_go_over_together_and_find_all_code(pools, tmp_path, strategy, scope):
    found = pools.run(2, over_on_a_rank, str(tmp_path), strategy, scope)
    (first, losses), (second, others) = found
    assert first.since == second.since == len(losses) - 1
    assert losses == others
    assert (first.cache_misses, second.cache_misses) == (0, 0)
    assert first.cache_hits > 0


def waits_on_a_rank(folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()
    train_step = made(2, "step", "ddp")
    run(train_step, 3)
    return train_step.compilation


@pytest.mark.long
def test_ranks_wait_for_a_process_at_the_step(pools, tmp_path):
    for found in pools.run(2, waits_on_a_rank, str(tmp_path)):
        assert (found.since, found.cache_misses) == (2, 0)


TRANSFORMS = {
    "accumulate": lambda step: fa.accumulate(step, 2),
    "bf16": lambda step: fa.with_precision(step, "bf16"),
    "fp16": lambda step: fa.skip_nonfinite(fa.with_precision(step, "fp16")),
    "ema": lambda step: fa.with_ema(step, 0.9),
    "weight": lambda step: fa.with_weight(step, lambda batch: len(batch[0])),
}


def same_losses(transform, strategy):
    """Losses of a step that is still compiled elsewhere, and of one that is not to be."""

    def losses(step):
        train_step = fa.train_step(
            TRANSFORMS[transform](step), model=fa.distribute(Net, strategy), optimizer=fa.adamw(1e-2)
        )
        return run(train_step, 4)[1], whole_params(train_step.live_state)

    with mock.patch.multiple(process.Background, _start=lambda *_: None, _ended=False):
        return losses(fa.compile(loss_fn, "step", background=True)), losses(loss_fn)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_step_to_be_captured_runs_uncompiled_alike(pools, transform, strategy):
    for (losses, params), (expected, others) in pools.run(2, same_losses, transform, strategy):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-6)


def fails_elsewhere(model, batch):
    if CHILD in sys.modules:
        raise ZeroDivisionError("only there")
    return loss_fn(model, batch)


@pytest.mark.long
def test_if_the_process_fails_the_step_is_compiled_here(world):
    train_step = made(True, loss=fails_elsewhere)
    with pytest.warns(RuntimeWarning, match="exit code 1: .*only there.* compiled here, from step"):
        until_over(train_step)
    assert train_step.compilation.cache_misses > 0


def test_if_the_process_can_t_be_started_the_step_is_compiled_here(world, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process.Background, "_start", full)
    train_step = made(2)
    with pytest.warns(
        RuntimeWarning, match="was not started: .*No space left.* compiled here, from step 2 on"
    ):
        run(train_step, 3)


def test_close_ends_the_process(world):
    train_step = made(10_000)
    run(train_step, 1)
    started = train_step.spec.step.transforms[0].apply.process
    child, folder = started._process, Path(started._folder.name)
    assert child.poll() is None
    assert folder.exists()
    train_step.close()
    assert child.poll() is not None
    assert not folder.exists()


def test_of_a_view_its_own_values_are_pickled():
    table = torch.arange(1_000_000.0)
    text = process._pickled({"x": table[8:12]}, values=True)
    assert len(text) < 2_000
    assert torch.equal(pickle.loads(text)["x"], table[8:12])


def test_a_step_that_can_not_be_pickled(world):
    lock = threading.Lock()

    def locked(model, batch):
        with lock:
            return loss_fn(model, batch)

    with pytest.raises(
        errors.ArgumentError, match=r"can't be given this step: .*lock(.|\n)*leave background= out"
    ):
        made(True, loss=locked)


def test_without_cloudpickle(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(errors.MissingBackendError, match=r"cloudpickle(.|\n)*\[background\]"):
        made(True)


@pytest.mark.parametrize("background", [0, -1, 1.5, "yes", None])
def test_what_is_no_step(background):
    with pytest.raises(errors.ArgumentError, match=r"background=.* is no step"):
        fa.compile(loss_fn, background=background)


def test_a_backend_without_a_cache():
    with pytest.raises(errors.ArgumentError, match=r"'eager' keeps no code(.|\n)*backend=\"inductor\""):
        fa.compile(loss_fn, backend="eager", background=True)


def test_large_tensors_are_not_pickled_by_value(world):
    wide = nn.Linear(512, 512)
    tied = nn.Sequential(wide, nn.Linear(512, 512, bias=False))
    tied[1].weight = wide.weight
    text = process._pickled(tied, values=False)
    assert len(text) < 10_000
    found = pickle.loads(text)
    assert found[0].weight is found[1].weight
    assert found[0].weight.shape == (512, 512)
    assert isinstance(found[0].weight, nn.Parameter)


@pytest.mark.long
def test_a_checkpoint_says_from_which_step(world, tmp_path):
    train_step = made(2)
    state, _ = run(train_step, 3)
    path = fa.save(tmp_path / "runs", state)
    assert '"compiled_since": 2' in (path / "manifest.json").read_text()


SCRIPT = """
import os, pathlib, sys, time, fnaccel as fa, torch
from torch import nn
def loss_fn(model, batch):
    if {child!r} in sys.modules:
        pathlib.Path({mark!r}).write_text(str(os.getpid()))
        time.sleep(600)
    return model(batch).square().mean()
with fa.start(device="cpu"):
    step = fa.compile(loss_fn, "loss", background=True)
    model = fa.distribute(lambda: nn.Linear(4, 4), "local")
    train_step = fa.train_step(step, model=model, optimizer=fa.sgd(0.1))
    state = train_step.init()
    while True:
        state, _ = train_step(state, torch.ones(2, 4))
        time.sleep(0.05)
"""


@pytest.mark.long
def test_the_process_ends_with_the_run(tmp_path):
    mark, script = tmp_path / "mark", tmp_path / "script.py"
    script.write_text(SCRIPT.format(mark=str(mark), child=CHILD))
    run_of_user = subprocess.Popen([sys.executable, str(script)])
    try:
        ends = time.monotonic() + 120
        while not (mark.exists() and mark.read_text()) and time.monotonic() < ends:
            time.sleep(0.1)
        child = int(mark.read_text())
    finally:
        run_of_user.kill()
        run_of_user.wait()
    ends = time.monotonic() + 60
    while lives(child) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not lives(child)


def lives(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
