"""`sgd`, `adam`, `adamw`, and `chain` if its parts are theirs: explicit state on torch's fused kernels.

Averaging over the weight, unscaling and clipping arrive as one multiplier, which the kernel
applies as it reads the gradient. Skipping is decided on the device, by `found_inf`.

The kernels walk over memory, so they would write into the gaps of a parameter that is not dense, and XLA has
none: such parameters are updated by the parts of `fa.optim.chain` that compute the same.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.errors import CapabilityError, require
from fnaccel.models.parameter import memory_of
from fnaccel.optim import kernels
from fnaccel.optim.chain_kernel import BoundChain, real_view, unmasked
from fnaccel.optim.description import Bound, Group, Optimizer, options_of, refuse_unknown
from fnaccel.optim.parts import check_part
from fnaccel.optim.rules import (
    AddDecayedWeights,
    Masked,
    Part,
    ScaleByAdam,
    Trace,
    adam_parts,
    adamw_parts,
    sgd_parts,
)
from fnaccel.optim.schedules import Rate
from fnaccel.optim.selection import Groups
from fnaccel.step.loss import Scalar

_exists = functools.partial(operator.is_not, None)
_Kernels = dict[str, Callable[..., None]]
_FUSED: _Kernels = {"sgd": kernels.sgd_, "adam": kernels.adam_, "adamw": kernels.adamw_}
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

    @property
    def schedulable(self) -> tuple[str, ...]:
        """The options that may be schedules."""
        return ("momentum", "weight_decay") if self.name == "sgd" else ("betas", "eps", "weight_decay")

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

    __slots__ = (
        "chain", "complex", "group", "indices", "kind", "moments", "number", "numbers", "run", "shards",
        "whole",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        number: int,
        group: Group,
        total: int,
        slots: dict[str, dict[str, Any]],
        chain: BoundChain | None,
    ) -> None:
        self.number, self.group, self.chain = number, group, chain  # the chain of scheduled numbers
        members = [m for m in group.members if m.leaf.shard.numel()]
        self.indices = [m.index for m in members]
        self.whole = self.indices == list(range(total))
        self.complex = any(m.leaf.shard.is_complex() for m in members)
        self.shards = [real_view(m.leaf.shard) for m in members]
        self.run = _FUSED[name]
        self.kind: Callable[..., Any] = kernels.SgdUpdate if name == "sgd" else kernels.AdamUpdate
        self.numbers = self.numbers_of(group.options)
        kinds = ("exp_avg", "exp_avg_sq")
        if name == "sgd":
            kinds = ("momentum_buffer",) if group.options_of_parts["momentum"] else ()
        self.moments: list[list[torch.Tensor]] = [[]] if name == "sgd" else [[], []]
        for member in group.members:
            moments = slots.setdefault(member.leaf.name, {})
            for place, kind in enumerate(kinds):
                if chain is None:
                    shard = torch.zeros_like(member.leaf.shard)
                    moments[kind] = member.leaf.like(shard)
                else:
                    shard = _torch.local_of(moments[kind])
                if shard.numel():
                    self.moments[place].append(real_view(shard))

    def numbers_of(self, options: dict[str, Any]) -> tuple[Any, ...]:
        """The numbers that the kernel takes besides the rate."""
        if self.kind is kernels.SgdUpdate:
            return options["momentum"], options["weight_decay"], options["nesterov"]
        return *options["betas"], options["weight_decay"], options["eps"]


class BoundFused:
    """A fused optimizer over the shards of real parameters."""

    reads_host = False

    def __init__(self, name: str, groups: Sequence[Group]) -> None:
        self.slots: dict[str, dict[str, Any]] = {}
        self._work: list[_Work] = []
        self._chains: list[tuple[int, list[int], BoundChain]] = []  # group, indices of its parameters
        self._counts = name != "sgd"  # its kernel depends on the number of updates
        total = sum(len(group.members) for group in groups)
        for number, group in enumerate(groups):
            chain, fused = None, _takes_kernel(name, group)
            if group.scheduled or not fused:
                chain = BoundChain(_PARTS[name](**group.options_of_parts), [group])
                self.slots.update(chain.slots)
            if fused:
                self._work.append(_Work(name, number, group, total, self.slots, chain))
            elif chain is not None:
                self._chains.append((number, [member.index for member in group.members], chain))

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,
        updates: torch.Tensor,
    ) -> None:
        """One update in place: see `Bound.apply`."""
        for number, indices, chain in self._chains:
            chain.apply([grads[i] for i in indices], [rates[number]], multiplier, skip, updates)
        divisor: torch.Tensor | None = None
        if multiplier is not None:
            # the kernels divide by their `grad_scale`, an fp32 tensor
            if isinstance(multiplier, torch.Tensor):
                divisor = multiplier.reciprocal().float()
            else:
                divisor = torch.tensor(1.0 / multiplier if multiplier else math.inf, dtype=torch.float32)
        for work in self._work:
            rate, numbers = rates[work.number], work.numbers
            if work.chain is not None:
                # the kernel takes no tensors, a graph would be compiled for each value, and at a momentum of
                # 0 the kernel would leave its buffer as it was
                tensors = any(isinstance(value, torch.Tensor) for value in tree.leaves(rate))
                if tensors or torch.compiler.is_compiling() or rate.get("momentum") == 0:
                    taken = [grads[member.index] for member in work.group.members]
                    work.chain.apply(taken, [rate], multiplier, skip, updates)
                    continue
                rate, numbers = rate["lr"], work.numbers_of({**work.group.options, **rate})
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
            scale, off = kernels.at(divisor, where), kernels.at(skip, where)
            count = [kernels.at(updates, where)] if self._counts else []
            if scale is not None and shards[0].dtype is torch.float64:
                taken, scale = _torch.foreach_mul(taken, kernels.at(multiplier, where)), None
            work.run(
                work.kind(shards, taken, *moments, *count, kernels.at(rate, where), *numbers, scale, off)
            )


def _takes_kernel(name: str, group: Group) -> bool:
    """Whether the fused kernel can update a group, whose members are alike: see `group_leaves`.

    Raises:
        CapabilityError: torch has no such kernel on the device, and no parts are run there.
    """
    shards = [real_view(shard) for member in group.members if (shard := member.leaf.shard).numel()]
    for shard in shards:
        if shard.device.type not in _DEVICES:
            raise CapabilityError(
                f"torch has no fused {name} on {shard.device.type}",
                where=f"fa.{name}",
                fix="fa.optim.from_torch(...) with the class of torch.optim",
            )
    return all(shard.device.type != "xla" and memory_of(shard) == "dense" for shard in shards)


@attrs.frozen
class ChainKernel:
    """An optimizer from parts. Parts that are those of a fused kernel are carried out by it."""

    chain: tuple[Part, ...]

    @property
    def traceable(self) -> bool:
        """Whether all rules can be captured in a graph."""
        parts = [unmasked(part) for part in self.chain]
        return all(part.traceable and not part.whole for part in parts)

    def parts(self, options: dict[str, Any]) -> tuple[Part, ...]:  # noqa: ARG002 - they are in the parts
        """The parts."""
        return self.chain

    def bind(self, groups: Sequence[Group]) -> Bound:
        """Make the slots of each part for its parameters.

        Raises:
            ArgumentError: a mask selects no parameter.
            CapabilityError: a part goes by rows, or asks for whole parameters, and a parameter is complex.
        """
        fused = fused_of(self.chain)
        if fused is None:
            return BoundChain(self.chain, groups)
        kernel, options, _ = fused
        return kernel.bind([attrs.evolve(group, options={**options, **group.options}) for group in groups])


@refuse_unknown(torch.optim.SGD)
def sgd(
    lr: Rate,
    *,
    momentum: Rate = 0.0,
    nesterov: bool = False,
    weight_decay: Rate = 0.0,
    groups: Groups = None,
) -> Optimizer:
    """Stochastic gradient descent, as `torch.optim.SGD` without dampening.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        momentum, nesterov, weight_decay: as in torch. Momentum and weight decay may be schedules.
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
    moves = callable(momentum) or momentum > 0
    require(not nesterov or moves, "Nesterov needs momentum", "fa.sgd", "momentum=0.9")
    defaults = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    kernel = FusedKernel("sgd")
    options, checked = options_of("sgd", defaults, groups, kernel.schedulable)
    return Optimizer(name="sgd", lr=lr, options=options, groups=checked, kernel=kernel)


