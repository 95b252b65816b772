"""`train_step.probe`: a cut forward against that of the whole model, before step 0."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.strategies.context.model import CUT, Net, batch_of
from tests.strategies.context.model import loss_fn as token_loss
from tests.strategies.tensor.models import GPT, PLAN, SEQUENCE, Block, loss_fn, rows_of
from tests.tiny_models import whole_params


class ReadsOutside(GPT):
    """Its head is the embedding's weight, read outside of the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()

    def forward(self, tokens):
        return F.linear(super().forward(tokens), self.embed.weight)


class CountsFromZero(Net):
    """Positions that it makes itself are wrong on a part of a sequence."""

    def forward(self, batch):
        positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
        return super().forward(batch | {"positions": positions})


def probed(strategy, model=GPT, loss=loss_fn, make_batch=rows_of, precision="fp32"):
    step = fa.with_precision(loss, precision)
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.3))
    state = train_step.init(seed=0)
    before = whole_params(state)
    try:
        result = train_step.probe(make_batch(0, train_step.mesh.batch_rank))
    except errors.FnaccelError as error:
        return type(error).__name__, str(error)
    assert fa.tree.allclose(whole_params(state), before, rtol=0, atol=0)
    assert all(module.training for module in train_step.engine.layout.modules)
    state, metrics = train_step(state, make_batch(0, train_step.mesh.batch_rank))
    return result.difference, float(metrics["loss"])


def without_labels(model, tokens):
    return fa.Mean(loss_fn(model, tokens).total * 0.0, weight=0)


def near_zero(model, tokens):
    """A loss that is 0 up to rounding: a distribution against itself."""
    logits = model(tokens[:, :-1]).log_softmax(-1)
    difference = F.kl_div(logits, logits.detach() + 1e-7, reduction="sum", log_target=True)
    return fa.Mean(difference, weight=len(tokens))


RIGHT = [
    (2, fa.tensor(2, PLAN), {}),
    (2, fa.tensor(2, PLAN), {"loss": without_labels}),
    (2, fa.tensor(2, PLAN), {"loss": near_zero}),
    (4, fa.fsdp(2) * fa.tensor(2, SEQUENCE, sequence=True), {}),
    (4, fa.ddp(2) * fa.tensor(2, PLAN), {"precision": "bf16"}),
    (2, fa.context(2, cut=CUT), {"model": Net, "loss": token_loss, "make_batch": batch_of}),
    (4, fa.fsdp(2) * fa.context(2, cut=CUT, method="ring"), {"model": Net, "loss": token_loss, "make_batch": batch_of}),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "strategy", "options"), RIGHT, ids=lambda value: str(value)[:20])
def test_a_right_plan(pools, ranks, strategy, options):
    limit = 0.03 if "precision" in options else 1e-5
    for difference, _ in pools.run(ranks, probed, strategy, **options):
        assert difference < limit


def regularised(model, tokens):
    loss = loss_fn(model, tokens)
    return fa.Mean(loss.total + model.blocks[0].up.weight.square().sum(), weight=loss.weight)


WRONG = [
    ({"loss": regularised}, fa.tensor(2, PLAN), "read outside of its module"),
    ({"model": CountsFromZero, "loss": token_loss, "make_batch": batch_of}, fa.context(2, cut=CUT), "positions"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "strategy", "cause"), WRONG, ids=["tensor", "context"])
def test_what_would_train_wrongly(pools, options, strategy, cause):
    """A weight that is read outside of its layer is a part, and positions made by the model are wrong."""
    for kind, text in pools.run(2, probed, strategy, **options):
        assert kind == "CapabilityError"
        assert "the cut model has the loss" in text
        assert cause in text.partition("fix:")[2]


def note_of_reading():
    plan = {name: style for name, style in PLAN.items() if name != "head"}
    try:
        probed(fa.tensor(2, plan), ReadsOutside)
    except IndexError as error:
        return error.__notes__
    return []


def test_a_cut_forward_that_fails(pools):
    for notes in pools.run(2, note_of_reading):
        assert "usual causes: a weight of the plan is read outside of its module" in notes[0]


def test_a_built_module(pools):
    for kind, text in pools.run(2, probed, fa.tensor(2, PLAN), GPT()):
        assert kind == "ArgumentError"
        assert "can't be built a second time" in text


def scanned(strategy, model):
    train_step = fa.train_step(token_loss, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.3))
    state = train_step.init(seed=0)
    batches = fa.shard([batch_of(0, 0, rows=4)])
    try:
        for state, _ in fa.scan(train_step, state, batches, steps=2):
            pass
    except errors.CapabilityError:
        return "probed", train_step.live_state.step
    return "trained", state.step


def test_scan_probes_before_step_0(pools):
    strategy = fa.context(2, cut=CUT)
    assert pools.run(2, scanned, strategy, Net) == [("trained", 2)] * 2
    assert pools.run(2, scanned, strategy, CountsFromZero) == [("probed", 0)] * 2


def changes_its_batch(model, tokens):
    tokens.clamp_(max=7)  # in place, so a second forward of the same rows sees others
    return loss_fn(model, tokens)


class Infers(Block):
    """The size of a head is what is left, so a rank with all heads' number computes with half heads."""

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def of_inferring_blocks():
    model = GPT()
    model.blocks = nn.ModuleList(Infers() for _ in range(2))
    return model


def by_hand(plan, loss):
    """The first call of a loop without `fa.scan`."""
    model = fa.distribute(of_inferring_blocks, fa.tensor(2, plan))
    train_step = fa.train_step(loss, model=model, optimizer=fa.sgd(0.3))
    state = train_step.init(seed=0)
    try:
        state, metrics = train_step(state, rows_of(0, 0, rows=2))
    except errors.FnaccelError as error:
        return str(error)
    return float(metrics["loss"])


def test_a_plan_without_the_number_of_heads_raises_in_a_loop_by_hand(pools):
    """It trained wrongly: each rank took its heads for all of them."""
    plan = {name: style for name, style in PLAN.items() if style != "/"}
    for text in pools.run(2, by_hand, plan, loss_fn):
        assert "the cut model has the loss" in text
        assert '"*.heads": "/"' in text


def test_a_loss_that_changes_its_batch_is_not_accused(pools):
    assert all(isinstance(loss, float) for loss in pools.run(2, by_hand, PLAN, changes_its_batch))
