"""Wrong plans, sizes and products of tensor parallelism: three lines, before anything changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.strategies.tensor.models import (
    CUT_LOGITS,
    GPT,
    PLAN,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    loss_fn,
    rows_of,
)
from tests.tiny_models import whole_params


def started(strategy, model=GPT, step=loss_fn, optimizer=None, *, calls=0):
    """The error of `init`, or of the first call."""
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.sgd(0.1))
    try:
        state = train_step.init(seed=0)
        for number in range(calls):
            state, _ = train_step(state, rows_of(number, 0, rows=2))
    except errors.FnaccelError as error:
        return type(error).__name__, str(error)
    return "", ""


class Tied(GPT):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class Scaled(GPT):
    """Blocks with arithmetic of their own."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.scale = nn.Parameter(torch.ones(WIDTH))
        self.own = Own()


def parametrized():
    model = GPT()
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    return model


def bounded():
    model = GPT()
    model.embed.max_norm = 1.0
    return model


def with_dtensors():
    from torch.distributed.tensor import distribute_module, init_device_mesh

    return distribute_module(GPT(), init_device_mesh("cpu", (2,)))


WRONG = {
    "no module": (PLAN | {"block.*": "colwise"}, GPT, "matches no module", "blocks"),
    "no style": ({"embed": "columns"}, GPT, "no style is called 'columns'", "colwise"),
    "no plan": ("gtp2", GPT, "no plan is called 'gtp2'", "gpt2"),
    "no plan of its own": ("auto", GPT, "GPT brings no plan", "plan={pattern: style"),
    "a bare parameter": (PLAN | {"blocks.*.scale": 0}, Scaled, "is no dimension of a layer's weight", '{"*.up.weight": 0'),
    "a bare parameter with a style": (
        PLAN | {"blocks.*.scale": "colwise"}, Scaled,
        "names the parameter blocks.0.scale, and a plan names layers: arithmetic of your own can't be cut", "write an axis",
    ),
    "a weight of your own": (
        PLAN | {"own.weight": 0}, Scaled, "own is a tests.strategies.tensor.test_errors.Own, which has no style", "torch.nn.Linear",
    ),
    "a weight with a style": (
        {name: style for name, style in PLAN.items() if "up" not in name} | {"blocks.*.up.weight": "colwise"}, GPT,
        "names the parameter blocks.0.up.weight", '{"*.up.weight": 0}',
    ),
    "a dimension of a layer": (PLAN | {"blocks.*.up": 0}, GPT, "is no dimension of a layer's weight", '{"*.up": "colwise"}'),
    "a dimension of a bias": (PLAN | {"blocks.*.up.bias": 0}, GPT, "is no dimension", "for a weight"),
    "a third dimension": (PLAN | {"blocks.*.up.weight": 2}, GPT, "'blocks.*.up.weight': 2 is no dimension", "0 or 1"),
    "a lone style": ("colwise", GPT, "'colwise' is a style, and a plan says which layers have it", '{"*.up": "colwise", ...}'),
    "a norm": (PLAN | {"norm": "colwise"}, GPT, "norm is a torch.nn.modules.normalization.LayerNorm", "torch.nn.Linear"),
    "columns without rows": (
        {name: style for name, style in PLAN.items() if style != "rowwise"}, GPT,
        "is a column layer, and no row layer takes its output", "rowwise",
    ),
    "tied, one cut": ({"embed": "vocab"}, Tied, "are one parameter, of which the plan has one", "both"),
    "tied, cut in two ways": (
        {"embed": "colwise", "head": "colwise_gather"}, Tied, "are one parameter, cut in two ways", "alike",
    ),
    "nothing": ({}, GPT, "the plan names no layer", "colwise"),
    "one of several models": (PLAN, {"lm": GPT}, "the pattern 'embed' matches no module", "'lm/embed'"),
    "a computed weight": (PLAN, parametrized, "computed from other parameters", "replicate"),
    "rows of a norm": ({"embed": "colwise"}, bounded, "max_norm or sparse gradients", "replicate"),
    "DTensors": (PLAN, with_dtensors, "is sharded already", "factory"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_plans(pools, name):
    plan, model, message, fix = WRONG[name]
    kinds = pools.run(2, tried, plan, model)
    for _, text in kinds:
        assert message in text
        assert "where:" in text
        assert fix in text.partition("fix:")[2]


def tried(plan, model):
    try:
        return started(fa.tensor(2, plan), model)
    except errors.FnaccelError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("plan", [None, 3, ("up", "colwise"), {3: "colwise"}, [("up",)]])
def test_plans_of_another_type(plan):
    with pytest.raises(errors.ArgumentError, match=r"is no plan(.|\n)*fix: .*colwise"):
        fa.tensor(2, plan)


def test_where_sequences_are_cut():
    """Without the ends, column layers would join whole sequences."""
    with pytest.raises(errors.ArgumentError, match="lacks gather_output, scatter_input"):
        fa.tensor(2, PLAN, sequence=True)
    with pytest.raises(errors.ArgumentError, match="can't have degree"):
        fa.tensor(0, PLAN)


@pytest.mark.parametrize(
    ("plan", "message", "fix"),
    [
        (
            {"blocks.*.up": "colwise", "blocks.*.heads": "/"},
            "heads is 4, which 3 ranks can't divide",
            "1, 2, 4",
        ),
        ({"blocks.*.up": "colwise"}, "blocks.0.up has 64 output features, which 3 ranks", "1, 2, 4, 8"),
        ({"blocks.*.down": "rowwise"}, "blocks.0.down has 64 input features, which 3 ranks", "1, 2, 4, 8"),
        ({"blocks.*.qkv": "packed_colwise:5"}, "48 output features, which are no 5 matrices", "equal size"),
    ],
)
def test_sizes_that_do_not_divide(pools, plan, message, fix):
    for _, text in pools.run(3, started, fa.tensor(3, plan)):
        assert message in text
        assert fix in text.partition("fix:")[2]


def heads():
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=12, n_layer=1, n_head=4, vocab_size=9))


