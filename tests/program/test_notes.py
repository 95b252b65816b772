"""Notes of errors in the loss (rank, step, micro-batch, batch), and calls in inference mode."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fnaccel as fa
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, program, whole


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


def test_an_error_in_an_evaluation_names_rank_and_batch():
    with fa.start():
        train_step = program(loss_of)
        state = train_step.init()
        wide = torch.utils.data.DataLoader([{"x": torch.ones(5), "y": torch.ones(1)}] * 4, batch_size=2)
        with pytest.raises(RuntimeError) as raised:
            fa.evaluate(train_step, state, loss_of, fa.shard(wide))
        assert raised.value.__notes__ == [
            "in fa.evaluate on rank 0, whose batch is x: Tensor torch.float32 [2, 5], y: Tensor torch.float32 [2, 1]"
        ]


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


def in_inference_mode(call, strategy):
    """The states and losses of a run whose calls beside its steps are in inference mode, or are not."""
    found = []
    for mode in (False, True):
        train_step = program(strategy=strategy)
        with torch.inference_mode(mode):
            state = train_step.init()
        state, _ = train_step(state, batch_of(4))
        with torch.inference_mode(mode):
            result = call(train_step, state)
        made = [x for x in fa.tree.leaves(result) if isinstance(x, torch.Tensor)]
        assert call is not snapshots or not any(x.is_inference() for x in made)
        state, metrics = train_step(state, batch_of(4))
        found.append([float(metrics["loss"]), [whole(x) for x in made]])
    assert fa.tree.allclose(*found, rtol=0, atol=0)


def snapshots(train_step, state):
    return fa.snapshot(state)


def gathers(train_step, state):
    return fa.interchange.gather_state_dict(state)


def looks(train_step, state):
    return float(train_step.look(state, lambda model: sum(p.sum() for p in model.parameters()), whole=True))


def exports(train_step, state):
    with tempfile.TemporaryDirectory() as folder:
        fa.interchange.export_hf(folder, state)


@pytest.mark.parametrize("call", [snapshots, gathers, looks, exports])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "local"), (2, "ddp"), (2, "fsdp")])
def test_calls_in_inference_mode_leave_it(pools, call, ranks, strategy):
    pools.run(ranks, in_inference_mode, call, strategy)
