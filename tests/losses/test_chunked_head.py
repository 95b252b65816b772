"""Steps whose heads have no whole logits, beside those that have, on every strategy."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError
from tests.losses import models
from tests.losses.models import trained

HEAD = fa.transforms.chunked_head(rows=5)
OWN = fa.transforms.chunked_head("head", rows=5)
CUT = "tensor(2, plan={'embed': 'vocab', 'head': 'vocab'})"
GATHERED = "tensor(2, plan={'embed': 'vocab', 'head': 'colwise_gather'})"
BF16, FP16 = fa.with_precision("bf16"), fa.with_precision("fp16")


def check(pools, make, loss_fn, strategy, ranks, *parts, expected=None, beside=(), tolerance=1e-5):
    """Losses and parameters are those of whole logits.

    Args:
        pools, make, loss_fn, strategy, ranks, parts: what runs.
        expected: the loss function of whole logits, if another.
        beside: the transforms of the step with whole logits.
        tolerance: absolute and relative.
    """
    copies = 2 if "fsdp" in strategy or "ddp" in strategy else 1
    against = "ddp" if copies == 2 else "local"
    losses, params = pools.run(copies, trained, make, expected or loss_fn, against, *beside)[0]
    for found, values in pools.run(ranks, trained, make, loss_fn, strategy, *parts):
        assert found == pytest.approx(losses, abs=tolerance, rel=tolerance)
        torch.testing.assert_close(values, params, atol=tolerance, rtol=tolerance)


@pytest.mark.long_except("llama|gemma2|granite")
@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [
        (models.gpt2, models.labelled),
        (models.llama, models.labelled),
        (models.llama, models.summed),
        (models.gemma2, models.labelled),
        (models.granite, models.labelled),
        (models.mixtral, models.labelled),
        (models.bert, models.labelled),
        (models.t5, models.labelled),
    ],
)
def test_models_of_transformers_train_as_with_whole_logits(pools, make, loss_fn):
    check(pools, make, loss_fn, "local", 1, HEAD)


@pytest.mark.long_except(r"sequence|tensor\(2\)-2|ddp")
@pytest.mark.parametrize(
    ("make", "strategy", "ranks"),
    [
        (models.gpt2, "ddp", 2),
        (models.gpt2, "fsdp", 2),
        (models.llama, "fsdp(units=('Linear',))", 2),
        (models.gpt2, "tensor(2)", 2),
        (models.llama, "tensor(2, sequence=True)", 2),
        (models.llama, "fsdp(2, units=('Linear',)) * tensor(2)", 4),
        (models.gpt2, "pipeline(2)", 2),
        (models.mixtral, "pipeline(2)", 2),
        (models.gpt2, "pipeline(2) * fsdp(2)", 4),
    ],
)
def test_strategies_train_as_one_process_with_whole_logits(pools, make, strategy, ranks):
    check(pools, make, models.labelled, strategy, ranks, HEAD)


@pytest.mark.parametrize(
    ("loss_fn", "strategy", "ranks", "parts"),
    [
        (models.indexed, "local", 1, (OWN,)),
        (models.by_head, "local", 1, ()),
        (models.by_head, "local", 1, (OWN,)),
        (models.capped, "local", 1, (OWN,)),
        (models.moved, "local", 1, (OWN,)),
        (models.moved, "fsdp", 2, (OWN,)),
        (models.capped, CUT, 2, ()),
        (models.by_head, "fsdp", 2, ()),
        (models.indexed, CUT, 2, ()),
        (models.by_head, CUT, 2, ()),
        (models.indexed, GATHERED, 2, (OWN,)),
        (models.by_head, GATHERED, 2, ()),
    ],
)
def test_a_tied_head_of_ones_own(pools, loss_fn, strategy, ranks, parts):
    whole = models.indexed if loss_fn is models.by_head else loss_fn
    check(pools, models.Own, loss_fn, strategy, ranks, *parts, expected=whole)


SMALLER = (fa.accumulate(2), fa.clip_norm(0.5))
BESIDE = {
    "remat": ("local", 1, (fa.remat(),), (), 1e-5),
    "bf16": ("local", 1, (BF16,), (BF16,), 1e-3),
    "fp16": ("local", 1, (FP16,), (FP16,), 1e-3),
    "captured": ("local", 1, (fa.compile(),), (), 1e-5),
    "compiled loss": ("local", 1, (fa.compile(scope="loss"),), (), 1e-5),
    "accumulated": ("local", 1, SMALLER, SMALLER, 1e-5),
    "captured fsdp": ("fsdp", 2, (fa.compile(),), (), 1e-5),
    "captured tensor": ("tensor(2)", 2, (fa.compile(),), (), 1e-5),
}


@pytest.mark.long_except("remat|fp16|accumulated")
@pytest.mark.parametrize(
    ("strategy", "ranks", "parts", "beside", "tolerance"), BESIDE.values(), ids=BESIDE.keys()
)
def test_transforms_beside_it(pools, strategy, ranks, parts, beside, tolerance):
    check(
        pools, models.gpt2, models.labelled, strategy, ranks, HEAD, *parts, beside=beside, tolerance=tolerance
    )


def hooked(kind):
    model = models.Own()
    if kind == "output":
        model.head.register_forward_hook(lambda _, args, output: output * 0.5)
    elif kind == "input":
        model.head.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    else:
        nn.utils.spectral_norm(model.head)
    return model


@pytest.mark.parametrize("kind", ["output", "input", "weight"])
@pytest.mark.parametrize(("loss_fn", "parts"), [(models.indexed, (OWN,)), (models.by_head, ())])
def test_hooks_on_a_head_run_once(pools, kind, loss_fn, parts):
    check(pools, functools.partial(hooked, kind), loss_fn, "local", 1, *parts, expected=models.indexed)


def unit_called_with_others():
    return trained(models.llama, called_before, "fsdp(units=('Linear',))", HEAD)


def called_before(model, batch):
    params = {name: value * 1.1 for name, value in fa.params(model).items()}
    out = fa.call(model, params, input_ids=batch["input_ids"], use_cache=False)
    logits = out.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten())


def test_a_unit_of_fsdp_never_takes_other_parameters(pools):
    try:
        found = pools.run(2, unit_called_with_others)
    except CapabilityError as error:
        assert "called with parameters that it has no longer" in str(error)  # noqa: PT017
    else:
        expected = pools.run(2, trained, models.llama, called_before, "ddp")
        assert found[0][0] == pytest.approx(expected[0][0], abs=1e-5)


class Large(nn.Module):
    """Whose weight gets a gradient that fp16 can't hold, before the factor of a mean makes it small."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, 8)
        self.head = nn.Linear(8, models.VOCABULARY, bias=False)
        with torch.no_grad():
            self.embed.weight.fill_(100.0)
            self.head.weight.zero_()
        self.embed.weight.requires_grad = False

    def forward(self, ids):
        return self.head(self.embed(ids))


