"""The reference that is not the library: a raw PyTorch loop on the concatenated global batch.

Nothing here may use a step, a transform, a strategy or an optimizer of fnaccel: it would be blind to
their mistakes. One process, one batch a step, `.backward()`, `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import torch

from fnaccel.data.cut import join
from fnaccel.errors import UnknownNameError, nearest
from fnaccel.step.loss import Mean
from fnaccel.tree import Tree

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}
_AUTOCAST = {"fp32": None, "fp64": None, "bf16": torch.bfloat16}


@attrs.frozen(kw_only=True)
class OracleResult:
    """The reference values for a run.

    Attributes:
        losses: the loss of each step.
        grad_norms: the L2 norm of the gradient of each step, before clipping.
        params: the parameters after the last step, by name.
    """

    losses: list[float]
    grad_norms: list[float]
    params: dict[str, torch.Tensor]


def oracle_run(
    make_model: Callable[[], torch.nn.Module] | torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Sequence[Tree]],
    *,
    lr: float,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    clip: float | None = None,
    precision: Literal["fp32", "fp64", "bf16"] = "fp32",
    seed: int = 0,
    **options: Any,
) -> OracleResult:
    """Train in plain PyTorch on one process.

    Args:
        make_model: a factory, called after `torch.manual_seed(seed)`. Or a module, trained in place.
        loss_fn: `loss_fn(model, batch)` -> `Mean(total, weight)`, `(scalar, aux)` or a scalar.
        batches: one entry a step: all micro-batches of all ranks of that step, in any order. Their
            tensors, of shape `[rows, ...]`, are concatenated along dim 0.
        lr: learning rate.
        optimizer: `"sgd"` or `"adamw"`.
        clip: largest L2 norm of the gradient, or None.
        precision: `"fp32"`, `"fp64"` for a model in fp64, or `"bf16"` for `torch.autocast` around the loss.
        seed: of the model's construction.
        options: passed on to the optimizer (`weight_decay=0.0`).

    Raises:
        UnknownNameError: no such optimizer or precision.

    Example:
        >>> from fnaccel.testing import oracle_run
        >>> ragged = [{"x": torch.ones(rows, 2)} for rows in (3, 2)]
        >>> mean = lambda model, batch: model(batch["x"]).mean()
        >>> len(oracle_run(lambda: nn.Linear(2, 1), mean, [ragged] * 4, lr=0.1).losses)
        4
    """
    for name, choices, option in ((optimizer, _OPTIMIZERS, "optimizer"), (precision, _AUTOCAST, "precision")):
        if name not in choices:
            raise UnknownNameError(
                f"the oracle has no {option} {name!r}", where="oracle_run", fix=nearest(name, choices)
            )
    if isinstance(make_model, torch.nn.Module):
        model = make_model
    else:
        torch.manual_seed(seed)
        model = make_model()
    if precision == "fp64":
        model = model.double()
    rule = _OPTIMIZERS[optimizer](model.parameters(), lr=lr, **options)
    autocast = _AUTOCAST[precision]
    losses: list[float] = []
    norms: list[float] = []
    for micros in batches:
        batch = join(micros)
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            output = loss_fn(model, batch)
        loss = _scalar(output)
        rule.zero_grad()
        loss.backward()
        limit = clip if clip is not None else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        rule.step()
        losses.append(float(loss.detach()))
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    return OracleResult(losses=losses, grad_norms=norms, params=params)


def _scalar(output: Tree) -> torch.Tensor:
    if isinstance(output, Mean):
        return output.total / output.weight
    return output[0] if isinstance(output, tuple) else output
