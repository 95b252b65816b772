"""`sgd`, `adam`, `adamw`: explicit state on torch's fused kernels.

Averaging over the weight, unscaling and clipping arrive as one multiplier, which the kernel
applies as it reads the gradient. Skipping is decided on the device, by `found_inf`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch

from fnaccel import _torch
from fnaccel.errors import CapabilityError, require
from fnaccel.optim import kernels
from fnaccel.optim.description import Group, Optimizer, options_of, refuse_unknown
from fnaccel.optim.schedules import Rate
from fnaccel.step.loss import Scalar
from fnaccel.tree import Tree

_exists = functools.partial(operator.is_not, None)
_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps", "xla"})


@attrs.frozen
class FusedKernel:
    """One of torch's fused optimizers, by name: `"sgd"`, `"adam"` or `"adamw"`."""

    traceable: ClassVar[bool] = True
    name: str

    def bind(self, groups: Sequence[Group]) -> BoundFused:
        """Make zeroed slots beside each parameter shard."""
        return BoundFused(self.name, groups)


class _Work:
    """One group, as the fused kernel takes it. Shards without elements are left out."""

    __slots__ = ("first", "indices", "options", "second", "shards", "whole")

    def __init__(self, name: str, group: Group, total: int, slots: dict[str, dict[str, Any]]) -> None:
        self.options = dict(group.options)
        members = [m for m in group.members if m.leaf.shard.numel()]
        self.indices = [m.index for m in members]
        self.whole = self.indices == list(range(total))
        self.shards = [m.leaf.shard for m in members]
        kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        if name == "sgd":
            kinds = ("momentum_buffer",) if self.options["momentum"] else ()
        lists: list[list[torch.Tensor]] = [[], []]
        for member in group.members:
            moments = slots.setdefault(member.leaf.name, {})
            for place, kind in enumerate(kinds):
                zeros = torch.zeros_like(member.leaf.shard)
                moments[kind] = member.leaf.like(zeros)
                if zeros.numel():
                    lists[place].append(zeros)
        self.first, self.second = lists


class BoundFused:
    """A fused optimizer over the shards of real parameters."""

    reads_host = False

    def __init__(self, name: str, groups: Sequence[Group]) -> None:
        self.slots: dict[str, dict[str, Any]] = {}
        total = sum(len(group.members) for group in groups)
        self._work = [_Work(name, group, total, self.slots) for group in groups]
        self._run = _sgd if name == "sgd" else _ADAMS[name]
        for work in self._work:
            for shard in work.shards:
                if shard.device.type not in _DEVICES:
                    raise CapabilityError(
                        f"torch has no fused {name} on {shard.device.type}",
                        where=f"fa.{name}",
                        fix="fa.from_torch(...) with the class of torch.optim",
                    )

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,
        updates: torch.Tensor,
    ) -> None:
        """One update in place: see `Bound.apply`."""
        divisor: torch.Tensor | None = None
        if multiplier is not None:
            # the kernels divide by their `grad_scale`, an fp32 tensor
            if isinstance(multiplier, torch.Tensor):
                divisor = multiplier.reciprocal().float()
            else:
                divisor = torch.tensor(1.0 / multiplier if multiplier else math.inf, dtype=torch.float32)
        for work, rate in zip(self._work, rates, strict=True):
            # not `None in grads`: that compares every tensor with None, at 12 us each
            if work.whole and all(map(_exists, grads)):
                taken, chosen = grads, None
            else:
                chosen = [i for i, index in enumerate(work.indices) if grads[index] is not None]
                taken = [grads[work.indices[i]] for i in chosen]
                if len(chosen) == len(work.indices):
                    chosen = None
            if not taken:
                continue
            shards, first, second = work.shards, work.first, work.second
            if chosen is not None:
                shards = [shards[i] for i in chosen]
                first = [first[i] for i in chosen] if first else first
                second = [second[i] for i in chosen] if second else second
            # the multiplier and skip are on the device, and offloaded parameters are not
            where = shards[0].device
            scale, off, count = _at(divisor, where), _at(skip, where), _at(updates, where)
            if scale is not None and shards[0].dtype is torch.float64:
                exact = multiplier.to(where) if isinstance(multiplier, torch.Tensor) else multiplier
                taken, scale = _torch.foreach_mul(taken, exact), None
            elif scale is not None and torch.compiler.is_compiling():
                taken, scale = _torch.foreach_div(taken, scale), None
            self._run(shards, taken, first, second, count, rate, work.options, scale, off)


