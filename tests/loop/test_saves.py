"""What a loop saves, whatever its body and its trackers do."""

from __future__ import annotations

import logging
import math

import pytest
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from tests.tiny_models import batch_of, program

STEPS = 6


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def shards():
    return fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))


class Recorder:
    """A tracker that raises at some calls."""

    def __init__(self, fails=()):
        self.fails = fails
        self.logged = []
        self.ended = False

    def start(self, config):
        pass

    def log(self, step, metrics):
        self.logged.append(step)
        if step in self.fails:
            raise OSError("no route to host")

    def finish(self):
        self.ended = True
        if "finish" in self.fails:
            raise OSError("no route to host")


@pytest.mark.parametrize("fails", [(1,), (3,), (STEPS,), ("finish",), (*range(1, STEPS + 1), "finish")])
def test_a_tracker_that_raises_ends_nothing(tmp_path, caplog, fails):
    bad, good = Recorder(fails), Recorder()
    train_step = program()
    with caplog.at_level(logging.ERROR, logger="fnaccel"):
        states = [
            state.step
            for state, _ in fa.scan(
                train_step, train_step.init(), shards(), steps=STEPS, save=tmp_path, track=[bad, good]
            )
        ]
    assert states == good.logged == bad.logged == [*range(1, STEPS + 1)]
    assert good.ended
    assert bad.ended
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == [STEPS]
    with_traceback = [record for record in caplog.records if record.exc_info]
    assert len(with_traceback) == 1
    assert f"Recorder raised {len(fails)} times" in caplog.text


def test_the_last_state_is_saved_before_a_tracker_ends(tmp_path):
    class Slow(Recorder):
        def finish(self):
            super().finish()
            self.saved = [each.step for each in fa.checkpoint.checkpoints(tmp_path)]

    tracker = Slow()
    train_step = program()
    for _ in fa.scan(train_step, train_step.init(), shards(), steps=3, save=tmp_path, track=tracker):
        pass
    assert tracker.saved == [3]


def test_changes_of_extras_in_the_body_are_saved_with_their_step(tmp_path):
    train_step = program()
    state = train_step.init(extras={"seen": 0})
    for state, _ in fa.scan(train_step, state, shards(), steps=4, save=fa.Autosave(tmp_path, every=1)):
        state.extras["seen"] = state.step
    for step in range(1, 5):
        fresh = program()
        restored = fa.restore(tmp_path, like=fresh.init(extras={"seen": -1}), step=step)
        assert (restored.step, restored.extras) == (step, {"seen": step})


@pytest.mark.parametrize("interrupted_first", [True, False])
def test_ctrl_c_in_one_tracker_leaves_the_others_ended(tmp_path, interrupted_first):
    class Interrupted(Recorder):
        in_loop = True  # a Ctrl-C reaches the main thread

        def finish(self):
            raise KeyboardInterrupt

    good = Recorder()
    trackers = [Interrupted(), good] if interrupted_first else [good, Interrupted()]
    train_step = program()
    with pytest.raises(KeyboardInterrupt):
        for _ in fa.scan(train_step, train_step.init(), shards(), steps=3, save=tmp_path, track=trackers):
            pass
    assert good.ended
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == [3]


def test_a_tracker_that_cannot_start_leaves_the_others_ended():
    class Unreachable(Recorder):
        def start(self, config):
            raise OSError("no route to host")

    good = Recorder()
    train_step = program()
    with pytest.raises(OSError, match="no route"):
        next(fa.scan(train_step, train_step.init(), shards(), track=[good, Unreachable()]))
    assert good.ended
    train_step(train_step.live_state, batch_of(4))


@pytest.mark.parametrize("strategy", ["local", "ddp"])
@pytest.mark.parametrize("transform", [None, fa.skip_nonfinite, fa.transforms.on_spike])
def test_a_loss_that_is_nan_is_named_once(caplog, strategy, transform):
    """A run trained to its end on parameters that were NaN. The two transforms speak for themselves."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        x, y = batch
        scale = math.nan if len(calls) == 3 else 1.0
        return fa.Mean((model(x) - y).square().sum() * scale, weight=len(y))

    train_step = program(transform(loss) if transform else loss, strategy=strategy)
    with caplog.at_level(logging.WARNING, logger="fnaccel"):
        for _ in fa.scan(train_step, train_step.init(), shards(), steps=STEPS):
            pass
    lines = [text for record in caplog.records if "goes on" in (text := record.getMessage())]
    if transform is not None:
        assert lines == []
        return
    (line,) = lines
    assert "the loss of step 3 is nan" in line
    assert "fa.skip_nonfinite(step)" in line
    assert 'fa.transforms.on_spike(step, do="stop")' in line
