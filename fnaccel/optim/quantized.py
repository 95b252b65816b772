"""`adamw8bit`: AdamW whose moments are stored in 8 or 4 bits, by blocks.

A slot holds the codes of a moment and one scale a block, as plain tensors that save, shard and
restore as any other. Blocks never cross a row of a parameter, so they are the same on any number of ranks.
The arithmetic is torchao's (https://github.com/pytorch/ao/tree/main/torchao/optim) or bitsandbytes'
(https://huggingface.co/docs/bitsandbytes/main/en/reference/optim/adamw).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, get_args

import attrs
import torch

from fnaccel import _torch
from fnaccel.errors import (
    CapabilityError,
    MissingBackendError,
    UnknownNameError,
    install_line,
    nearest,
    require,
)
from fnaccel.extend import Group, Leaf, Optimizer
from fnaccel.optim.description import options_of
from fnaccel.optim.fused import BoundFused, check_betas
from fnaccel.optim.schedules import Rate
from fnaccel.optim.selection import Groups
from fnaccel.step.loss import Scalar

Backend = Literal["torchao", "bitsandbytes"]
Codes = Literal["8bit", "4bit", "fp8"]

LEAST = 4_096
"""Elements below which moments stay in fp32, as in torchao and bitsandbytes."""
_LEAST_BLOCK = 32  # below, scales take more than they save
_SHAPES = 10_000  # how often an update may be compiled
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # bitsandbytes loads its library as it is imported
        raise MissingBackendError(
            f"{name.partition('.')[0]} can't be imported: {error}",
            where="8-bit optimizers",
            fix=install_line("quantize"),
        ) from error


@attrs.frozen
class EightBitKernel:
    """AdamW over quantized moments: whose arithmetic, and in which codes.

    Attributes:
        backend: `"torchao"` or `"bitsandbytes"`.
        codes: `"8bit"`, `"4bit"` or `"fp8"`.
        block: elements that share a scale, at most.
        compiled: whether torchao's update is compiled, once for each shape.
    """

    backend: Backend
    codes: Codes
    block: int
    compiled: bool = False

    def bind(self, groups: Sequence[Group]) -> BoundEightBit:
        """Make zeroed slots beside each parameter shard."""
        return BoundEightBit(self, groups)

    @property
    def least(self) -> int:
        """The smallest block: bitsandbytes' have one size."""
        return self.block if self.backend == "bitsandbytes" else _LEAST_BLOCK

    def block_of(self, shape: Sequence[int]) -> int:
        """How many elements of a parameter share a scale: 0 if its moments stay in fp32.

        Depends on the whole parameter's shape alone, so that a checkpoint fits any layout.
        """
        row = math.prod(shape[1:])
        if len(shape) < 2 or math.prod(shape) < LEAST:
            return 0
        block = math.gcd(row, self.block)
        return block if block >= self.least else 0


class BoundEightBit:
    """Quantized AdamW over the shards of large parameters, fused AdamW over the rest."""

    reads_host = True

    def __init__(self, kernel: EightBitKernel, groups: Sequence[Group]) -> None:
        make = _Torchao if kernel.backend == "torchao" else _BitsAndBytes
        self.slots: dict[str, dict[str, Any]] = {}
        self._work: list[tuple[int, int, Leaf, Any]] = []
        self._options = [group.options for group in groups]
        small: list[Group] = []
        for number, group in enumerate(groups):
            for member in group.members:
                block = kernel.block_of(member.leaf.shown.shape)
                if block:
                    _check_blocks(member.leaf, block)
                    moments = make(kernel, member.leaf, block, group.options)
                    self.slots[member.leaf.name] = moments.slots
                    if member.leaf.shard.numel():
                        self._work.append((number, member.index, member.leaf, moments))
            unquantized = [m for m in group.members if not kernel.block_of(m.leaf.shown.shape)]
            small.append(attrs.evolve(group, members=tuple(unquantized)))
        if groups and not self.slots:
            raise CapabilityError(
                f"no parameter's moments would be stored in {kernel.codes}: none has two dimensions, "
                f"{LEAST:,} elements and rows that a block of {kernel.least} divides",
                where="8-bit optimizers",
                fix='fa.adamw(...), wider layers, or backend="torchao", whose blocks may be smaller',
            )
        self._rest = BoundFused("adamw", small)
        self.slots.update(self._rest.slots)

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,
        updates: torch.Tensor,
    ) -> None:
        """One update in place: see `Bound.apply`. `skip` costs one host read."""
        if skip is not None and bool(skip):
            return
        with torch.no_grad():
            for number, index, leaf, moments in self._work:
                grad = grads[index]
                if grad is None:
                    continue
                if multiplier is not None:
                    factor = (
                        multiplier.to(grad.device) if isinstance(multiplier, torch.Tensor) else multiplier
                    )
                    grad = grad * factor
                moments.update(leaf.shard, grad, rates[number], updates, self._options[number])
        self._rest.apply(grads, rates, multiplier, skip, updates)


