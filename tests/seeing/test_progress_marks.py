"""The phases of a step: which ones, in which order, and what they are after an error."""

from __future__ import annotations

import signal

import pytest
import torch

import fnaccel as fa
from fnaccel.world.progress_marks import NOW, PHASES, listening, waiting
from tests.laws.interrupts import Interrupter
from tests.tiny_models import batch_of, loss_fn, program


def _loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch_of(8)), batch_size=4)


def _phases(run):
    seen = []

    def note(mark):
        if not seen or seen[-1] != mark.phase:
            seen.append(mark.phase)

    with listening(note):
        run()
    assert set(seen) <= set(PHASES)
    return seen


def test_the_phases_of_an_epoch():
    train_step = program(fa.accumulate(loss_fn, 2))
    state = train_step.init()
    step = ["data", "outside", *["forward", "backward"] * 2, "gradients", "update", "outside"]
    assert _phases(lambda: list(fa.scan(train_step, state, fa.shard(_loader())))) == [
        *step,
        *step,
        "data",
        "outside",
    ]


def test_the_mark_of_a_step_names_its_number_and_micro_batch():
    train_step = program(fa.accumulate(loss_fn, 2))
    state, _ = train_step(train_step.init(), batch_of(4))
    seen = []
    with listening(lambda mark: seen.append((mark.phase, mark.step, mark.micro_batch, mark.first))):
        state, _ = train_step(state, batch_of(4))
    assert seen[:4] == [(phase, 1, i, False) for i in (0, 1) for phase in ("forward", "backward")]
    assert str(NOW) == "step 2, outside"
    assert NOW.of == repr(train_step)


def test_a_captured_step_is_one_phase_beside_its_compilations():
    train_step = program(fa.compile(loss_fn, backend="aot_eager"))
    state = train_step.init()
    state, _ = train_step(state, batch_of(4))
    phases = _phases(lambda: train_step(state, batch_of(4)))
    assert phases == ["captured step", "update", "outside"]
    phases = _phases(lambda: train_step(train_step.live_state, batch_of(5)))
    assert "compile" in phases


def test_a_reset_of_the_compiler_does_not_end_the_marks_of_compilations():
    train_step = program(fa.compile(loss_fn, backend="aot_eager"))
    train_step(train_step.init(), batch_of(4))
    torch.compiler.reset()
    assert "compile" in _phases(lambda: train_step(train_step.live_state, batch_of(4)))
    torch.compiler.reset()
    compiled = torch.compile(torch.sin, backend="aot_eager")
    train_step = program(lambda model, batch: loss_fn(model, (compiled(batch[0]), batch[1])))
    assert "compile" in _phases(lambda: train_step(train_step.init(), batch_of(4)))


def test_saving_and_looking_are_phases(tmp_path):
    train_step = program()
    state = train_step.init()
    assert _phases(lambda: fa.save(tmp_path, state)) == ["save", "outside"]
    assert _phases(lambda: train_step.look(state, lambda model: None)) == ["evaluate", "outside"]
    assert _phases(lambda: fa.restore(tmp_path, like=state)) == ["restore", "outside"]


def test_an_error_ends_the_phase():
    def fails(model, batch):
        assert NOW.phase == "forward"
        raise ValueError("of the loss")

    train_step = program(fails)
    with pytest.raises(ValueError, match="of the loss"):
        train_step(train_step.init(), batch_of(4))
    assert NOW.phase == "outside"


def test_batches_that_are_dropped_run_no_line_in_which_python_would_swallow_a_ctrl_c():
    before = signal.getsignal(signal.SIGINT)
    batches = waiting(iter([1, 2, 3]))
    assert next(batches) == 1
    try:
        with Interrupter(None) as interrupter:
            del batches
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupter.lines == 0