def _at(value: Tree, device: torch.device) -> Any:
    """A tensor on a device. `to` would take 0.6 us if it is there already."""
    return value if value is None or value.device == device else value.to(device)


def _sgd(
    shards: list[torch.Tensor],
    grads: Sequence[Any],
    first: list[torch.Tensor],
    second: list[torch.Tensor],  # noqa: ARG001 - one signature for all kernels
    updates: torch.Tensor,  # noqa: ARG001
    rate: Scalar,
    options: Mapping[str, Any],
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    momentum, decay, nesterov = options["momentum"], options["weight_decay"], options["nesterov"]
    kernels.sgd_(shards, grads, first, rate, momentum, decay, nesterov, scale, skip)


def _adam_like(kernel: Callable[..., Any]) -> Any:
    def run(
        shards: list[torch.Tensor],
        grads: Sequence[Any],
        first: list[torch.Tensor],
        second: list[torch.Tensor],
        updates: torch.Tensor,
        rate: Scalar,
        options: Mapping[str, Any],
        scale: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        beta1, beta2 = options["betas"]
        decay, eps = options["weight_decay"], options["eps"]
        kernel(shards, grads, first, second, updates, rate, beta1, beta2, decay, eps, scale, skip)

    return run


_ADAMS = {"adam": _adam_like(kernels.adam_), "adamw": _adam_like(kernels.adamw_)}

Groups = Mapping[str, Mapping[str, Any]] | None


def sgd(
    lr: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    groups: Groups = None,
    **unknown: Any,
) -> Optimizer:
    """Stochastic gradient descent, as `torch.optim.SGD` without dampening.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        momentum, nesterov, weight_decay: as in torch.
        groups: `{pattern: options}`. Patterns match parameter names as a shell does. The first that
            matches holds, and `"lr"` may be among the options. A pattern that matches no trained parameter
            raises ArgumentError at `init`, and the message lists the names.

    Raises:
        ArgumentError: Nesterov without momentum, or a rate that is none.
        ConfigError: an option that it does not take.

    Example:
        >>> fa.sgd(0.1, momentum=0.9, groups={"*bias": {"weight_decay": 0.0}})
    """
    refuse_unknown("fa.sgd", unknown, ("momentum", "nesterov", "weight_decay", "groups"))
    require(not nesterov or momentum > 0, "Nesterov needs momentum", "fa.sgd", "momentum=0.9")
    defaults = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    options, checked = options_of("sgd", defaults, groups)
    return Optimizer(name="sgd", lr=lr, options=options, groups=checked, kernel=FusedKernel("sgd"))


def adam(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    groups: Groups = None,
    **unknown: Any,
) -> Optimizer:
    """Adam (Kingma and Ba 2015), as `torch.optim.Adam`: `weight_decay` is added to the gradient.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        betas, eps, weight_decay: as in torch.
        groups: `{pattern: options}`, as for `sgd`.

    Example:
        >>> fa.adam(1e-3)
    """
    refuse_unknown("fa.adam", unknown, ("betas", "eps", "weight_decay", "groups"))
    return _make_adam("adam", lr, betas, eps, weight_decay, groups)


def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    groups: Groups = None,
    **unknown: Any,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW`: decay apart from the gradient.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        betas, eps, weight_decay: as in torch.
        groups: `{pattern: options}`, as for `sgd`.

    Example:
        >>> fa.adamw(3e-4, groups={"*norm*": {"weight_decay": 0.0}})
    """
    refuse_unknown("fa.adamw", unknown, ("betas", "eps", "weight_decay", "groups"))
    return _make_adam("adamw", lr, betas, eps, weight_decay, groups)


def _make_adam(
    name: str, lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float, groups: Groups
) -> Optimizer:
    defaults = {"betas": check_betas(name, betas), "eps": eps, "weight_decay": weight_decay}
    options, checked = options_of(name, defaults, groups)
    return Optimizer(name=name, lr=lr, options=options, groups=checked, kernel=FusedKernel(name))


def check_betas(name: str, betas: Sequence[float]) -> tuple[float, float]:
    """`betas` as a tuple.

    Raises:
        ArgumentError: they are not two numbers in [0, 1).
    """
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"betas={betas} are not two numbers in [0, 1)",
        f"fa.{name}",
        "betas=(0.9, 0.999)",
    )
    return betas[0], betas[1]
