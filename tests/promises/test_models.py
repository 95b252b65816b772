"""Models and optimizers come out of training as what the user wrote: they pickle, and run without us."""

from __future__ import annotations

import pickle

import pytest
import torch

import fnaccel as fa
from tests.interchange.hf_models import IDS, gpt2, loss


def copied(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_model_leaves_a_train_step_as_the_user_s_class(precision, compiled):
    step = fa.with_precision(fa.with_weight(loss, lambda batch: 1), precision)
    step = fa.compile(step, "block", backend="eager") if compiled else step
    model = gpt2()
    with fa.start(device="cpu"):
        train_step = fa.train_step(step, model=fa.distribute(model, fa.local()), optimizer=fa.sgd(0.1))
        state, _ = train_step(train_step.init(seed=0), IDS)
        trained = fa.interchange.gather_state_dict(state)
        train_step.close()  # gives back the forwards that compiled blocks had
    found = copied(model)
    assert type(found) is type(gpt2())
    assert list(found.state_dict()) == list(gpt2().state_dict())
    assert all(torch.equal(value, trained[name]) for name, value in found.state_dict().items())
    logits = found(input_ids=IDS).logits
    assert logits.dtype is torch.float32
    assert type(logits) is torch.Tensor


def test_an_optimizer_and_its_state_pickle():
    described = copied(fa.adamw(1e-2, weight_decay=0.1))
    assert described == fa.adamw(1e-2, weight_decay=0.1)
    with fa.start(device="cpu"):
        train_step = fa.train_step(loss, model=fa.distribute(gpt2, fa.local()), optimizer=described)
        state, _ = train_step(train_step.init(seed=0), IDS)
        snapshot = copied(fa.snapshot(state))
        state, ahead = train_step(state, IDS)
        _, again = train_step(train_step.adopt(snapshot), IDS)
    assert float(ahead["loss"]) == float(again["loss"])
