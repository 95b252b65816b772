"""What a pipeline can't do raises by name: at once, at `init`, or in the first step. Never a wrong number."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.world import watcher
from tests.strategies.pipeline import models
from tests.strategies.pipeline.models import loss_fn, rows_of
from tests.strategies.tensor.models import GPT, VOCABULARY, WIDTH

Error = fa.errors.CapabilityError


def made(model, loss, strategy, **options):
    return fa.train_step(loss, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.1), **options)


def first_step(model, loss, strategy="pipeline(2)"):
    train_step = made(model, loss, strategy)
    state = train_step.init(seed=0)
    return train_step(state, rows_of(0, 0))


def hurried(fn, *args):
    """Call a function on a rank that soon finds that it waits for a failed one."""
    with mock.patch.object(watcher, "PATIENCE", 0.5), mock.patch.object(watcher, "INTERVAL", 0.2):
        return fn(*args)


def raised(pools, *args, ranks=2, fn=first_step):
    """The error of the lowest rank that names the cause: others may say that they waited for it."""
    with pytest.raises(fa.errors.FnaccelError) as caught:
        pools.run(ranks, hurried, fn, *args)
    return f"{type(caught.value).__name__}: {caught.value}"


# -- the loss -----------------------------------------------------------------------------------------------


def twice(model, tokens):
    first = loss_fn(model, tokens)
    return fa.Mean(first.total + loss_fn(model, tokens.flip(0)).total, weight=first.weight)


def penalised(model, tokens):
    own = loss_fn(model, tokens)
    return fa.Mean(own.total + 0.1 * model.embed.weight.square().sum(), weight=own.weight)


def one_block(model, tokens):
    hidden = model.blocks[3](model.embed(tokens))
    return fa.Mean(hidden.square().sum(), weight=len(tokens))


class Outside(nn.Module):
    """Its residual connection is outside of the blocks, and joins an activation of the stage before."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Decides(GPT):
    """What runs after the blocks depends on the embedding, and no gradient goes there."""

    def __init__(self):
        super().__init__(4)

    def choose(self, early, x):
        return torch.where(early.detach().argmax(-1, keepdim=True) > 3, x, -x)

    def forward(self, tokens):
        early = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.choose(early, x))


class Branches(Decides):
    """The same, as a branch of Python's."""

    def choose(self, early, x):
        return x if early.detach().mean() > 0 else -x


class Copies(Decides):
    """The same, by a tensor that is changed in place."""

    def choose(self, early, x):
        scale = torch.ones(3)
        scale[0] = early.detach().abs().max()
        scale[1:].add_(early.detach().abs().max())
        return x * scale.mean()


class Writes(Decides):
    """The same, written into views, and into the result of another function."""

    def choose(self, early, x):
        scale, other, listed = torch.ones(4), torch.zeros(()), [torch.ones(())]
        scale[1:][..., :2].copy_(early.detach().abs().max())
        torch.mul(early.detach().max(), 2, out=other)
        torch._foreach_add_(listed, [early.detach().max()])
        parts = {"view": scale, "out": other, "list": listed[0]}
        return torch.where(parts[self.kind].max() > 0.5, x, -x)


class WritesToView(Writes):
    kind = "view"


class WritesToResult(Writes):
    kind = "out"


class WritesToList(Writes):
    kind = "list"


def measured(model, tokens):
    own = loss_fn(model, tokens)
    return fa.Mean(own.total, weight=own.weight, aux={"size": model.embed.weight.detach().norm()})