@pytest.mark.parametrize("degree", [3, -1])
def test_heads_of_a_configuration(pools, degree):
    """Also if the degree is that of the ranks: half a head would be computed with."""
    for _, text in pools.run(3, started, fa.tensor(degree), heads):
        assert "config.num_attention_heads is 4, which 3 ranks can't divide" in text


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 4)


def test_a_vocabulary_too_small(pools):
    for _, text in pools.run(3, started, fa.tensor(3, {"embed": "vocab"}), Tiny):
        assert "embed has a vocabulary of 2, too small for 3 ranks" in text


def test_products_that_can_not_be(pools):
    for _, text in pools.run(2, planned, "deepspeed(2) * tensor(1, {'up': 'colwise'})"):
        assert "lays models out itself, and tensor cuts their parameters" in text
    for _, text in pools.run(2, planned, "fsdp(1, init='rank0') * tensor(2, {'up': 'colwise'})"):
        assert "sends whole parameters" in text
    for _, text in pools.run(2, planned, "tensor(2, {'up': 'colwise'})", fp8=True):
        assert "fp8 replaces linear layers, and tensor cuts them" in text


def planned(strategy, *, fp8=False):
    step = (
        fa.with_precision(loss_fn, fa.transforms.Float8(recipe="tensorwise", emulate=True))
        if fp8
        else loss_fn
    )
    try:
        fa.train_step(step, model=fa.distribute(GPT, strategy), optimizer=fa.sgd(0.1))
    except errors.FnaccelError as error:
        return type(error).__name__, str(error)
    return "", ""


def reads_logits(model, tokens):
    return F.log_softmax(model(tokens[:, :-1]), dim=-1).mean()


def test_logits_of_a_part_are_not_read(pools):
    for _, text in pools.run(2, started, fa.tensor(2, CUT_LOGITS), step=reads_logits, calls=1):
        assert "have different columns of the logits, and log_softmax needs all of them" in text
        assert "colwise_gather" in text


def odd_length(model, tokens):
    return loss_fn(model, tokens[:, :-1])


def test_a_sequence_that_does_not_divide(pools):
    strategy = fa.tensor(2, SEQUENCE, sequence=True)
    for _, text in pools.run(2, started, strategy, step=odd_length, calls=1):
        assert "a sequence of 7 can't be cut in 2" in text


def test_a_forward_among_whole_parameters(pools):
    for text in pools.run(2, looked):
        assert "a forward ran while whole parameters are shown" in text


