"""What an error of torch in the loss says beside its own text: rank, step, micro-batch, and the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fnaccel as fa
from fnaccel.world.world import current
from tests.tiny_models import Net, program


def loss_of(model, batch):
    return fa.Mean(F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), weight=len(batch["y"]))


def rows(width=3):
    return {"x": torch.ones(4, width), "y": torch.ones(4, 1)}


def labels(model, batch):
    return F.cross_entropy(model(batch["x"]).repeat(1, 2), batch["y"], reduction="sum")


def labelled(*numbers):
    return {"x": torch.ones(4, 3), "y": torch.tensor(numbers)}


CAUSES = {
    "width": (loss_of, rows(), rows(5), "micro-batch 0, whose batch is x: Tensor torch.float32 [1, 5], y: "),
    "label": (labels, labelled(0, 1, 1, 0), labelled(0, 1, 7, 1), "micro-batch 2, whose batch is x: Tensor"),
    "numpy": (
        lambda model, batch: model(batch["x"]).sum(), rows(), {"x": np.ones((4, 3))}, "x: ndarray float64 [1, 3]"
    ),
}  # fmt: skip


def noted(cause, strategy, *, captured=False):
    fn, right, wrong, _ = CAUSES[cause]
    step = fa.accumulate(fn, 4)
    step = fa.compile(step, "step", backend="aot_eager") if captured else step
    train_step = program(step, strategy=strategy, model=Net)
    state, _ = train_step(train_step.init(), right)
    try:
        train_step(state, wrong)
    except Exception as error:
        return current().rank, getattr(error, "__notes__", [])
    return None


@pytest.mark.long_except("False|1-local-True")
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(
    ("ranks", "strategy", "captured"),
    [(1, "local", False), (1, "local", True), (2, "ddp", False), (2, "fsdp", False), (2, "ddp", True)],
)
def test_an_error_in_the_loss_names_rank_step_micro_batch_and_batch(pools, cause, ranks, strategy, captured):
    if captured and cause != "label":
        return  # an array is traced as a tensor
    for rank, notes in pools.run(ranks, noted, cause, strategy, captured=captured):
        (note,) = notes
        assert note.startswith(f"on rank {rank}, in step 1, micro-batch "), note
        assert CAUSES[cause][3] in note, note


class Odd:
    def __init__(self):
        self.items = []


def test_a_batch_of_any_object_and_its_gradient():
    def fails(model, batch):
        raise KeyError("x")

    with fa.start():
        train_step = program(fails)
        state = train_step.init()
        for call in (train_step, fa.value_and_grad(train_step)):
            for batch, text in ((Odd(), "(root): Odd"), ({1: 2, "b": [3]}, "1: int, b/0: int"), ({}, "is ")):
                with pytest.raises(KeyError) as caught:
                    call(state, batch)
                assert text in caught.value.__notes__[0]
