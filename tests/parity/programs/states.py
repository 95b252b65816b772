"""Programs on states: old ones, arithmetic on them, two models, and checkpoints."""

from __future__ import annotations

import copy

import attrs
import torch
from torch import nn

import fnaccel as fa
from tests.parity.programs.raw_loop import ROWS, net, params_of, rows_of, sgd_, squares
from tests.tiny_models import batch_of, loss_fn, program, whole_params

# -- 1: the loop, and old states ---------------------------------------------------------------------------


def loop(strategy, transform, folder):
    """Go back to the state before a batch whose loss is too high."""
    train_step = program(transform(loss_fn), strategy=strategy, optimizer=fa.adamw(0.01))
    state = train_step.init(seed=0)
    losses = []
    for number in range(4):
        before = fa.snapshot(state)
        state, metrics = train_step(state, rows_of(train_step, number, factor=50.0 if number == 2 else 1.0))
        if metrics["loss"] > 100:
            state = train_step.adopt(before)
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)


def loop_by_hand():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(4):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        x, y = batch_of(ROWS, seed=number)
        loss = squares(model(x), y * (50.0 if number == 2 else 1.0)) / ROWS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss > 100:
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
        losses.append(float(loss.detach()))
    return losses, params_of(model)


def donated(strategy, transform, folder):
    """A state that a step has taken is passed once more."""
    train_step = program(transform(loss_fn), strategy=strategy)
    state = train_step.init(seed=0)
    for number in range(2):
        train_step(state, rows_of(train_step, number))


# -- 7: a transform with a state, across a restore -----------------------------------------------------------


def add_momentum(grads, own, info):
    own = {name: 0.9 * own[name] + grad for name, grad in grads.items()}
    return own, own


def zeros_of(params):
    return fa.tree.map(torch.zeros_like, dict(params))


heavy = fa.Transform("heavy", fa.Phase.GRADS, apply=add_momentum, init=zeros_of)


def own_transform(strategy, transform, folder):
    """A run in two parts. The second batch has a NaN, and its update is left out."""
    losses = []
    for part in range(2):
        train_step = program(transform(fa.skip_nonfinite(heavy(loss_fn))), strategy=strategy)
        state = train_step.init(seed=part)
        if part:
            state = fa.restore(folder, like=state)
        for number in range(2):
            factor = float("nan") if (part, number) == (0, 1) else 1.0
            state, metrics = train_step(state, rows_of(train_step, 2 * part + number, factor))
            losses.append(float(metrics["loss"]) if factor == 1.0 else 0.0)
        if not part:
            fa.save(folder, state)
        momentum = fa.tree.map(fa.tree.whole, state.transforms["heavy"])
        params = whole_params(state)
        train_step.close()
    return losses, params | {f"momentum of {name}": value for name, value in momentum.items()}


def own_transform_by_hand():
    model = net()
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    losses = []
    for number in range(4):
        if number == 1:
            losses.append(0.0)
            continue
        x, y = batch_of(ROWS, seed=number)
        loss = squares(model(x), y) / ROWS
        grads = torch.autograd.grad(loss, list(model.parameters()))
        momentum = {n: 0.9 * m + g for (n, m), g in zip(momentum.items(), grads, strict=True)}
        sgd_(model.parameters(), momentum.values())
        losses.append(float(loss.detach()))
    return losses, params_of(model) | {f"momentum of {name}": value for name, value in momentum.items()}


# -- 8: arithmetic on states -------------------------------------------------------------------------------


def arithmetic(strategy, transform, folder):
    """Reptile: a few updates on one task, and a part of the way to where they lead."""
    train_step = program(transform(loss_fn), strategy=strategy)
    state = train_step.init(seed=0)
    read = []
    for task in range(2):
        before = fa.snapshot(state)
        for number in range(2):
            state, metrics = train_step(state, rows_of(train_step, 2 * task + number))
            read.append(float(metrics["loss"]))
        start, end = before.params, state.params
        read.append(float(fa.tree.norm(fa.tree.axpy(-1.0, start, end))))
        between = fa.tree.lerp(start, end, 0.25)
        state = train_step.adopt(attrs.evolve(state, params=between))
    return read, whole_params(state)


