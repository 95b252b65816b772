"""`sgd`, `adam`, `adamw`: explicit state on torch's fused kernels.

Averaging over the weight, unscaling and clipping arrive as one multiplier, which the kernel
applies as it reads the gradient. Skipping is decided on the device, by `found_inf`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from fnaccel import _torch
from fnaccel.errors import CapabilityError, require
from fnaccel.models.parameter import memory_of
from fnaccel.optim import kernels
from fnaccel.optim.description import Group, Optimizer, options_of, refuse_unknown
from fnaccel.optim.rules import Part, adam_parts, adamw_parts, sgd_parts
from fnaccel.optim.schedules import Rate
from fnaccel.optim.selection import Groups
from fnaccel.step.loss import Scalar
from fnaccel.tree import Tree

_exists = functools.partial(operator.is_not, None)
_Kernels = dict[str, Callable[..., None]]
_FUSED: _Kernels = {"sgd": kernels.sgd_, "adam": kernels.adam_, "adamw": kernels.adamw_}
_PLAIN: dict[str, Callable[..., None]] = {
    "sgd": kernels.plain_sgd_,
    "adam": kernels.plain_adam_,
    "adamw": kernels.plain_adamw_,
}
_PARTS: dict[str, Callable[..., tuple[Part, ...]]] = {
    "sgd": sgd_parts,
    "adam": adam_parts,
    "adamw": adamw_parts,
}
# on "meta" slots are counted, and never updated
_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps", "xla", "meta"})


@attrs.frozen
class FusedKernel:
    """One of torch's fused optimizers, by name: `"sgd"`, `"adam"` or `"adamw"`."""

    traceable: ClassVar[bool] = True
    name: str

    def parts(self, options: dict[str, Any]) -> tuple[Part, ...]:
        """The parts of `fa.optim.chain` that compute the same."""
        return _PARTS[self.name](**options)

    def bind(self, groups: Sequence[Group]) -> BoundFused:
        """Make zeroed slots beside each parameter shard."""
        return BoundFused(self.name, groups)


class _Work:
    """One group, as the fused kernel takes it. Shards without elements are left out.

    A complex tensor is taken as a real one with a last dimension of two, as torch.optim does.
    """

    __slots__ = ("complex", "indices", "kind", "moments", "numbers", "run", "shards", "whole")

    def __init__(self, name: str, group: Group, total: int, slots: dict[str, dict[str, Any]]) -> None:
        members = [m for m in group.members if m.leaf.shard.numel()]
        self.indices = [m.index for m in members]
        self.whole = self.indices == list(range(total))
        self.complex = any(m.leaf.shard.is_complex() for m in members)
        self.shards = [real_view(m.leaf.shard) for m in members]
        # the members of a group are alike: see `group_leaves`
        dense = all(memory_of(shard) == "dense" for shard in self.shards)
        self.run = _FUSED[name] if dense else _PLAIN[name]
        options = group.options
        self.kind: Callable[..., Any] = kernels.SgdUpdate if name == "sgd" else kernels.AdamUpdate
        if name == "sgd":
            kinds = ("momentum_buffer",) if options["momentum"] else ()
            self.moments: list[list[torch.Tensor]] = [[]]
            self.numbers = options["momentum"], options["weight_decay"], options["nesterov"]
        else:
            kinds = ("exp_avg", "exp_avg_sq")
            self.moments = [[], []]
            self.numbers = *options["betas"], options["weight_decay"], options["eps"]
        for member in group.members:
            moments = slots.setdefault(member.leaf.name, {})
            for place, kind in enumerate(kinds):
                zeros = torch.zeros_like(member.leaf.shard)
                moments[kind] = member.leaf.like(zeros)
                if zeros.numel():
                    self.moments[place].append(real_view(zeros))