def large(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def steps_of_fp16(*parts):
    step = fa.chain(*parts, FP16)(large)
    train_step = fa.train_step(step, model=fa.distribute(Large, "local"), optimizer=fa.sgd(1e-4))
    state = train_step.init(seed=0)
    for _ in range(20):
        state, metrics = train_step(state, torch.full((8, 256), 3))
    return float(metrics["loss"]), state.updates


def test_fp16_has_room_for_the_gradient_of_a_weight(pools):
    expected, counted = pools.run(1, steps_of_fp16)[0]  # which lowers the loss scale first
    loss, updates = pools.run(1, steps_of_fp16, fa.transforms.chunked_head("head", rows=1024))[0]
    assert updates == 20 > counted
    assert loss <= expected


def evaluated(strategy):
    """What a model of chunked logits returns where no gradients are computed."""
    step = HEAD(models.labelled)
    train_step = fa.train_step(step, model=fa.distribute(models.llama, strategy), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    rows = models.rows_of(0, 0)

    def looked(model):
        whole = model(**rows)
        tokens = model.generate(rows["input_ids"][:, :3], max_new_tokens=4, do_sample=False)
        return whole.logits, whole.loss, tokens

    return train_step.look(state, looked)


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("tensor(2)", 2)])
def test_without_gradients_logits_are_whole(pools, strategy, ranks):
    rows = models.rows_of(0, 0)
    for logits, loss, tokens in pools.run(ranks, evaluated, strategy):
        whole = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten())
        assert loss == pytest.approx(float(whole), rel=1e-5)
        assert logits.shape == (*rows["input_ids"].shape, models.VOCABULARY)
        assert tokens.shape == (4, 7)


