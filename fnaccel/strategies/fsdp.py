"""`fsdp()` and `hsdp()`: the options of the axis `dp_shard`. Its engine is in `fsdp_engine`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack, get_args

import attrs

from fnaccel import _torch
from fnaccel.errors import UnknownNameError, as_names, nearest, require
from fnaccel.models.blocks import Units
from fnaccel.models.building import Init
from fnaccel.step.spec import Spec
from fnaccel.step.step import EVERYTHING, Capability
from fnaccel.strategies.ddp import ddp
from fnaccel.strategies.strategy import Axis, Pairs, Strategy, check_degree, maker

if TYPE_CHECKING:  # slow to import
    from torch.distributed.fsdp import MixedPrecisionPolicy


def _as_dims(dims: Any) -> Pairs:
    """The argument `dims=` as a record keeps it.

    Raises:
        ArgumentError: no mapping of a pattern to a dimension.
    """
    entries: Any = dims.items() if isinstance(dims, Mapping) else dims
    fits = isinstance(entries, Iterable) and not isinstance(entries, str)
    fits = fits and all(
        isinstance(entry, tuple | list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and type(entry[1]) is int
        and entry[1] >= 0
        for entry in entries
    )
    require(
        fits,
        f"dims={dims!r} does not say along which dimension a parameter is sharded",
        "fa.fsdp(dims=)",
        'dims={"*.down.weight": 1}: patterns of parameter names, and a dimension from 0 on',
    )
    return Pairs((pattern, dim) for pattern, dim in entries)


@attrs.frozen
class Fsdp(Axis):
    """The axis `dp_shard`: see `fsdp`."""

    mesh_axis: ClassVar[str] = "dp_shard"
    maker: ClassVar[str] = "fsdp"

    degree: int = -1
    units: Units = "block"
    reshard_after_forward: bool | int = True
    policy: MixedPrecisionPolicy | None = None
    offload: bool = False
    ignore: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    init: Init | str = "seeded"
    methods: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    forward_prefetch: int = 0
    backward_prefetch: int = 1
    dims: Pairs = attrs.field(default=Pairs(), converter=_as_dims)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All but the loss as one graph: its units gather by hooks."""
        return EVERYTHING - {Capability.COMPILE_LOSS}

    def plan_notes(self, spec: Spec) -> list[str]:
        """Whether a captured step keeps gathered parameters for backward."""
        settings = spec.step.settings
        stay = settings.captured and self.reshard_after_forward
        if stay and settings.compiler is not None and settings.compiler.backend != "inductor":
            return ["only inductor gathers parameters again for backward: here they stay gathered (ZeRO-2)"]
        return []

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """Options that hooks carry out, and torch before it takes gradients of what a graph has gathered."""
        if not _torch.can_make_leaves():
            return "this torch can't capture gradients of gathered parameters (2.13 does)"
        lacking = [name for name in ("policy", "offload", "ignore") if getattr(self, name)]
        lacking += [] if self.init == "seeded" else ["init"]
        lacking += [] if isinstance(self.reshard_after_forward, bool) else ["reshard_after_forward"]
        lacking += ["forward_prefetch"] * (self.forward_prefetch != 0)
        lacking += ["backward_prefetch"] * (self.backward_prefetch != 1)
        return f"fsdp({lacking[0]}=...) is carried out by hooks" if lacking else ""


