"""Options of other axes and transforms, and several models, beside tensor parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from tests.axes.models import GPT, HEADS, PLAN, WIDTH, Block, loss_fn, rows_of
from tests.axes.test_tensor_transformers import gpt2
from tests.models import whole

STEPS = 2
BOTH = fa.fsdp(2) * fa.tensor(2, PLAN)


def params_of(state):
    """Whole parameters by path, of one model or of several."""
    return dict(fa.tree.items(fa.tree.map_tensors(whole, dict(state.params))))


def trained(strategy, step=loss_fn, model=GPT, optimizer=None):
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.sgd(0.1))
    state, losses = train_step.init(seed=0), []
    for number in range(STEPS):
        rows = rows_of(number, 0, rows=4).chunk(train_step.mesh.batch_size)[train_step.mesh.batch_rank]
        state, metrics = train_step(state, rows)
        losses.append(float(metrics["loss"]))
    return {"losses": torch.tensor(losses), "params": params_of(state)}


def check_same(pools, ranks, strategy, *args):
    """Losses and parameters of the ranks are those of one process."""
    expected = pools.run(1, trained, "local", *args)[0]
    for found in pools.run(ranks, trained, strategy, *args):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class DropoutBlock(Block):
    """Drops features between column and row layers."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(len(x), -1, 3, self.heads, WIDTH // HEADS).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, self.drop(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.drop(F.gelu(self.up(self.norm2(x)))))


class DropoutGPT(GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(3))


@pytest.mark.parametrize("save", ["nothing", "attention", "matmuls"])
def test_blocks_that_run_again_drop_the_same_features(pools, save):
    """A block that is computed again stops before its row layer ends, and the next one draws as before."""
    first = pools.run(2, trained, fa.tensor(2, PLAN), loss_fn, DropoutGPT)[0]
    again = pools.run(2, trained, fa.tensor(2, PLAN), fa.remat(loss_fn, save=save), DropoutGPT)[0]
    torch.testing.assert_close(again, first, rtol=0, atol=0)


class WithPlan(GPT):
    tp_plan = PLAN


def loss_of_both(models, tokens):
    result = loss_fn(models["lm"], tokens)
    return fa.Mean(result.total + models["other"](torch.ones(2, 3)).square().sum(), weight=result.weight)


def logits_of_gpt2(models, tokens):
    logits = models["lm"](input_ids=tokens[:, :-1], use_cache=False).logits
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return fa.Mean(total, weight=tokens[:, 1:].numel())


def loss_of_one(models, tokens):
    return loss_fn(models["lm"], tokens)


def linear():
    return nn.Linear(3, 4)


NAMED = {f"lm/{pattern}": style for pattern, style in PLAN.items()}


@pytest.mark.parametrize(
    ("strategy", "step", "model"),
    [
        (fa.tensor(2, NAMED), loss_of_both, {"lm": GPT, "other": linear}),
        (fa.tensor(2), loss_of_one, {"lm": WithPlan}),
        (fa.tensor(2), logits_of_gpt2, {"lm": gpt2}),
        (fa.tensor(2, "gpt2"), logits_of_gpt2, {"lm": gpt2}),
    ],
    ids=["paths", "own plan", "auto", "gpt2"],
)
def test_a_dict_of_models(pools, strategy, step, model):
    """A plan given as a dict names the model first. A ready plan, or the model's own, does not."""
    check_same(pools, 2, strategy, step, model)


def test_two_patterns_for_one_attribute(pools):
    """The first one divides it, and the second one does not divide it again."""
    check_same(pools, 2, fa.tensor(2, {"blocks.0.heads": "/"} | PLAN))