@refuse_unknown(torch.optim.Adam)
def adam(
    lr: Rate,
    *,
    betas: tuple[Rate, Rate] = (0.9, 0.999),
    eps: Rate = 1e-8,
    weight_decay: Rate = 0.0,
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
    betas: tuple[Rate, Rate] = (0.9, 0.999),
    eps: Rate = 1e-8,
    weight_decay: Rate = 0.01,
    groups: Groups = None,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW`: decay apart from the gradient.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        betas, eps, weight_decay: as in torch. Each may be a schedule, and each beta by itself.
        groups: `{selection: options}`, as for `sgd`.

    Raises:
        ArgumentError: betas outside [0, 1), or a rate that is none.
        ConfigError: an option that it does not take.

    Example:
        >>> fa.adamw(3e-4, groups={"*norm*": {"weight_decay": 0.0}})
        >>> fa.adamw(3e-4, weight_decay=fa.schedules.cosine(0.04, total=1_000, end=0.4))
    """
    return _make_adam("adamw", lr, betas, eps, weight_decay, groups)


def _make_adam(
    name: str, lr: Rate, betas: tuple[Rate, Rate], eps: Rate, weight_decay: Rate, groups: Groups
) -> Optimizer:
    defaults = {"betas": check_betas(name, betas), "eps": eps, "weight_decay": weight_decay}
    kernel = FusedKernel(name)
    options, checked = options_of(name, defaults, groups, kernel.schedulable)
    return Optimizer(name=name, lr=lr, options=options, groups=checked, kernel=kernel)


def check_betas(name: str, betas: Sequence[Rate]) -> tuple[Any, Any]:
    """`betas` as a tuple.

    Raises:
        ArgumentError: they are not two numbers in [0, 1), or schedules.
    """
    require(
        not callable(betas) and len(betas) == 2 and all(callable(b) or 0 <= b < 1 for b in betas),
        f"betas={betas} are not two numbers in [0, 1)",
        f"fa.{name}",
        "betas=(0.9, 0.999)",
    )
    return betas[0], betas[1]


def fused_of(chain: Sequence[Part]) -> tuple[FusedKernel, dict[str, Any], Any] | None:
    """The fused kernel that carries out these parts, its options, and the mask of its weight decay.

    None if there is none. Without decay for all, the option of the mask's parameters is in a group.
    """
    decays = [part for part in chain if type(unmasked(part)) is AddDecayedWeights]
    others = [part for part in chain if type(part) in (ScaleByAdam, Trace)]
    if len(decays) > 1 or len(others) > 1 or len(decays) + len(others) != len(chain):
        return None
    mask, decay = None, 0.0
    if decays:
        part: Any = decays[0]
        if isinstance(part, Masked):
            if isinstance(part.part, Masked):
                return None
            mask, part = part.mask, part.part
        decay = part.decay
    options: dict[str, Any] = {"weight_decay": 0.0 if mask is not None else decay}
    first = bool(decays) and chain[0] is decays[0]
    rule: Any = others[0] if others else None
    if isinstance(rule, ScaleByAdam):
        name = "adam" if first else "adamw"
        options |= {"betas": rule.betas, "eps": rule.eps}
    elif rule is None or first or not decays:
        name = "sgd"
        momentum, nesterov = (0.0, False) if rule is None else (rule.decay, rule.nesterov)
        if rule is not None and not momentum:
            return None
        options |= {"momentum": momentum, "nesterov": nesterov}
    else:  # the decay would be outside of the momentum
        return None
    return FusedKernel(name), options, None if mask is None else (mask, decay)


def chain(*parts: Part, lr: Rate) -> Optimizer:
    """An optimizer from parts. Each changes what the part before made of the gradient.

    The move of a parameter is minus the rate times the result of the last part, so no part has a sign or a
    rate. Parts see this rank's part of each parameter, and their norms are those of whole tensors. So an
    optimizer is the same on every strategy but `fa.deepspeed`, which raises. An update that is left out
    changes no slot.

    Parts that are those of `fa.sgd`, `fa.adam` or `fa.adamw` are carried out by the same fused kernel. Slots
    have torch's names, so both restore each other's checkpoints. A second slot of one name gets `.1`.

    Args:
        parts: `fa.optim.scale_by_adam()` and the like, or records of your own (`fa.extend.Part`). None: SGD.
        lr: a number, or a schedule `updates -> rate`.

    Returns:
        A description, as `fa.adamw` returns.

    Raises:
        ArgumentError: something that is no part, such as a transform of a step. At `init`: a mask that
            selects no parameter.
        CapabilityError: at `init`, a part that can't run on the layout of a parameter.

    Source: https://optax.readthedocs.io/en/latest/api/combining_optimizers.html

    Example:
        >>> optimizer = fa.optim.chain(
        ...     fa.optim.clip_norm(1.0),
        ...     fa.optim.scale_by_adam(eps=1e-6),
        ...     fa.optim.add_decayed_weights(0.01, mask="*weight"),
        ...     fa.optim.trust_ratio(),
        ...     lr=fa.warmup_cosine(3e-4, warmup=10, total=100),
        ... )
        >>> fa.adamw(3e-4).parts
        (scale_by_adam(betas=(0.9, 0.999), eps=1e-08), add_decayed_weights(decay=0.01))
    """
    for part in parts:
        check_part(part, "fa.optim.chain")
    fused = fused_of(parts)
    groups: Any = ()
    if fused is not None and fused[2] is not None:
        mask, decay = fused[2]
        groups = ((mask, (("weight_decay", decay),)),)
    return Optimizer(name="optim.chain", lr=lr, options=(), groups=groups, kernel=ChainKernel(parts))
