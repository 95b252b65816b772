"""Local SGD and DiLoCo in raw PyTorch: one model a replica, and what makes them equal after some steps."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

import fnaccel as fa
from tests.tiny_models import Net, batch_of

BATCHES = ("even", "ragged", "a replica without rows")


def rows(kind, step, rank, inner=1):
    """The rows of one rank and their weights. Of some kinds ranks and steps differ. `inner` ranks are a replica."""
    count = 4 if kind == "even" else 2 + (3 * rank + step) % 5
    x, y = batch_of(count, seed=100 * step + rank)
    weights = torch.ones(count, 1)
    if kind == "a replica without rows" and (step + rank // inner) % 3 == 0:
        weights.zero_()
    return x, y, weights


def loss_fn(model, batch):
    x, y, weights = batch
    total = (weights * F.mse_loss(model(x), y, reduction="none")).sum()
    return fa.Mean(total, weight=weights.sum())


def adamw(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def replicas_by_hand(
    steps,
    every,
    batches,
    *,
    make=Net,
    clip=None,
    outer=None,
    warmup=0,
    optimizer=adamw,
    average_slots=False,
    counted=True,
):
    """The parameters of all replicas, and the losses of all rows.

    Args:
        steps, every, warmup: as for `fa.local_sgd`.
        batches: `batches(step, replica)` are the rows of one replica.
        clip: the largest norm of a replica's gradient.
        outer: makes the outer optimizer of the anchor, for DiLoCo.
        average_slots: whether slots are averaged, too.
        counted: whether replicas have one count of updates. Optimizers of torch count their own in each replica.
    """
    torch.manual_seed(0)
    anchor = make()
    count = len(batches(0))
    models = [copy.deepcopy(anchor) for _ in range(count)]
    rules = [optimizer(model.parameters()) for model in models]
    for rule in rules:
        for param in (param for group in rule.param_groups for param in group["params"]):
            zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            rule.state[param] = {"step": torch.zeros(()), **zeros}
    moves = None if outer is None else outer(anchor.parameters())
    losses = []
    for step in range(steps):
        totals = weights = 0.0
        for model, rule, batch in zip(models, rules, batches(step), strict=True):
            loss = loss_fn(model, batch)
            totals, weights = totals + loss.total.item(), weights + loss.weight.item()
            if float(loss.weight) == 0:  # it keeps in step with the others
                for state in rule.state.values() if counted else ():
                    state["step"] += 1
                continue
            rule.zero_grad()
            (loss.total / loss.weight).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if not torch.isfinite(norm):
                continue
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            rule.step()
        losses.append(totals / weights)
        done = step + 1
        if done > warmup and (done - warmup) % every:
            continue
        for target, *own in zip(anchor.parameters(), *(model.parameters() for model in models), strict=True):
            mean = sum(param.detach() for param in own) / count
            target.grad = target.detach() - mean
            target.data.copy_(mean if moves is None or done <= warmup else target)
        if moves is not None and done > warmup:
            moves.step()
        for target, *own in zip(anchor.parameters(), *(model.parameters() for model in models), strict=True):
            for param in own:
                param.data.copy_(target.detach())
        for params in zip(*(model.parameters() for model in models), strict=True):
            states = [rule.state[param] for rule, param in zip(rules, params, strict=True)]
            updates = max(state["step"] for state in states)
            for state in states if counted else ():
                state["step"] = updates.clone()  # a replica may have left one out
            if average_slots:
                for name in ("exp_avg", "exp_avg_sq"):
                    mean = sum(state[name] for state in states) / count
                    for state in states:
                        state[name].copy_(mean)
    return [dict(model.named_parameters()) for model in models], losses