def arithmetic_by_hand():
    model = net()
    read = []
    for task in range(2):
        before = params_of(model)
        for number in range(2):
            x, y = batch_of(ROWS, seed=2 * task + number)
            loss = squares(model(x), y) / ROWS
            sgd_(model.parameters(), torch.autograd.grad(loss, list(model.parameters())))
            read.append(float(loss.detach()))
        moves = {name: p - before[name] for name, p in params_of(model).items()}
        read.append(float(torch.cat([move.flatten() for move in moves.values()]).norm()))
        model.load_state_dict({name: p + 0.25 * moves[name] for name, p in before.items()})
    return read, params_of(model)


# -- 10: two models ----------------------------------------------------------------------------------------


def critic_model():
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))


def generate(model, batch, given):
    x, _ = batch
    return fa.Mean(-given["critic"](model(x)).sum(), weight=len(x))


def criticise(model, batch, given):
    x, y = batch
    fake = given["generator"](x).detach()
    return fa.Mean((model(fake) - model(y)).sum() + model(y).square().sum(), weight=len(y))


def gan(strategy, transform, folder):
    generator = program(transform(generate), strategy=strategy, optimizer=fa.adam(0.01))
    critic = program(transform(criticise), strategy=strategy, optimizer=fa.adam(0.01), model=critic_model)
    g, c = generator.init(seed=0), critic.init(seed=1)
    losses = []
    for number in range(2):
        batch = rows_of(generator, number)
        c, metrics = critic(c, batch, given={"generator": g})
        losses.append(float(metrics["loss"]))
        g, metrics = generator(g, batch, given={"critic": c})
        losses.append(float(metrics["loss"]))
    return losses, whole_params(g) | {f"critic {name}": value for name, value in whole_params(c).items()}


def gan_by_hand():
    generator = net()
    torch.manual_seed(1)
    critic = critic_model()
    of_generator, of_critic = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, critic))
    losses = []
    for number in range(2):
        x, y = batch_of(ROWS, seed=number)
        of_critic.zero_grad()
        loss = (critic(generator(x).detach()) - critic(y) + critic(y).square()).mean()
        loss.backward()
        of_critic.step()
        losses.append(float(loss.detach()))
        of_generator.zero_grad()
        loss = -critic(generator(x)).mean()
        loss.backward()
        of_generator.step()
        losses.append(float(loss.detach()))
    return losses, params_of(generator) | {f"critic {name}": p for name, p in params_of(critic).items()}


# -- 15: a part of a checkpoint ----------------------------------------------------------------------------


class Taller(nn.Module):
    """`Net` with its layers under another name, and another last layer."""

    def __init__(self):
        super().__init__()
        self.stem = net(seed=5)
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.stem(x))


def partial_restore(strategy, transform, folder):
    """Train one model, and begin another one with its first layers."""
    small = program(transform(loss_fn), strategy=strategy)
    state, _ = small(small.init(seed=0), rows_of(small, 0))
    fa.save(folder, state)
    large = program(transform(loss_fn), strategy=strategy, model=Taller)
    state = fa.restore(
        folder,
        like=large.init(seed=1),
        only="params",
        skip=["*last*", "*out*"],
        rename={"^params/": "params/stem."},
    )
    losses = []
    for number in range(1, 3):
        state, metrics = large(state, rows_of(large, number))
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)


def partial_restore_by_hand():
    small = net()
    x, y = batch_of(ROWS)
    sgd_(small.parameters(), torch.autograd.grad(squares(small(x), y) / ROWS, list(small.parameters())))
    large = Taller()
    taken = {name: p for name, p in params_of(small).items() if "out" not in name}
    large.stem.load_state_dict(taken, strict=False)
    losses = []
    for number in range(1, 3):
        x, y = batch_of(ROWS, seed=number)
        loss = squares(large(x), y) / ROWS
        sgd_(large.parameters(), torch.autograd.grad(loss, list(large.parameters())))
        losses.append(float(loss.detach()))
    return losses, params_of(large)