class BoundFused:
    """A fused optimizer over the shards of real parameters."""

    reads_host = False

    def __init__(self, name: str, groups: Sequence[Group]) -> None:
        self.slots: dict[str, dict[str, Any]] = {}
        total = sum(len(group.members) for group in groups)
        self._work = [_Work(name, group, total, self.slots) for group in groups]
        self._counts = name != "sgd"  # its kernel depends on the number of updates
        for work in self._work:
            for shard in work.shards:
                if shard.device.type not in _DEVICES:
                    raise CapabilityError(
                        f"torch has no fused {name} on {shard.device.type}",
                        where=f"fa.{name}",
                        fix="fa.optim.from_torch(...) with the class of torch.optim",
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
            # quantized parameters beside these have gradients as well
            if work.whole and len(grads) == len(work.indices) and all(map(_exists, grads)):
                taken, chosen = grads, None
            else:
                chosen = [i for i, index in enumerate(work.indices) if grads[index] is not None]
                taken = [grads[work.indices[i]] for i in chosen]
                if len(chosen) == len(work.indices):
                    chosen = None
            if not taken:
                continue
            shards, moments = work.shards, work.moments
            if chosen is not None:
                shards = [shards[i] for i in chosen]
                moments = [[moment[i] for i in chosen] if moment else moment for moment in moments]
            if work.complex:
                taken = [real_view(grad) for grad in taken]
            # the multiplier and skip are on the device, and offloaded parameters are not
            where = shards[0].device
            scale, off = _at(divisor, where), _at(skip, where)
            count = [_at(updates, where)] if self._counts else []
            rate = _at(rate, where) if isinstance(rate, torch.Tensor) else rate
            if scale is not None and shards[0].dtype is torch.float64:
                exact = multiplier.to(where) if isinstance(multiplier, torch.Tensor) else multiplier
                taken, scale = _torch.foreach_mul(taken, exact), None
            elif scale is not None and torch.compiler.is_compiling():
                taken, scale = _torch.foreach_div(taken, scale), None
            work.run(work.kind(shards, taken, *moments, *count, rate, *work.numbers, scale, off))


def real_view(value: Any) -> Any:
    """A complex tensor as a real one of the same memory. Any other as it is."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _at(value: Tree, device: torch.device) -> Any:
    """A tensor on a device. `to` would take 0.6 us if it is there already."""
    return value if value is None or value.device == device else value.to(device)


@refuse_unknown(torch.optim.SGD)
def sgd(
    lr: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    groups: Groups = None,
) -> Optimizer:
    """Stochastic gradient descent, as `torch.optim.SGD` without dampening.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        momentum, nesterov, weight_decay: as in torch.
        groups: `{selection: options}`, or pairs of them. A selection is a pattern of parameter names, as
            a shell matches them, or a function `(name, parameter) -> bool`. The first that matches
            holds. Among the options may be `"lr"`, and `"optional": True` if it may match nothing. Else a
            selection that matches nothing raises.

    Raises:
        ArgumentError: Nesterov without momentum, or a rate that is none.
        ConfigError: an option that it does not take.

    Example:
        >>> fa.sgd(0.1, momentum=0.9, groups={"*bias": {"weight_decay": 0.0}})
    """
    require(not nesterov or momentum > 0, "Nesterov needs momentum", "fa.sgd", "momentum=0.9")
    defaults = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    options, checked = options_of("sgd", defaults, groups)
    return Optimizer(name="sgd", lr=lr, options=options, groups=checked, kernel=FusedKernel("sgd"))


@refuse_unknown(torch.optim.Adam)
def adam(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    groups: Groups = None,
) -> Optimizer:
    """Adam (Kingma and Ba 2015), as `torch.optim.Adam`: `weight_decay` is added to the gradient.

    The arguments and errors are those of `adamw`.

    Example:
        >>> fa.adam(1e-3)
    """
    return _make_adam("adam", lr, betas, eps, weight_decay, groups)


@refuse_unknown(torch.optim.AdamW)
def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    groups: Groups = None,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW`: decay apart from the gradient.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        betas, eps, weight_decay: as in torch.
        groups: `{selection: options}`, as for `sgd`.

    Raises:
        ArgumentError: betas outside [0, 1), or a rate that is none.
        ConfigError: an option that it does not take.

    Example:
        >>> fa.adamw(3e-4, groups={"*norm*": {"weight_decay": 0.0}})
    """
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