def looked():
    train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, fa.tensor(2, PLAN)), optimizer=fa.sgd(0.1))
    state = train_step.init()
    try:
        train_step.look(state, lambda model: model(rows_of(0, 0)[:, :-1]), whole=True)
    except errors.CapabilityError as error:
        return str(error)
    return ""


def swap(module):
    for block in module.blocks:
        block.up = nn.Linear(16, 64)


def test_layers_replaced_by_a_transform(pools):
    step = fa.Transform("swap", fa.Phase.MODULE, apply=swap)(loss_fn)
    for _, text in pools.run(2, started, fa.tensor(2, PLAN), step=step):
        assert "transform swap replaced a Linear whose parameters a model axis has cut" in text


def trained_twice():
    """A built module, of another value on each rank, and again after `close`."""
    torch.manual_seed(torch.distributed.get_rank())
    module = GPT()
    train_step = fa.train_step(
        loss_fn, model=fa.distribute(module, fa.tensor(2, PLAN)), optimizer=fa.sgd(0.1)
    )
    state, _ = train_step(train_step.init(seed=0), rows_of(0, 0))
    params = whole_params(state)
    train_step.close()
    again = started(fa.tensor(2, PLAN), module)
    return params, again


def test_a_built_module(pools):
    """Rank 0's values count, and a module that was cut can't be trained by another train step."""
    (first, again), (second, _) = pools.run(2, trained_twice)
    assert fa.tree.allclose(first, second, rtol=0, atol=0)
    assert "GPT is sharded already" in again[1]


class Draws(nn.Module):
    """Records random numbers drawn inside of the region of column and row layers, and outside."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.p = nn.Linear(2, 4), nn.Linear(4, 1), 0.5
        self.inside, self.outside = [], []

    def forward(self, x):
        hidden = self.up(x)
        self.inside.append(float(torch.rand(())))
        out = self.down(hidden)
        self.outside.append(float(torch.rand(())))
        return out


def drawn():
    torch.manual_seed(0)  # equal values on both ranks
    model = Draws()
    plan = {"up": "colwise", "down": "rowwise"}
    train_step = fa.train_step(
        fa.accumulate(lambda m, x: m(x).square().mean(), 2),
        model=fa.distribute(lambda: model, fa.tensor(2, plan)), optimizer=fa.sgd(0.1),
    )  # fmt: skip
    train_step(train_step.init(), torch.ones(4, 2))
    return model.inside[-2:], model.outside[-2:]  # the probe has called it before the two micro-batches


def test_random_numbers_within_layers_differ_between_ranks(pools):
    """Each rank drops other heads and features, and outside of the layers all ranks drop the same."""
    (inside, outside), (other_inside, other_outside) = pools.run(2, drawn)
    assert outside == other_outside
    assert len({*inside, *other_inside, *outside}) == 6


FORGOTTEN = {name: style for name, style in SEQUENCE.items() if style != "sequence"}


@pytest.mark.parametrize(
    ("plan", "sequence", "name"),
    [
        (FORGOTTEN, True, "blocks.0.norm1.weight"),
        (
            {"embed": "colwise_gather", "blocks.*.up": "colwise"} | PLAN | {"blocks.*.down": "rowwise"},
            False,
            "",
        ),
    ],
)
def test_gradients_of_which_ranks_have_different_ones(pools, plan, sequence, name):
    """A norm on a part of the sequence, which the plan does not mark, would drift apart on the ranks."""
    for kind, text in pools.run(2, started, fa.tensor(2, plan, sequence=sequence), calls=1):
        if not name:
            assert (kind, text) == ("", "")
        else:
            assert f"different gradients of {name}" in text
            assert "replicate_partial" in text


def out_of_range(plan):
    """What a token, and then a target, raises that is one more than the vocabulary has."""
    train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, fa.tensor(2, plan)), optimizer=fa.sgd(0.1))
    state, messages = train_step.init(), []
    for place in (0, -1):
        rows = rows_of(0, 0)
        rows[0, place] = VOCABULARY
        try:
            train_step(state, rows)
        except IndexError as error:
            messages.append(str(error))
    return messages


def test_tokens_outside_of_the_vocabulary(pools):
    """Raise as torch's functions do: no rank has their row."""
    for token, target in pools.run(2, out_of_range, CUT_LOGITS):
        assert token == "a token is outside of the vocabulary of 31: from 1 to 31"
        assert target == "a target is outside of the vocabulary of 31: from 1 to 31"