def log_probabilities(strategy, by_head):
    """A loss by log-probabilities of rows, as of DPO."""

    def loss_fn(model, batch):
        labels = batch["labels"][:, 1:]
        hidden = model.body(batch["input_ids"])[:, :-1]
        if by_head:
            each = fa.losses.log_probabilities(hidden, model.head, labels, rows=5)
        else:
            logits = model.head(hidden).log_softmax(-1)
            each = logits.gather(-1, labels.clamp(0)[..., None])[..., 0].masked_fill(labels == -100, 0)
        return -F.logsigmoid(each.sum(1)).mean()

    return trained(models.Own, loss_fn, strategy)


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("fsdp", 2), (CUT, 2), (GATHERED, 2)])
def test_log_probabilities_of_rows(pools, strategy, ranks):
    losses, params = pools.run(
        ranks if strategy == "fsdp" else 1, log_probabilities, "ddp" if strategy == "fsdp" else "local", False
    )[0]
    for found, values in pools.run(ranks, log_probabilities, strategy, True):
        assert found == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(values, params, atol=1e-5, rtol=1e-5)


# -- mistakes -----------------------------------------------------------------------------------------------


def reads(model, batch):
    logits = model(**batch).logits
    return logits.log_softmax(-1).mean()


def indexes(model, batch):
    return model(**batch).logits[..., 0].mean()


def weighs(model, batch):
    logits = model(**batch).logits.flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), weight=torch.ones(models.VOCABULARY))


def one_step(step, make):
    model = fa.distribute(make, fa.local())
    train_step = fa.train_step(step, model=model, optimizer=fa.sgd(0.1))
    train_step(train_step.init(seed=0), models.rows_of(0, 0))


def shifts(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"].flatten())


def compares(model, batch):
    return (model(batch["input_ids"]) == 0).sum()


def joins(model, batch):
    logits = model(batch["input_ids"])
    return torch.cat([logits, logits]).sum()


def biased(model, batch):
    bias = torch.zeros(models.VOCABULARY)
    return fa.losses.linear_cross_entropy(model.body(batch["input_ids"]), model.head, batch["labels"], bias)


class Patched(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Headless(models.Own):
    def __init__(self):
        super().__init__()
        self.head = Patched(models.WIDTH, models.VOCABULARY)


@pytest.mark.parametrize(
    ("make", "step", "kind", "text"),
    [
        (models.llama, HEAD(reads), CapabilityError, r"log_softmax needs them(?s:.*)fa.losses.linear_cross_entropy"),
        (models.llama, HEAD(indexes), CapabilityError, "an index into the vocabulary needs them"),
        (models.llama, HEAD(weighs), CapabilityError, "cross_entropy with weights"),
        (models.Own, HEAD(models.indexed), ArgumentError, r"which module of a Own is its head(?s:.*)head="),
        (models.Own, fa.transforms.chunked_head("lm")(models.indexed), ArgumentError, "the model has no lm"),
        (models.Own, OWN(shifts), ArgumentError, r"the target has the shape \[32\], for logits of \[28, 31\]"),
        (models.Own, OWN(compares), CapabilityError, "a comparison needs them"),
        (models.Own, OWN(joins), CapabilityError, "cat needs them"),
        (models.Own, biased, ArgumentError, "a bias beside a head"),
        (Headless, OWN(models.indexed), CapabilityError, "the head is a Patched"),
        (Headless, models.by_head, CapabilityError, "the head is a Patched"),
    ],
    ids=["reads", "indexes", "weighs", "no head", "no path", "shifts", "compares", "joins", "biased", "patched", "patched, by head"],
)  # fmt: skip
def test_a_mistake_raises_by_name(make, step, kind, text):
    with fa.start(), pytest.raises(kind, match=text):
        one_step(step, make)


def test_a_label_outside_of_a_cut_vocabulary_raises(pools):
    with pytest.raises(IndexError, match=f"a target is outside of the vocabulary of {models.VOCABULARY}"):
        pools.run(2, outside)


def outside():
    def loss_fn(model, batch):
        return models.labelled(model, batch | {"labels": batch["labels"] + models.VOCABULARY})

    return trained(models.gpt2, loss_fn, "tensor(2)", HEAD)


def test_the_stand_in_names_its_shape():
    seen = []

    def loss_fn(model, batch):
        logits = model(**batch).logits
        seen.append((logits.shape, logits.size(-1), logits.dim(), logits.float().dtype, logits.device.type))
        return models.labelled(model, batch)

    with fa.start():
        one_step(HEAD(loss_fn), models.llama)
    assert set(seen) == {((4, 8, models.VOCABULARY), models.VOCABULARY, 3, torch.float32, "cpu")}
