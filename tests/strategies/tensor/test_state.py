"""Optimizers, transforms and averages on parameters that tensor parallelism cuts, against one process."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from tests.strategies.tensor.models import GPT, PLAN, loss_fn, rows_of
from tests.tiny_models import whole, whole_params

STEPS, PARTS = 3, 2
STRATEGIES = {
    "tensor": (2, fa.tensor(2, PLAN)),
    "fsdp": (4, fa.fsdp(2) * fa.tensor(2, PLAN)),
    "ddp": (4, fa.ddp(2) * fa.tensor(2, PLAN)),
}


def is_matrix(name, param):
    return param.ndim == 2 and "embed" not in name and "position" not in name


def add_noise(grads, own, info):
    """Reads shapes, adds noise to each gradient, and scales each by its whole norm."""
    changed = {}
    for name, grad in grads.items():
        drawn = grad + 0.01 * torch.randn_like(grad)
        changed[name] = drawn * (0.1 * len(grad.shape) / float(whole(drawn).norm()))
    return changed, own


def clamp(params, own, info):
    for value in params.values():
        value.clamp_(min=-0.1)
    return own


def muon(lr):
    return fa.optim.optimizer_groups(
        [(is_matrix, fa.optim.from_torch(torch.optim.Muon, lr=lr)), ("*", fa.adamw(0.01))]
    )


def decayed(lr):
    return fa.adamw(lr, groups={"*bias": {"weight_decay": 0.0}, "blocks.0.*": {"lr": 0.1}})


def late():
    return fa.optim.optimizer_groups(
        [("blocks.*.qkv.*", fa.optim.starting_at(1, fa.adamw(0.01))), ("*", fa.sgd(0.1, momentum=0.9))]
    )


def loses_some(model, tokens):
    """Not finite in the second step."""
    result = loss_fn(model, tokens)
    return fa.Mean(result.total * (float("nan") if int(tokens[0, 0]) == 7 else 1.0), weight=result.weight)


CASES = {
    "sgd with momentum": lambda: (loss_fn, fa.sgd(0.1, momentum=0.9, nesterov=True), {}),
    "adam": lambda: (loss_fn, fa.adam(0.01), {}),
    "adamw": lambda: (loss_fn, fa.adamw(0.01), {}),
    "groups": lambda: (loss_fn, decayed(0.01), {}),
    "RMSprop": lambda: (loss_fn, fa.optim.from_torch(torch.optim.RMSprop, lr=0.01, eps=1e-3), {}),
    "Adagrad": lambda: (loss_fn, fa.optim.from_torch(torch.optim.Adagrad, lr=0.01), {}),
    "adafactor": lambda: (loss_fn, fa.optim.adafactor(0.01), {}),
    "Muon": lambda: (loss_fn, muon(0.02), {}),
    "starting_at": lambda: (loss_fn, late(), {}),
    "frozen": lambda: (loss_fn, fa.adamw(0.01), {"frozen": ("blocks.0.*", "*bias", "embed.*")}),
    "averages": lambda: (fa.with_ema(fa.accumulate(loss_fn, 2), 0.5), fa.adamw(0.01), {}),
    "skip_nonfinite": lambda: (fa.skip_nonfinite(loses_some), fa.adamw(0.01), {}),
    "fp16": lambda: (
        fa.clip_norm(fa.with_precision(loss_fn, fa.transforms.Precision(compute="fp16", init_scale=64.0)), 0.5),
        fa.sgd(0.1), {},
    ),
    "weight": lambda: (
        fa.with_weight(fa.accumulate(loss_fn, 2), lambda batch: batch[:, 1:].numel()), fa.sgd(0.1), {},
    ),
    "clip_value": lambda: (fa.clip_value(loss_fn, 0.01), fa.sgd(0.1), {}),
    "noise": lambda: (fa.Transform("noise", fa.Phase.GRADS, apply=add_noise)(loss_fn), fa.sgd(0.1), {}),
    "clamp": lambda: (fa.Transform("clamp", fa.Phase.UPDATE, apply=clamp)(loss_fn), fa.sgd(0.1), {}),
}  # fmt: skip

LOOSE = {"fp16": 5e-3, "Muon": 5e-3}
"""Rounding of 16 bits. Muon iterates in bf16."""


def trained(strategy, case):
    step, optimizer, options = CASES[case]()
    train_step = fa.train_step(step, model=fa.distribute(GPT, strategy), optimizer=optimizer, **options)
    state = train_step.init(seed=0)
    losses = []
    for number in range(STEPS):
        parts = [rows_of(number, part, rows=4) for part in range(PARTS)]
        parts[0][0, 0] = 7 if number == 1 else 0
        size = train_step.mesh.batch_size
        rows = torch.cat(parts).chunk(size)[train_step.mesh.batch_rank]
        state, metrics = train_step(state, rows)
        losses.append(float(metrics["loss"]))
    found = {"losses": torch.tensor(losses), "params": whole_params(state)}
    found["updates"] = torch.as_tensor(float(state.updates))
    found["opt"] = fa.tree.map_tensors(whole, dict(state.opt))
    if state.ema is not None:
        found["ema"] = {name: whole(value) for name, value in state.ema.items()}
        rows = rows_of(9, 0)
        with train_step.averaged(state):
            found["averaged"] = train_step.look(state, lambda model: model(rows[:, :-1]))
        found["plain"] = train_step.look(state, lambda model: model(rows[:, :-1]))
    return found


@pytest.fixture(scope="module")
def expected(pools):
    """The results of one process, by case."""
    results = {}

    def of(case):
        if case not in results:
            results[case] = pools.run(1, trained, "local", case)[0]
        return results[case]

    return of


@pytest.mark.long_except("^tensor|fsdp-adamw")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_are_those_of_one_process(pools, expected, strategy, case):
    ranks, described = STRATEGIES[strategy]
    oracle = expected(case)
    close = LOOSE.get(case, 2e-5)
    for found in pools.run(ranks, trained, described, case):
        torch.testing.assert_close(found, oracle, atol=close, rtol=close, equal_nan=True)
