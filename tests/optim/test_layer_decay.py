"""`fa.optim.layer_decay`: rates that fall from the head to the embeddings, against groups of torch by hand."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import fnaccel as fa
from fnaccel import errors
from fnaccel.optim.description import layers_of
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

RATES = {"inp": 0.5**3, "blocks.0": 0.5**2, "blocks.1": 0.5, "out": 1.0}
SCHEDULE = fa.schedules.linear(0.05, 0.01, 10)


def by_hand(updates=8):
    """AdamW with a group for each layer and kind of parameter. Biases don't decay."""
    torch.manual_seed(0)
    net = Net()
    named = dict(net.named_parameters())
    groups = []
    for name, value in named.items():
        share = next(share for start, share in RATES.items() if name.startswith(start))
        decay = 0.0 if name.endswith("bias") else 0.1
        groups.append({"params": [value], "share": share, "weight_decay": decay})
    rule = torch.optim.AdamW(groups, lr=0.05)
    for step in range(updates):
        for group in rule.param_groups:
            group["lr"] = SCHEDULE(step) * group["share"]
        rule.zero_grad()
        loss = loss_fn(net, batch_of(8, step))
        (loss.total / loss.weight).backward()
        rule.step()
    return {name: value.detach() for name, value in named.items()}


def trained(make, strategy="local", wrap=lambda step: step, updates=8):
    options = {"weight_decay": 0.1, "groups": {"*bias": {"weight_decay": 0.0}}}
    optimizer = fa.optim.layer_decay(0.5, make(lr=SCHEDULE, **options))
    train_step = program(wrap(loss_fn), optimizer=optimizer, strategy=strategy)
    state, metrics = train_step.init(seed=0), {}
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    for number in range(updates):
        rows = tuple(part.chunk(count)[rank] for part in batch_of(8, number))
        state, metrics = train_step(state, rows)
    return whole_params(state), metrics


def from_torch(**options):
    return fa.optim.from_torch(torch.optim.AdamW, **options)


@pytest.mark.parametrize("wrap", [lambda step: step, lambda step: fa.compile(step, scope="step")])
@pytest.mark.parametrize("make", [fa.adamw, from_torch], ids=["adamw", "from_torch"])
def test_equals_groups_by_hand(make, wrap):
    with fa.start():
        params, metrics = trained(make, wrap=wrap) if make is fa.adamw else trained(make)
    assert_close(params, by_hand(), rtol=0.0, atol=1e-6)
    rates = [float(metrics[f"lr/layer{layer}"]) for layer in range(4)]
    assert rates == pytest.approx([SCHEDULE(7) * share for share in RATES.values()])
    assert float(metrics["lr"]) == pytest.approx(SCHEDULE(7))


def on_ranks():
    with fa.start():
        return trained(fa.adamw, "fsdp")


def test_two_ranks(pools):
    for params, _ in pools.run(2, on_ranks):
        assert_close(params, by_hand(), rtol=0.0, atol=1e-6)


def test_groups_with_rates_of_their_own_fall_too():
    optimizer = fa.optim.layer_decay(0.5, fa.sgd(0.1, groups={"*bias": {"lr": 0.2}}))
    assert "layer_decay=0.5" in optimizer.describe()
    with fa.start():
        train_step = program(optimizer=optimizer)
        _, metrics = train_step(train_step.init(), batch_of(8))
    assert metrics["lr/layer2"] == 0.05
    assert metrics["lr/layer2/*bias"] == 0.1


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["wte", "h.0.a", "h.1.b", "ln_f", "head"], [0, 1, 2, 3, 3]),
        (["stem.0.w", "stem.1.w", "b.0.w", "b.1.mlp.0.w", "b.2.w", "head.0.w"], [0, 0, 1, 2, 3, 4]),
        (["b.6.w", "b.7.w", "head"], [7, 8, 9]),
        (["net/emb", "net/b.10.w", "net/b.2.w", "net/head"], [0, 11, 3, 12]),
        (["0.weight", "0.bias", "2.weight"], [1, 1, 3]),
    ],
)
def test_layers_by_name(names, layers):
    assert layers_of(names) == layers


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["encoder.0.w", "encoder.1.w", "decoder.0.w", "decoder.1.w"], "'encoder' or 'decoder'"),
        (["embed", "head"], "no parameter is in a numbered block"),
    ],
)
def test_blocks_that_are_not_clear(names, message):
    with pytest.raises(errors.ArgumentError, match=message):
        layers_of(names)


@pytest.mark.parametrize(
    ("decay", "optimizer", "message"),
    [
        (1.5, fa.sgd(0.1), r"decay=1.5 is not in \(0, 1\]"),
        (0.5, torch.optim.SGD, "is no optimizer"),
        (0.5, fa.optim.chain(fa.optim.trust_ratio(), lr=0.1), "optim.chain has one rate for all"),
        (0.5, fa.optim.optimizer_groups([("*", fa.sgd(0.1))]), "OptimizerGroups is no optimizer"),
    ],
)
def test_what_takes_no_layers(decay, optimizer, message):
    with pytest.raises(errors.ArgumentError, match=message):
        fa.optim.layer_decay(decay, optimizer)


def test_the_pure_update_takes_no_rate_in_their_place():
    with fa.start():
        train_step = program(optimizer=fa.optim.layer_decay(0.5, fa.sgd(0.1)))
        update = fa.pure(train_step)
        values, told = update(update.init(seed=0), batch_of(8))
        state, _ = train_step(train_step.init(seed=0), batch_of(8))
        assert_close(values["params"], whole_params(state), rtol=0.0, atol=1e-6)
        assert float(told["lr/layer0"]) == pytest.approx(0.1 / 8)
        with pytest.raises(errors.ArgumentError, match="each group has its own"):
            update(values, batch_of(8), lr=0.1)