def _check_blocks(leaf: Leaf, block: int) -> None:
    """See that a shard has whole blocks: whole rows, or parts of each row that a block divides.

    Raises:
        CapabilityError: the parameter is cut within blocks.
    """
    placements: Any = getattr(leaf.shown, "placements", ())
    parts = math.prod(leaf.shard.shape[1:])
    for placement in placements:
        whole = placement.is_replicate() or getattr(placement, "dim", None) == 0
        if not (whole or (_cuts_rows(placement) and parts % block == 0)):
            raise CapabilityError(
                f"{leaf.name} lies as {placement}, which cuts the blocks of its quantized moments",
                where="8-bit optimizers",
                fix="fa.adamw(...), for it alone by fa.optim.optimizer_groups([(pattern, fa.adamw(...)), "
                f"...]), or parts of each row that {block} divides",
            )


def _cuts_rows(placement: Any) -> bool:
    """Whether each rank has a connected part of every row."""
    return type(placement).__name__ == "Shard" and placement.dim == 1


def _laid_out(leaf: Leaf, local: torch.Tensor) -> Any:
    """A slot, sharded as its parameter is. It has the parameter's rows, and blocks or codes in them."""
    if not leaf.sharded:
        return local
    spread: Any = leaf.shown
    sizes = [
        spread.device_mesh.size(at) for at, placement in enumerate(spread.placements) if _cuts_rows(placement)
    ]
    shape = torch.Size((spread.shape[0], local.shape[1] * math.prod(sizes), *local.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    return _torch.dtensor_of(local, spread.device_mesh, spread.placements, shape, stride)


class _Torchao:
    """The moments of one parameter in torchao's tensors, which keep the slots' memory."""

    def __init__(self, kernel: EightBitKernel, leaf: Leaf, block: int, options: Mapping[str, Any]) -> None:  # noqa: ARG002
        adam = _import("torchao.optim.adam").single_param_adam
        self._adam = torch.compile(adam, fullgraph=True, dynamic=False) if kernel.compiled else adam
        # each shape is one more program of the same function
        self._around = functools.partial(_torch.compiling, _SHAPES) if kernel.compiled else nullcontext
        self._moments: list[Any] = []
        self.slots: dict[str, Any] = {}
        self._floor: torch.Tensor | None = None
        rows = leaf.shard.shape[0]
        for kind, signed in zip(_MOMENTS, (True, False), strict=True):
            codes, scale, view = _stored(kernel.codes, leaf.shard, block, signed)
            self._moments.append(view)
            if kernel.codes == "fp8" and not signed:
                self._floor = codes.view(torch.uint8)
            self.slots[f"{kind}_codes"] = _laid_out(leaf, codes)
            self.slots[f"{kind}_scale"] = _laid_out(leaf, scale.view(rows, -1) if rows else scale)

    def update(
        self,
        shard: torch.Tensor,
        grad: torch.Tensor,
        rate: Scalar,
        updates: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        beta1, beta2 = options["betas"]
        first, second = self._moments
        where = shard.device
        if not isinstance(rate, torch.Tensor):  # a number would be compiled in
            rate = torch.full((), float(rate), device=where)
        decay, eps = options["weight_decay"], options["eps"]
        with self._around():
            self._adam(
                shard, grad, updates.to(where), first, second, None, rate.to(where), beta1, beta2, decay, eps,
                True, False,
            )  # fmt: skip
        if self._floor is not None:  # no second moment is 0: the least is the smallest number of the dtype
            self._floor.clamp_(min=1)


def code_table(*, signed: bool) -> torch.Tensor:
    """The 256 values that codes of a moment stand for, as parts of the largest moment of their block.

    The dynamic table of torchao and bitsandbytes has steps of several times a value below 1e-4, and 0. A
    second moment that is rounded down so far lets its element jump: a million times the rate in a row with
    outliers. Here values above a tenth are linear, and below it a step is a fifth of the value at most, down
    to 1e-12 of the largest second moment, of a gradient that is 1e-6 of the largest. None of these is 0.
    """
    if not signed:
        return _values(256, linear=64, decades=11).float()
    return torch.cat(
        [-_values(128, linear=36, decades=6).flip(0), torch.zeros(1), _values(127, linear=36, decades=6)]
    ).float()


def _values(count: int, *, linear: int, decades: int) -> torch.Tensor:
    """Values up to 1: so many in equal steps from 0.1 on, and the others in equal ratios below 0.1."""
    top = torch.linspace(0.1, 1, linear + 1, dtype=torch.float64)[1:]
    below = torch.logspace(-1 - decades, -1, count - linear, dtype=torch.float64)
    return torch.cat([below, top])


def _stored(kind: str, shard: torch.Tensor, block: int, signed: bool) -> tuple[Any, torch.Tensor, Any]:
    """Codes and scales of a moment that is zero, and torchao's tensor over both (None without elements)."""
    rows, row, device = shard.shape[0], math.prod(shard.shape[1:]), shard.device
    scale = torch.zeros(rows * row // block, device=device)
    if not rows:
        scale = scale.view(0, row // block)
    if kind == "fp8":
        codes = torch.zeros(shard.shape, dtype=torch.float8_e4m3fn, device=device)
        return (
            codes,
            scale,
            rows and _import("torchao.optim.subclass_fp8").OptimStateFp8(codes, scale, shard.dtype),
        )
    module = _import(f"torchao.optim.subclass_{kind}")
    if kind == "8bit":
        # int8: a checkpoint with codes of torchao's own tables, which are uint8, does not fit
        codes = torch.zeros(shard.shape, dtype=torch.int8, device=device)
        qmap, stored = code_table(signed=signed).to(device), codes.view(torch.uint8)
        return codes, scale, rows and module.OptimState8bit(stored, scale, qmap, signed, shard.dtype)
    table = module.get_qmap_signed() if signed else module.get_qmap_unsigned()
    qmap = torch.tensor(table, dtype=torch.float32, device=device)
    codes = torch.zeros((rows, row // 2), dtype=torch.uint8, device=device)
    view = rows and module.OptimState4bit(codes.view(-1), scale, qmap, signed, shard.shape, shard.dtype)
    return codes, scale, view


class _BitsAndBytes:
    """The moments of one parameter, as bitsandbytes' blockwise update takes them."""

    def __init__(self, kernel: EightBitKernel, leaf: Leaf, block: int, options: Mapping[str, Any]) -> None:  # noqa: ARG002
        functional = _import("bitsandbytes.functional")
        self._run: Callable[..., None] = functional.optimizer_update_8bit_blockwise
        shard = leaf.shard
        rows = shard.shape[0]
        self._codes: list[torch.Tensor] = []
        self._tables: list[torch.Tensor] = []
        self._scales: list[torch.Tensor] = []
        self.slots: dict[str, Any] = {}
        for kind, signed in zip(_MOMENTS, (True, False), strict=True):
            codes = torch.zeros(shard.shape, dtype=torch.uint8, device=shard.device)
            scale = torch.zeros((rows, math.prod(shard.shape[1:]) // block), device=shard.device)
            self._codes.append(codes)
            self._scales.append(scale)
            self._tables.append(functional.create_dynamic_map(signed=signed).to(shard.device))
            self.slots[f"{kind}_codes"] = _laid_out(leaf, codes)
            self.slots[f"{kind}_scale"] = _laid_out(leaf, scale)

    def update(
        self,
        shard: torch.Tensor,
        grad: torch.Tensor,
        rate: Scalar,
        updates: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        beta1, beta2 = options["betas"]
        self._run(
            "adam",
            grad.contiguous(),
            shard,
            self._codes[0],
            self._codes[1],
            beta1,
            beta2,
            0.0,
            0.0,
            options["eps"],
            int(updates),
            float(rate),
            self._tables[0],
            self._tables[1],
            self._scales[0].view(-1),
            self._scales[1].view(-1),
            options["weight_decay"],
            gnorm_scale=1.0,
            skip_zeros=False,
        )


def adamw8bit(
    lr: Rate,
    *,
    codes: Codes = "8bit",
    backend: Backend = "torchao",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    compiled: bool = False,
    groups: Groups = None,
) -> Optimizer:
    """AdamW with moments in 8 or 4 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

    Moments take about 2 bytes a parameter instead of 8, or 1 byte in 4 bits. They stay in fp32 if the
    parameter has one dimension or fewer than 4,096 elements, or if no block of 32 or more divides its rows.
    Under `skip_nonfinite` or fp16 each step reads one number on the host. bitsandbytes reads the rate too.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        codes: `"8bit"` (a table of its own, whose steps are a fifth of the value or less, so that no element
            moves 1.2 times as far as in fp32), `"4bit"` (Li et al. 2023, https://arxiv.org/abs/2309.01507) or
            `"fp8"` (e4m3).
        backend: `"torchao"`, or `"bitsandbytes"` (8 bits in blocks of 256 only).
        betas, eps, weight_decay: as in torch.
        compiled: compile torchao's update of each shape: slow to start, then several times faster.
        groups: `{selection: options}`, as for `fa.sgd`.

    Raises:
        UnknownNameError: no such backend or codes.
        ArgumentError: betas outside [0, 1), or bitsandbytes compiled or with other codes.
        MissingBackendError: at `init`, if the backend is not installed.
        CapabilityError: at `init`, if no parameter is large enough, or one is cut along another
            dimension than the first.

    Example:
        >>> fa.optim.adamw8bit(3e-4, codes="fp8")
    """
    for kind, chosen, choices in (
        ("8-bit backend", backend, get_args(Backend)),
        ("code", codes, get_args(Codes)),
    ):
        if chosen not in choices:
            raise UnknownNameError(
                f"no {kind} is called {chosen!r}",
                where="fa.optim.adamw8bit",
                fix=nearest(str(chosen), choices),
            )
    require(
        backend == "torchao" or not compiled,
        "bitsandbytes' update is a kernel already: there is nothing to compile",
        "fa.optim.adamw8bit",
        'leave out compiled, or backend="torchao"',
    )
    require(
        backend == "torchao" or codes == "8bit",
        f"bitsandbytes stores no moments in {codes}",
        "fa.optim.adamw8bit",
        'leave out codes, or backend="torchao"',
    )
    betas = check_betas("adamw8bit", betas)
    options, checked = options_of(
        "adamw8bit", {"betas": betas, "eps": eps, "weight_decay": weight_decay}, groups
    )
    return Optimizer(
        name="adamw8bit",
        lr=lr,
        options=(*options, ("codes", codes), ("backend", backend)),  # for the plan: the kernel decides
        groups=checked,
        kernel=EightBitKernel(backend, codes, 128 if codes == "4bit" else 256, compiled),
        elementwise=False,
    )
