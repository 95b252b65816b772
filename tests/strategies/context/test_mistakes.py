"""Mistakes under context parallelism: each raises before anything changes, and says how to go on."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.cli.main import main
from tests.strategies.context.model import CUT, Net, batch_of, loss_fn

BATCH = batch_of(0, 0)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(2, 2)
        self.attend = F.scaled_dot_product_attention


class Weights(nn.Module):
    """nn.MultiheadAttention returns its weights unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, batch):
        x = self.embed(batch["tokens"])
        return self.attend(x, x, x)[0].sum(-1, keepdim=True)


class Cls(nn.Module):
    """One token more than the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)

    def forward(self, batch):
        x = F.pad(self.embed(batch["tokens"]), (0, 0, 1, 0))[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


class Local(Cls):
    """A causal mask of this rank's tokens by this rank's tokens."""

    def forward(self, batch):
        x = self.embed(batch["tokens"])[:, None]
        mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, mask)[:, 0]


class Both(Cls):
    def forward(self, batch):
        x = self.embed(batch["tokens"])[:, None]
        return F.scaled_dot_product_attention(x, x, x, batch["keys"][:, None, None], is_causal=True)[:, 0]


class Latents(Cls):
    def forward(self, batch):
        x = self.embed(batch["tokens"])[:, None]
        return F.scaled_dot_product_attention(x[:, :, :1], x, x, is_causal=True)[:, 0]


def total(model, batch):
    return model(batch).sum()


def rows_loss(model, batch):
    return fa.Mean(loss_fn(model, batch).total, weight=len(batch["labels"]))


def rows_aux(model, batch):
    loss = loss_fn(model, batch)
    return fa.Mean(loss.total, loss.weight, aux={"x": fa.Mean(loss.total.detach(), len(batch["labels"]))})


def metric_of_rows(model, batch):
    return {"accuracy": fa.Mean(model(batch).sum(), weight=len(batch["labels"]))}


def call(loss, build, strategy, batch, evaluate=False):
    """The error of a step, and whether the state lives on with its values."""
    try:
        train_step = fa.train_step(loss, model=fa.distribute(build, strategy), optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
    except fa.errors.FnaccelError as error:
        return type(error).__name__, str(error)
    before = {name: value.clone() for name, value in state.params.items()}
    try:
        if evaluate:
            fa.evaluate(train_step, state, metric_of_rows, fa.shard([batch]))
        else:
            train_step(state, batch)
    except fa.errors.FnaccelError as error:
        assert fa.tree.allclose(before, dict(state.params), rtol=0, atol=0)
        return type(error).__name__, str(error)
    return None


def text(method="gather", cut=CUT, balance=True):
    return str(fa.context(2, cut=cut, method=method, balance=balance))


def short(length):
    return {name: value[:, :length] for name, value in BATCH.items()}


NAMED = {"tokens": 1, "labels": 1, "positions": 1}
CASES = [
    (loss_fn, Net, text(), short(6), "labels has 6 tokens along dim 1, which 2 ranks can't share in 4 equal chunks", "pad or cut rows to 4 or 8 tokens; or fa.context(2, balance=False)"),
    (loss_fn, Net, text(balance=False), short(7), "can't share in 2 equal chunks", "pad or cut rows to 6 or 8 tokens"),
    (loss_fn, Net, text(), short(2), "labels has 2 tokens", "pad or cut rows to 4 tokens"),
    (loss_fn, Net, text(balance=False), short(2), "labels has 2 tokens", "pad or cut rows to 4 tokens"),
    (loss_fn, Net, text(cut=None), {"tokens": BATCH["tokens"]}, "no leaf of the batch is known to have tokens (tokens: of shape [2, 8])", 'fa.context(2, cut={"tokens": 1'),
    (loss_fn, Net, text(cut=NAMED), BATCH, "keys of shape [2, 8] is as long as the leaves that are cut", "cut={'keys': 1} if it has one entry for each token; {'keys': None}"),
    (loss_fn, Net, text(cut=CUT | {"label": 1}), BATCH, "'label' fits no leaf of the batch", "did you mean 'labels'?"),
    (loss_fn, Net, text(cut=CUT | {"tokens": 2}), BATCH, "tokens is of shape [2, 8], and has no dim 2 to cut", "a dimension that they have"),
    (rows_loss, Net, text(), BATCH, "the weight 2 is the number of rows, and 2 ranks have tokens of each row", "weigh by tokens"),
    (rows_aux, Net, text(), BATCH, "the weight 2 is the number of rows", "weigh by tokens"),
    (fa.with_weight(loss_fn, lambda b: len(b["labels"])), Net, text(), BATCH, "the weight 2 is the number of rows", "weigh by tokens"),
    (fa.compile(rows_loss, "step", backend="aot_eager"), Net, text(), BATCH, "the weight 2 is the number of rows", "weigh by tokens"),
    (total, Keeping, text(), BATCH, "the model.attend keeps scaled_dot_product_attention", "by its name"),
    (total, Weights, text(), BATCH, "nn.MultiheadAttention returns its weights", "need_weights=False"),
    (total, Cls, text(), BATCH, "attention over 5 tokens, and this rank's part of a sequence has 4", "class token"),
    (total, Local, text(), BATCH, "a mask of shape [4, 4] does not say", "is_causal=True for a causal mask; or a mask of 4 rows and 8 keys"),
    (total, Latents, text(cut=CUT | {"memory": None}), BATCH | {"memory": torch.zeros(2, 4, 3)}, "as many as this rank's part of a sequence has", "pad one of the two"),
    (total, Both, text(), BATCH, "is_causal=True or a mask, not both", "leave one of the two out"),
    (total, Latents, text(), BATCH, "is_causal=True of 1 rows and 4 keys", "as many rows as keys"),
    (loss_fn, lambda: Net("causal", 0.5), text("ring"), BATCH, "draws dropout", 'fa.context(method="gather")'),
    (total, Local, text("heads"), BATCH, "a mask of shape [4, 4] does not say", "is_causal=True"),
    (total, Cls, text("heads"), short(8), "attention over 5 tokens", "class token"),
]  # fmt: skip


def calls(indices):
    return [call(*CASES[index][:4]) for index in indices]


def test_mistakes_in_a_step(pools):
    for results in pools.run(2, calls, list(range(len(CASES)))):
        for (*_, problem, fix), result in zip(CASES, results, strict=True):
            assert result is not None, problem
            lines = result[1].splitlines()
            assert problem in lines[0].replace("an attention mask", "a mask"), result
            assert lines[1].startswith("  where: ")
            assert fix in lines[2], result


class ThreeHeads(Cls):
    def forward(self, batch):
        x = self.embed(batch["tokens"])[:, None].expand(-1, 3, -1, -1)
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


def test_heads_that_ranks_can_not_share(pools):
    for kind, message in pools.run(2, call, total, ThreeHeads, text("heads"), BATCH):
        assert kind == "CapabilityError"
        assert "2 ranks can't share 3 heads of attention" in message


def test_a_metric_that_counts_rows(pools):
    for kind, message in pools.run(2, call, loss_fn, Net, text(), BATCH, True):
        assert kind == "LossError"
        assert "the weight 2 is the number of rows" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"degree": 0}, "an axis can't have degree 0"),
        ({"method": "rings"}, "did you mean 'ring'?"),
        ({"cut": {"tokens": 0}}, "does not say along which dimension"),
        ({"cut": {}}, "does not say along which dimension"),
        ({"cut": {"tokens": "1"}}, "does not say along which dimension"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(fa.errors.FnaccelError) as raised:
        fa.context(**arguments)
    assert message in str(raised.value)


def products():
    messages = []
    for strategy in ("context(1) * context(2)", "deepspeed(1) * context(2)"):
        with pytest.raises(fa.errors.FnaccelError) as raised:
            fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
        messages.append(str(raised.value))
    return messages


def test_products_that_make_no_sense(pools):
    for twice, runtime in pools.run(2, products):
        assert "axis 'cp' stands twice" in twice
        assert "deepspeed runs the step by itself" in runtime
        assert "multiply context with ddp, fsdp or hsdp" in runtime


@pytest.mark.parametrize(
    "value",
    [
        fa.context(2),
        fa.context(2, cut={"tokens": 1, "keys": None}, method="ring", balance=False),
        fa.ddp(2) * fa.fsdp(2) * fa.context(2, cut={0: 1, 1: 1}),
        fa.context(cut={"": 1}),
    ],
    ids=str,
)
def test_text_hash_and_pickle(value):
    assert fa.strategy(str(value)) == value
    assert hash(fa.strategy(str(value))) == hash(value)
    assert pickle.loads(pickle.dumps(value)) == value


def test_one_rank_is_the_whole():
    """Of degree 1 nothing is cut, and lengths need not divide."""
    with fa.start():
        train_step = fa.train_step(rows_loss, model=fa.distribute(Net, "context(1)"), optimizer=fa.sgd(0.1))
        _, metrics = train_step(train_step.init(seed=0), short(5))
        assert float(metrics["weight"]) == 2
        assert train_step.as_loss(rows_loss) is rows_loss


def plan():
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, text("ring")), optimizer=fa.sgd(0.1))
    return str(train_step.plan)


def test_the_plan(pools):
    first, second = pools.run(2, plan)
    assert first == second
    assert (
        "note: context: each of 2 ranks has 2 chunks of each sequence, one from each end; an attention takes "
        "the keys and values of 1 other ranks one by one, in the backward with their gradients" in first
    )


@pytest.mark.parametrize(("machine", "crosses"), [(2, False), (4, False), (1, True)])
def test_a_group_that_crosses_machines(machine, crosses, capsys):
    path = "tests/strategies/context/model.py"
    flags = ["--ranks", "4", "--per-machine", str(machine), "--strategy", "ddp(2) * context(2)"]
    assert main(["plan", f"{path}:loss_fn", "--model", f"{path}:Net", *flags]) == 0
    printed = capsys.readouterr().out
    assert ("a group crosses machines" in printed) is crosses
    assert "1 all-gather of keys and values, and 1 reduce-scatter in the backward" in printed