@maker
def fsdp(
    degree: int = -1,
    *,
    units: Units = "block",
    reshard_after_forward: bool | int = True,
    policy: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    ignore: str | Iterable[str] = (),
    init: Init | str = "seeded",
    methods: str | Iterable[str] = (),
    forward_prefetch: int = 0,
    backward_prefetch: int = 1,
    dims: Mapping[str, int] | Pairs = Pairs(),  # noqa: B008 - an empty tuple
) -> Strategy:
    """Shard parameters, gradients and optimizer slots over ranks with FSDP2 (Zhao et al. 2023).

    Args:
        degree: over how many ranks. -1 takes the ranks that are left.
        units: modules that are gathered together: `"block"`, `"no_split"` (the classes that a model of
            transformers names), class names, a least size in parameters, or a function. See
            `fnaccel.models.blocks`. Parameters in no unit are gathered with the root.
        reshard_after_forward: True frees a unit's parameters after its forward (ZeRO-3), False
            keeps them until backward (ZeRO-2), an int reshards over that many ranks.
        policy: a `torch.distributed.fsdp.MixedPrecisionPolicy` for all units, instead of the one
            that follows from `with_precision`.
        offload: keep parameters, gradients and optimizer slots on the CPU.
        ignore: patterns of parameter names to leave unsharded. Their gradients are averaged.
        init: `"seeded"` builds the whole model on each rank, so that values equal any other
            strategy's. `"rank0"` builds it on rank 0 only and sends the parts (needs a factory).
            `"meta"` makes no values at all: restore or adopt a state before the first step.
            `"module:function"` names a function that fills the parameters of one module, such as one that
            calls `module.reset_parameters()` (needs a factory). It sees them whole, for each module with
            parameters of its own, in the order of `modules()`, and a rank keeps its part. So no rank holds
            more than its parts and one module, and any number of ranks draws the same values, on their
            devices. On CPUs, for layers of torch alone, `reset_parameters` draws what `"seeded"` does.
        methods: names of methods other than `forward` that the loss calls on units.
        forward_prefetch: how many units are gathered ahead of the one that runs forward, in the order of
            `named_modules()`. 0: gathering one unit overlaps with the one before as far as the device allows.
        backward_prefetch: the same in backward. 1 follows the order of the forward that was run. More follow
            the order of `named_modules()`.
        dims: the dimension along which parameters are sharded, by pattern of their names, of which the first
            that matches counts: `{"*.down.weight": 1}`. By default dimension 0, unless ranks do not divide it
            and another one saves memory. Only dimension 0 may be uneven. `fa.layout(state)` shows the result.

    Raises:
        ArgumentError: a degree or `dims` that can't be. At `init`: a pattern that matches no parameter, or a
            dimension that a parameter lacks or that the ranks do not divide.
        UnknownNameError: no such `init`.

    Example, on 2 ranks:
        >>> zero3 = fa.fsdp(units=("Block",))
        >>> zero2 = fa.fsdp(reshard_after_forward=False)
        >>> train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, zero3), optimizer=fa.adamw(3e-4))
        >>> train_step.init().params["lm_head.weight"].to_local().shape  # half of 16 rows
        torch.Size([8, 32])
    """
    check_degree(degree, "fa.fsdp")
    if init not in get_args(Init) and ":" not in init:
        raise UnknownNameError(
            f"no init is called {init!r}", where="fa.fsdp", fix=nearest(str(init), get_args(Init))
        )
    require(
        isinstance(reshard_after_forward, int) and reshard_after_forward >= 0,
        f"reshard_after_forward={reshard_after_forward!r}",
        "fa.fsdp",
        "True, False, or a number of ranks",
    )
    require(
        forward_prefetch >= 0 and backward_prefetch >= 1,
        f"forward_prefetch={forward_prefetch!r}, backward_prefetch={backward_prefetch!r}",
        "fa.fsdp",
        "forward_prefetch is 0 or more units, backward_prefetch 1 or more: FSDP2 always gathers one ahead",
    )
    require(
        isinstance(reshard_after_forward, bool) or not any(dim for _, dim in _as_dims(dims)),
        f"reshard_after_forward={reshard_after_forward} with a dimension other than 0",
        "fa.fsdp(dims=)",
        "reshard_after_forward=True or False: FSDP2 reshards over fewer ranks along dimension 0 only",
    )
    chosen = tuple(units) if isinstance(units, list | tuple) else units
    return Strategy(
        (
            Fsdp(
                degree=degree,
                units=chosen,
                reshard_after_forward=reshard_after_forward,
                policy=policy,
                offload=offload,
                ignore=ignore,
                init=init,
                methods=methods,
                forward_prefetch=forward_prefetch,
                backward_prefetch=backward_prefetch,
                dims=dims,
            ),
        )
    )


class FsdpOptions(TypedDict, total=False):
    """The options of `fsdp`, for type checkers of a call of `hsdp`."""

    units: Units
    reshard_after_forward: bool | int
    policy: MixedPrecisionPolicy | None
    offload: bool
    ignore: str | Iterable[str]
    init: Init | str
    methods: str | Iterable[str]
    forward_prefetch: int
    backward_prefetch: int
    dims: Mapping[str, int] | Pairs


@maker
def hsdp(replicate: int, shard: int = -1, **options: Unpack[FsdpOptions]) -> Strategy:
    """Shard within groups of `shard` ranks and replicate over `replicate` groups: `ddp(r) * fsdp(s)`.

    Args:
        replicate: how many groups hold the whole model.
        shard: over how many ranks each group shards it. -1 takes the ranks that are left.
        options: as for `fsdp`.

    Raises:
        ArgumentError: a degree that can't be.
        UnknownNameError: no such `init`.

    Example:
        >>> model = fa.distribute(GPT, fa.hsdp(2, 4))  # 8 ranks: 2 groups of 4
    """
    return ddp(replicate) * fsdp(shard, **options)