class Late(GPT):
    """A module that runs before the blocks, and stands after them."""

    def __init__(self):
        super().__init__(4)
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.late(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Centred(GPT):
    """A buffer that is registered before the blocks, and moves after them."""

    def __init__(self):
        super().__init__(4)
        self.register_buffer("center", torch.zeros(WIDTH))
        self.blocks, self.head = self._modules.pop("blocks"), self._modules.pop("head")

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.center.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.head(x - self.center)


class Repeated(GPT):
    """Two blocks, each of which runs twice."""

    def __init__(self):
        super().__init__(2)
        self.blocks = nn.ModuleList([*self.blocks, *self.blocks])


class Backwards(GPT):
    """Its blocks run from the last to the first."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


def backwards():
    return Backwards(4)


LOSSES = {
    "twice": (models.deep_gpt, twice, "blocks.0 runs twice in one loss"),
    "a parameter of another stage": (models.deep_gpt, penalised, "the loss depends on embed.weight"),
    "a block by itself": (models.deep_gpt, one_block, "blocks.3"),
    "a residual connection outside": (Outside, loss_fn, "the loss depends on the output of blocks.0"),
    "a choice by another stage": (Decides, loss_fn, "the loss depends on embed.weight"),
    "a branch by another stage": (Branches, loss_fn, "the loss depends on embed.weight"),
    "a copy from another stage": (Copies, loss_fn, "the loss depends on embed.weight"),
    "a view with values of another stage": (WritesToView, loss_fn, "the loss depends on embed.weight"),
    "a result with values of another stage": (WritesToResult, loss_fn, "the loss depends on embed.weight"),
    "a list with values of another stage": (WritesToList, loss_fn, "the loss depends on embed.weight"),
    "a metric of another stage": (models.deep_gpt, measured, "the loss depends on embed.weight"),
    "a module in another order": (Late, loss_fn, "the loss depends on late."),
    "a buffer of another stage": (
        Centred,
        loss_fn,
        "the buffer center is on rank 0 of pp, and another stage moves it",
    ),
    "blocks that run twice": (Repeated, loss_fn, "blocks holds one block several times"),
    "blocks in another order": (backwards, loss_fn, "blocks.3 of stage 1 runs before blocks.1 of stage 0"),
}


def built_first(model, loss, strategy="pipeline(2)"):
    """A built module: the first step does not compare the cut model with the whole one."""
    torch.manual_seed(0)
    return first_step(model(), loss, strategy)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("how", [first_step, built_first])
def test_a_loss_that_stages_cannot_share_raises_by_name(pools, name, how):
    model, loss, text = LOSSES[name]
    assert text in raised(pools, model, loss, fn=how)


def looked():
    train_step = made(models.deep_gpt, loss_fn, "pipeline(2)")
    return train_step.look(train_step.init(seed=0), lambda model: model.embed.weight.norm())


def test_a_look_at_a_parameter_of_another_stage_raises_by_name(pools):
    assert "depends on embed.weight, which lies on another stage" in raised(pools, fn=looked)


# -- the model ------------------------------------------------------------------------------------------------


class TwoLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"block": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
        self.decoder = nn.ModuleDict({"block": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 4)


def two_gpts():
    return {"a": GPT, "b": GPT}


MODELS = {
    "several lists": (TwoLists, "pipeline(2)", "encoder.block, decoder.block", "split=('decoder.block.0',)"),
    "no blocks": (Flat, "pipeline(2)", "no blocks in a ModuleList", "name the modules where stages begin"),
    "fewer blocks": (GPT, "pipeline(4)", "2 blocks, for 4 stages", "fewer stages"),
    "no such path": (
        GPT,
        "pipeline(2, split=('block.1',))",
        "no module 'block.1'",
        "did you mean 'blocks.1'",
    ),
    "too many paths": (GPT, "pipeline(2, split=('blocks.0', 'blocks.1'))", "2 paths for 2 stages", "1 path"),
    "no such stage": (
        GPT,
        "pipeline(2, split={'head': 2})",
        "'head' can't be on stage 2 of 2",
        "from 0 to 1",
    ),
    "an empty stage": (
        GPT,
        "pipeline(2, split={'head': 0})",
        "stage 1 of 2 gets no block",
        "give each stage a path",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_split_raises_at_init(pools, name):
    model, strategy, what, fix = MODELS[name]
    ranks = 4 if "(4)" in strategy else 2
    message = raised(pools, model, loss_fn, strategy, ranks=ranks)
    assert what in message
    assert fix in message


# -- the options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"degree": 0},
        {"virtual": 0},
        {"virtual": 2},
        {"schedule": "zero_bubble"},
        {"split": "odd"},
        {"schedule": "2f2b"},
        {"weights": {"body": 1}},
        {"weights": {"head": -1}},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_raises_at_once(options):
    with pytest.raises(fa.errors.ArgumentError, match=r"fa\.pipeline"):
        fa.pipeline(**options)


@pytest.mark.parametrize(
    "text",
    [
        "pipeline(4, split='size', schedule='gpipe')",
        "pipeline(2, split=('blocks.4', 'blocks.9'), schedule='interleaved', virtual=2) * fsdp(2)",
        "pipeline(2, split={'embed': 0, 'blocks.0': 1}, weights={'head': 2.5})",
    ],
)
def test_a_pipeline_prints_as_the_text_that_makes_it(text):
    assert str(fa.strategy(text)) == text


def each():
    return fa.accumulate(loss_fn, 2, sync="each")


def of_rows():
    return fa.per_example(loss_fn, clip=1.0)


def as_values(model, tokens):
    return fa.Mean(sum(value.sum() for value in fa.params(model).values()), weight=len(tokens))


def values():
    return as_values


def whole_step():
    return fa.compile(loss_fn, "step", backend="eager")


def blocks():
    return fa.compile(loss_fn, "block", backend="eager")


def whole_loss():
    return fa.compile(loss_fn, "loss", backend="eager")


def started(make, strategy, model=models.deep_gpt):
    train_step = made(model() if model is two_gpts else model, make(), strategy)
    state = train_step.init(seed=0)
    return train_step(state, rows_of(0, 0))


def plain():
    return loss_fn


ZERO_BUBBLE = "pipeline(2, schedule='zero_bubble', virtual=2)"
REFUSED = {
    "gradients of each micro-batch": (
        each,
        "pipeline(2)",
        "stages average gradients after the last micro-batch",
    ),
    "gradients of rows": (of_rows, "pipeline(2)", "pp"),
    "parameters as values": (values, "pipeline(2)", "ranks along pp compute parts of one model"),
    "the step as one graph": (whole_step, "pipeline(2)", "compile"),
    "the loss as one graph": (whole_loss, "pipeline(2)", "compile"),
    "a block as a graph in halves": (blocks, ZERO_BUBBLE, "compile"),
    "shards that are gone": (plain, f"{ZERO_BUBBLE} * fsdp(2)", "computes gradients of weights apart"),
    "two models": (plain, "pipeline(2)", "a pipeline splits one model"),
    "deepspeed": (plain, "pipeline(2) * deepspeed(stage=0)", "deepspeed runs the step by itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_do_is_refused(pools, name):
    make, strategy, text = REFUSED[name]
    model = two_gpts if name == "two models" else models.deep_gpt
    assert text in raised(pools, make, strategy, model, ranks=4 if "fsdp" in strategy else 2, fn=started)


@pytest.mark.parametrize("fn", [first_step, built_first])
def test_a_simulated_rank_shows_its_plan_and_takes_no_step(fn):
    with (
        fa.simulate(ranks=4),
        pytest.raises(Error, match=r"simulated rank gets no activations(.|\n)*fa\.estimate"),
    ):
        fn(models.deep_gpt, loss_fn, "pipeline(4)")


def lent():
    teacher = made(models.deep_gpt, loss_fn, "pipeline(2)")
    other = teacher.init(seed=0)
    student = fa.train_step(
        lambda model, tokens, given: fa.Mean(
            F.mse_loss(model(tokens), given["teacher"](tokens), reduction="sum"), weight=len(tokens)
        ),
        model=fa.distribute(models.deep_gpt, "ddp"),
        optimizer=fa.sgd(0.1),
    )
    return student(student.init(seed=0), rows_of(0, 0), given={"teacher": other})


def test_a_model_on_stages_is_not_lent(pools):
    assert "can't be lent" in raised(pools, fn=lent)


def of_the_rank(ranks, virtual, micro_batches):
    """Another order of backwards on rank 0 than on the others. It takes as long, and the plan shows no picture."""
    order = range(micro_batches)
    backwards = order if torch.distributed.get_rank() else order[::-1]
    return [[("F", rank, i) for i in order] + [("B", rank, i) for i in backwards] for rank in range(ranks)]


def refused_in_a_step():
    train_step = made(
        models.deep_gpt, fa.accumulate(loss_fn, 16), f"pipeline(schedule='{__name__}:of_the_rank')"
    )
    state = train_step.init(seed=0)
    with pytest.raises(fa.errors.ArgumentError) as caught:
        train_step(state, rows_of(0, 0, rows=16))
    return str(caught.value)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_schedule_that_differs_between_ranks_raises_on_all(pools, ranks):
    messages = pools.run(ranks, refused_in_a_step)
    assert len({*messages}) == 1
    assert "of_the_rank" in messages[0]
    assert "has other lists on rank 1 of the stages than on rank 0" in messages[0]


def disagree():
    rank = torch.distributed.get_rank()
    return started(plain, f"pipeline(2, split=('blocks.{rank + 1}',))")


def test_ranks_that_split_in_other_places_raise_with_both(pools):
    message = raised(pools, fn=disagree)
    assert "blocks.1" in message
    assert "blocks.2" in message
