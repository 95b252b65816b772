"""Which calls of attention reach the tokens of all ranks, and which stay on one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.testing import oracle_run
from tests.strategies.context import borrower
from tests.strategies.context.model import CUT, Net, batch_of, loss_fn
from tests.tiny_models import whole_params

ROWS, LENGTH, WIDTH, STEPS = 3, 8, 8, 2


class Encoder(nn.Module):
    """torch's own encoder layer, which has a fast path of its own in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, batch):
        return self.layer(batch["x"], src_key_padding_mask=batch["hidden"])


class ByName(nn.Module):
    """Attention that was imported by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        return self.out(borrower.attend(*self.inp(batch["x"])[:, None].chunk(3, -1))[:, 0])


class Crossing(nn.Module):
    """Tokens attend to a memory that every rank has whole, and the memory to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.memory = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        memory = self.memory(batch["memory"])[:, None]
        memory = F.scaled_dot_product_attention(memory, memory, memory)
        return F.scaled_dot_product_attention(self.inp(batch["x"])[:, None], memory, memory)[:, 0]


class Dense(nn.Module):
    """3-d attention, whose values are wider than its keys, under a square mask of the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH + 2, WIDTH)

    def forward(self, batch):
        query, rest = self.inp(batch["x"]).split([WIDTH // 2 - 1, 3 * WIDTH // 2 + 1], -1)
        key, value = rest.split([WIDTH // 2 - 1, WIDTH + 2], -1)
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2)
        return self.out(F.scaled_dot_product_attention(query, key, value, visible))


def data(step):
    generator = torch.Generator().manual_seed(step)
    hidden = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    hidden[1, -3:] = True
    return {
        "x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
        "hidden": hidden,
        "memory": torch.randn(ROWS, 5, WIDTH, generator=generator),
    }


def squares(model, batch):
    out = model(batch)
    return fa.Mean((out * batch["x"].cos()).sum() + out.square().sum(), weight=out.shape[0] * out.shape[1])


def trained(build, strategy):
    train_step = fa.train_step(squares, model=fa.distribute(build, strategy), optimizer=fa.sgd(0.05))
    state = train_step.init(seed=0)
    losses = []
    for step in range(STEPS):
        state, metrics = train_step(state, data(step))
        losses.append(float(metrics["loss"]))
    score = fa.evaluate(train_step, state, squares, fa.shard([data(9)]))
    looked = train_step.look(state, lambda model: model(data(9)))
    return losses, whole_params(state), float(score), looked


def strategies(methods):
    cut = {"x": 1, "hidden": 1}
    return [str(fa.context(2, cut=cut, method=method)) for method in methods]


CASES = [
    (Encoder, ("gather", "ring", "heads")),
    (ByName, ("gather",)),
    (Crossing, ("gather", "ring", "heads")),
    (Dense, ("gather", "ring")),
]


@pytest.mark.parametrize(
    ("build", "strategy"), [(build, text) for build, methods in CASES for text in strategies(methods)]
)
def test_attention_of_many_kinds(pools, build, strategy):
    expected = oracle_run(build, squares, [[data(step)] for step in range(STEPS)], lr=0.05)
    for losses, params, score, looked in pools.run(2, trained, build, strategy):
        assert losses == pytest.approx(expected.losses, abs=1e-5)
        for name, value in expected.params.items():
            torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-5)
        model = build()
        model.load_state_dict(params)
        with torch.no_grad():
            loss = squares(model, data(9))
            torch.testing.assert_close(looked, model(data(9)), atol=1e-5, rtol=1e-5)
        assert score == pytest.approx(float(loss.total / loss.weight), abs=1e-5)


def dropped(method):
    """Losses of two calls of one step on one batch, with dropout in attention."""
    strategy = fa.context(2, cut=CUT, method=method)
    train_step = fa.train_step(
        loss_fn, model=fa.distribute(lambda: Net("causal", 0.5), strategy), optimizer=fa.sgd(0.0)
    )
    state = train_step.init(seed=0)
    batch = batch_of(0, 0)
    first = train_step.look(state, train_step.as_loss(loss_fn), batch)
    state, metrics = train_step(state, batch)
    return float(metrics["loss"]), float(first.total)


@pytest.mark.parametrize("method", ["gather", "heads"])
def test_dropout_in_attention(pools, method):
    (loss, part), (same, other) = pools.run(2, dropped, method)
    assert loss == same
    assert part != other  # each rank has other tokens


def untouched():
    """Whether torch's functions are its own again, after a loss that failed and one that did not."""
    before = (
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch.backends.mha.get_fastpath_enabled(),
    )
    seen = []

    def loss(model, batch):
        seen.append(F.scaled_dot_product_attention is before[0])
        if fail:
            raise ValueError("on purpose")
        return loss_fn(model, batch)

    train_step = fa.train_step(loss, model=fa.distribute(Net, fa.context(2, cut=CUT)), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    fail = True
    with pytest.raises(ValueError, match="on purpose"):
        train_step(state, batch_of(0, 0))
    fail = False
    train_step(state, batch_of(0, 0))
    now = (
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch.backends.mha.get_fastpath_enabled(),
    )
    return now == before, seen


def test_torch_is_left_as_it_was(pools):
    for same, seen in pools.run(2, untouched):
        assert same
        assert seen == [False] * 3  # the probe calls the loss of the second step once more


def lent():
    """A loss that borrows a model: its attention reaches the tokens of all ranks as well."""

    def imitate(model, batch, given):
        output, target = model(batch), given["teacher"](batch)
        return fa.Mean((output - target).square().sum(), weight=output.shape[0] * output.shape[1])

    results = []
    for strategy in ("ddp(2)", str(fa.context(2, cut=CUT))):
        teacher = fa.train_step(loss_fn, model=fa.distribute(Net, "ddp(2)"), optimizer=fa.sgd(0.1))
        learner = fa.train_step(imitate, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
        given = {"teacher": teacher.init(seed=1)}
        state = learner.init(seed=0)
        for step in range(2):
            state, metrics = learner(state, batch_of(step, 0), given=given)
        results.append((float(metrics["loss"]), whole_params(state)))
    return results


def test_a_lent_model(pools):
    for (loss, params), (same, others) in pools.run(2, lent):
        assert same == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert fa.tree.allclose(params, others, atol=1e-6)


def of_pair(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=y.numel())


def of_tensor(model, x):
    return fa.Mean(model(x).square().sum(), weight=x.shape[0] * x.shape[1])


def of_nested(model, batch):
    return of_tensor(model, batch["in"]["x"])


def step_of(loss, strategy, batch):
    train_step = fa.train_step(
        fa.accumulate(loss, 2),
        model=fa.distribute(lambda: nn.Linear(WIDTH, 1), strategy),
        optimizer=fa.sgd(0.1),
    )
    state, metrics = train_step(train_step.init(seed=0), batch)
    return float(metrics["loss"]), whole_params(state)


@pytest.mark.parametrize("kind", ["tuple", "list", "tensor", "nested"])
def test_batches_of_many_kinds(pools, kind):
    x = data(0)["x"]
    y = x.sum(-1, keepdim=True)
    batch, cut, loss = {
        "tuple": ((x, y), {0: 1, 1: 1}, of_pair),
        "list": ([x, y], {"*": 1}, of_pair),
        "tensor": (x, {"": 1}, of_tensor),
        "nested": ({"in": {"x": x}, "scale": 0.5}, {"in/*": 1}, of_nested),
    }[kind]
    expected = pools.run(1, step_of, loss, "local", batch)[0]
    for value, params in pools.run(2, step_of, loss, str(fa.context(2, cut=cut)), batch):
        assert value == pytest.approx(expected[0], abs=1e-5)
        assert fa.tree.allclose(params, expected[1], atol=1e-6)
