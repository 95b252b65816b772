"""What a hook records is a metric of its own."""

from __future__ import annotations

import pytest

import fnaccel as fa
from fnaccel.step.step import RESERVED
from tests.tiny_models import batch_of, loss_fn, program


def recording(name, phase):
    def apply(values, own, info):
        info.record(name, 1.0)
        return (values, own) if phase is fa.Phase.GRADS else own

    return fa.Transform("mine", phase, apply=apply)


@pytest.mark.parametrize("phase", [fa.Phase.GRADS, fa.Phase.UPDATE])
@pytest.mark.parametrize("name", sorted(RESERVED - {"grad_norm"}))
def test_a_metric_of_the_step_is_not_replaced(name, phase):
    with fa.start():
        train_step = program(recording(name, phase)(loss_fn))
        with pytest.raises(fa.errors.LossError, match=f"a hook records '{name}'"):
            train_step(train_step.init(), batch_of(4))


def test_in_a_pure_update_and_a_captured_step():
    step = recording("loss", fa.Phase.GRADS)(loss_fn)
    with fa.start():
        update = fa.pure(program(step))
        with pytest.raises(fa.errors.LossError, match="a hook records 'loss'"):
            update(update.init(), batch_of(4))
        train_step = program(fa.compile(step, backend="eager"))
        with pytest.raises(fa.errors.FnaccelError, match="'loss', which the step itself reports"):
            train_step(train_step.init(), batch_of(4))


def test_a_norm_may_be_recorded():
    with fa.start():
        train_step = program(recording("grad_norm", fa.Phase.GRADS)(loss_fn))
        _, metrics = train_step(train_step.init(), batch_of(4))
        assert float(metrics["grad_norm"]) == 1.0
