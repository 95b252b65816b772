"""Programs that describe a step: an optimizer from parts, rules of layout, keys, and numbers that the loss reads."""

from __future__ import annotations

import torch

import fnaccel as fa
from tests.parity.programs.raw_loop import (
    ROWS,
    by_hand,
    by_optimizer,
    loader_of,
    net,
    params_of,
    rows_of,
    sgd_,
    squares,
)
from tests.tiny_models import batch_of, loss_fn, program, whole_params

# -- 6: LAMB from parts, with a mask, lookahead, centred gradients and a skipped update -------------------------


def lamb(strategy, transform, folder):
    o = fa.optim
    optimizer = o.chain(
        o.clip_norm(1.0),
        o.centralize(),
        o.scale_by_adam(eps=1e-6),
        o.add_decayed_weights(0.01, mask="*weight"),
        o.trust_ratio(),
        o.lookahead(every=2),
        lr=fa.schedules.linear(0.1, 0.02, total=4),
    )
    train_step = program(transform(fa.skip_nonfinite(loss_fn)), strategy=strategy, optimizer=optimizer)
    state = train_step.init(seed=0)
    losses = []
    for number in range(5):
        factor = float("nan") if number == 2 else 1.0
        state, metrics = train_step(state, rows_of(train_step, number, factor))
        losses.append(float(metrics["loss"]) if number != 2 else 0.0)
    return losses, whole_params(state)


def lamb_by_hand():
    model = net()
    params = dict(model.named_parameters())
    means, sizes = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
    slow = params_of(model)
    losses, updates = [], 0
    for number in range(5):
        if number == 2:
            losses.append(0.0)
            continue
        x, y = batch_of(ROWS, seed=number)
        loss = squares(model(x), y) / ROWS
        losses.append(float(loss.detach()))
        grads = torch.autograd.grad(loss, list(params.values()))
        share = min(1.0, 1.0 / float(torch.cat([g.flatten() for g in grads]).norm()))
        lr = 0.1 + (0.02 - 0.1) * updates / 4
        updates += 1
        with torch.no_grad():
            for (name, p), g in zip(params.items(), grads, strict=True):
                g = g * share
                g = g - g.mean(dim=1, keepdim=True) if g.ndim > 1 else g
                means[name] = 0.9 * means[name] + 0.1 * g
                sizes[name] = 0.999 * sizes[name] + 0.001 * g * g
                size = sizes[name] / (1 - 0.999**updates)
                move = means[name] / (1 - 0.9**updates) / (size.sqrt() + 1e-6)
                move = move + 0.01 * p if name.endswith("weight") else move
                ratio = p.norm() / move.norm() if p.norm() > 0 and move.norm() > 0 else 1.0
                p -= lr * ratio * move
                if updates % 2 == 0:
                    slow[name] = slow[name] + 0.5 * (p - slow[name])
                    p.copy_(slow[name])
    return losses, params_of(model)


# -- 13: rules of layout -----------------------------------------------------------------------------------

DIMS = {"*.mix.weight": 1, "inp.*": 0}


def layout(strategy, transform, folder):
    """Weights of the blocks are sharded along their second dimension, if the strategy shards."""
    sharded = {"fsdp": fa.fsdp(dims=DIMS), "hsdp(2, 2)": fa.ddp(2) * fa.fsdp(2, dims=DIMS)}
    strategy = sharded.get(strategy, strategy)
    train_step = program(transform(loss_fn), strategy=strategy, optimizer=fa.sgd(0.1, momentum=0.9))
    state = train_step.init(seed=0)
    losses = []
    for number in range(3):
        state, metrics = train_step(state, rows_of(train_step, number))
        losses.append(float(metrics["loss"]))
    parts = {row.name: tuple(row.part) for row in fa.layout(state).rows}
    expected = [(6, 3), (3, 3)] if strategy in sharded.values() else [(6, 6), (6, 3)]
    assert [parts["blocks.0.mix.weight"], parts["inp.weight"]] == expected
    return losses, whole_params(state)


def layout_by_hand():
    return by_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


# -- 14: keys ----------------------------------------------------------------------------------------------


def loss_with_key(model, batch, *, info):
    """Dropout of the inputs: one mask for each row."""
    x, y = batch
    x = fa.random.dropout(x, 0.25, key=info.key.fold_in(info.rows))
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def keys(strategy, transform, folder):
    train_step = program(transform(loss_with_key), strategy=strategy)
    state = train_step.init(seed=0)
    losses = []
    for state, metrics in fa.scan(train_step, state, fa.shard(loader_of(21))):
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)


def mixed(bits):
    """splitmix64's mixing of 64 bits."""
    bits %= 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def mask_of(step, row, columns=3, seed=0):
    """The mask of a row: the key of the seed, with the step and the row folded in, and a count of places."""
    count = 0x9E3779B97F4A7C15
    key = mixed(seed + count)
    for number in (step, row):
        key = mixed((key ^ 0x666F6C645F696E21) + (number + 1) * count)
    return [mixed(key + place * count) / 2**64 >= 0.25 for place in range(1, columns + 1)]


def keys_by_hand():
    model = net()
    losses = []
    x, y = batch_of(21)
    for step, first in enumerate(range(0, 21, 8)):
        rows, targets = x[first : first + 8], y[first : first + 8]
        masks = torch.tensor([mask_of(step, row) for row in range(len(rows))])
        loss = squares(model(rows * masks / 0.75), targets) / len(rows)
        sgd_(model.parameters(), torch.autograd.grad(loss, list(model.parameters())))
        losses.append(float(loss.detach()))
    return losses, params_of(model)


# -- 16: extras that the loss reads ------------------------------------------------------------------------


def loss_with_extras(model, batch, *, info):
    x, y = batch
    total = (model(x) - y - info.extras["shift"]).square().sum()
    return fa.Mean(info.extras["scale"] * total, weight=len(y))


def extras(strategy, transform, folder):
    """The loss reads numbers that the loop changes."""
    train_step = program(transform(loss_with_extras), strategy=strategy)
    state = train_step.init(seed=0, extras={"scale": 1.0, "shift": 0.25})
    losses = []
    for number in range(3):
        state, metrics = train_step(state, rows_of(train_step, number))
        state = state.with_extras({"scale": 0.5 * state.extras["scale"], "shift": 0.5})
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)


def extras_by_hand():
    def total(model, x, y, number):
        return 0.5**number * squares(model(x), y + (0.25 if number == 0 else 0.5))

    return by_hand(total)
