"""`reduce` and `any_process`: one value out of those of all ranks, on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fnaccel import tree
from fnaccel.collectives.exchange import exchange
from fnaccel.collectives.flat_buffer import layout, pack, runs
from fnaccel.collectives.over import Over, Scope, carrier_of, scope
from fnaccel.collectives.scratch import spare
from fnaccel.collectives.signature import Call, agree, fits, tensor_leaves
from fnaccel.errors import ArgumentError, FnaccelError, UnknownNameError, nearest
from fnaccel.world.every_rank import every_rank, every_rank_of, outer_call
from fnaccel.world.world import World

T = TypeVar("T")

_ONE_PHASE = 2**18  # bytes. Above it gloo's reduction, which overlaps its phases, is faster

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@every_rank
def reduce(
    value: T,
    op: Literal["sum", "mean", "max", "min"] = "sum",
    *,
    scale: float = 1.0,
    gradient: bool = False,
    over: Over = None,
    world: World | None = None,
) -> T:
    """Combine each tensor of a tree with those of the other ranks. Nothing is changed in place.

    One collective a dtype (in all, for up to 256 KiB between two ranks on CPUs). Small trees are part of
    the signature. bf16 and fp16 are added up in fp32 and rounded once, integers and bools in int64, so
    leaves of these share theirs.

    Args:
        value: a tree of tensors, of the same shapes on every rank.
        op: `"sum"`, `"mean"`, `"max"` or `"min"`.
        scale: the result is multiplied by this.
        gradient: in a loss, for `"sum"` and `"mean"`: results carry a gradient, that of the sum of the
            losses of all ranks, as `gather(gradient=True)` says.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Returns:
        A new tree of the same shapes and dtypes, without gradients by default. But the sum of bools is their
        count (int64), and integers or bools become float32 under `"mean"` or a `scale`.

    Raises:
        UnknownNameError: there is no such `op`.
        PeerLostError: a rank left, exited or made another call.
        RankMismatchError: on every rank, if ranks pass different structures, shapes or dtypes.
        ArgumentError: a leaf is no plain tensor, or is complex under `"max"` or `"min"`, which have no
            `gradient` either.

    Example, on 2 ranks:
        >>> fa.reduce({"loss": torch.tensor(1.0 + world.rank), "count": torch.tensor(8.0)}, "mean")
        {'loss': tensor(1.5000), 'count': tensor(8.)}
    """
    where = scope(over, world, "reduce")
    leaves, structure, problem = tensor_leaves(value, "reduce", gradient=gradient)
    shapes = tuple(leaf.shape for leaf in leaves)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    trouble = problem or _bad_op(op, dtypes, gradient=gradient)
    carrier = carrier_of(where, leaves)
    plan = layout(shapes, dtypes)
    options = f"{carrier.type}, op={op}, scale={float(scale)}{moves(leaves) if gradient else ''}"
    call = Call("reduce", options, value, structure, shapes, dtypes)
    results = list(leaves)
    with torch.no_grad():
        payload = pack(leaves, plan) if fits(where, carrier, plan) and trouble is None else None
        payloads = agree(where, call, payload=payload, problem=trouble).payloads
        if payload is None and where.size == 2 and carrier.type == "cpu" and plan.nbytes <= _ONE_PHASE:
            # between two ranks a gather moves no more bytes than a reduction, in one phase and not two
            with exchange(where, leaves, plan, carrier) as everyone:
                totals = [(run.leaves, _fold(part, op)) for run, part in runs(everyone, plan)]
        elif payload is None or payloads is None:
            totals = _communicated(where, leaves, op, carrier)
        else:
            totals = ((run.leaves, _fold(part, op)) for run, part in runs(payloads, plan))
        for members, total in totals:
            total = _scaled(total, scale / where.size if op == "mean" else scale)
            parts = total.split([leaves[at].numel() for at in members])
            for at, part in zip(members, parts, strict=True):
                dtype = _result(dtypes[at], op, scale)
                # a copy: a view would keep the whole bucket alive, and be saved as shared memory
                results[at] = part.to(leaves[at].device, dtype, copy=len(members) > 1).view(shapes[at])
    if gradient:
        factor = scale / where.size if op == "mean" else scale
        results = with_gradient(where, leaves, results, lambda total, _: total * factor)
    return tree.unflatten(structure, results)


def with_gradient(
    where: Scope,
    leaves: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    adjoint: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Results of a collective as functions of this rank's leaves, for a backward that all ranks run.

    Args:
        where: the ranks.
        leaves: the tensors that this rank passed.
        results: what came of them.
        adjoint: the gradient of a leaf, of the sum over ranks of the gradient of its result, and the leaf.
    """
    function: Any = _WithGradient.apply
    return [
        function(leaf, result, where, adjoint) if leaf.requires_grad else result
        for leaf, result in zip(leaves, results, strict=True)
    ]


def moves(leaves: Sequence[torch.Tensor]) -> str:
    """Which leaves take a gradient, as part of a signature: a rank without would not come to backward."""
    return f", gradient of {[at for at, leaf in enumerate(leaves) if leaf.requires_grad]}"


class _WithGradient(torch.autograd.Function):
    """A result of a collective. Its backward adds up its gradients over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, result: torch.Tensor, where: Scope, adjoint: Any
    ) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.leaf, ctx.where, ctx.adjoint = leaf.detach(), where, adjoint
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        carrier = carrier_of(ctx.where, [grad])
        ((_, total),) = _communicated(ctx.where, [grad], "sum", carrier)
        own = ctx.adjoint(total.view(grad.shape), ctx.leaf)
        return own.to(grad.device, ctx.leaf.dtype), None, None, None


def _communicated(
    where: Scope, leaves: Sequence[torch.Tensor], op: str, carrier: torch.device
) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    buckets: dict[torch.dtype, list[int]] = {}
    for at, leaf in enumerate(leaves):
        buckets.setdefault(_wire(leaf.dtype), []).append(at)
    for wire, members in buckets.items():
        if len(members) == 1:
            # the result itself, which shares no memory with the input
            alone = leaves[members[0]].to(carrier, wire, copy=True)
            yield members, _all_reduced(where, alone.reshape(-1), op)
            continue
        parts = [leaves[at].to(carrier, wire).reshape(-1) for at in members]
        with spare(sum(part.numel() for part in parts) * wire.itemsize, carrier) as memory:
            yield members, _all_reduced(where, torch.cat(parts, out=memory.view(wire)), op)


def _all_reduced(where: Scope, total: torch.Tensor, op: str) -> torch.Tensor:
    if where.size > 1 and total.numel():
        dist.all_reduce(total, _OPS[op], group=where.group)
    return total


def _fold(part: torch.Tensor, op: str) -> torch.Tensor:
    """The same result, from the items of all ranks, `[ranks, items]`."""
    combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    return functools.reduce(combine, part.to(_wire(part.dtype)).unbind())


@every_rank_of("fa.collectives")
def any_process(flag: bool, *, over: Over = None, world: World | None = None) -> bool:
    """Whether `flag` is true on any rank, so that all ranks can stop together.

    Raises:
        RankMismatchError: another rank makes another call.
        PeerLostError: a rank left, exited or made another call.

    Example, on 2 ranks:
        >>> fa.collectives.any_process(world.rank == 1)
        True
    """
    where = scope(over, world, "collectives.any_process")
    call = Call("fa.collectives.any_process", outer_call(world, "fa.collectives.any_process"))
    return any(agree(where, call, number=int(bool(flag))).numbers)


def _wire(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a leaf is added up: gloo lacks int16, and low precisions lose bits."""
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize >= torch.float32.itemsize):
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _scaled(total: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return total
    if total.dtype == torch.int64:
        return total.double().mul_(factor)
    return total.mul_(factor)


def _result(dtype: torch.dtype, op: str, scale: float) -> torch.dtype:
    if dtype.is_complex or dtype.is_floating_point:
        return dtype
    if op == "mean" or scale != 1.0:
        return torch.float32
    return torch.int64 if dtype == torch.bool and op == "sum" else dtype


def _bad_op(op: str, dtypes: Sequence[torch.dtype], *, gradient: bool) -> FnaccelError | None:
    if op not in _OPS:
        return UnknownNameError(f"can't reduce by {op!r}", where="fa.reduce", fix=nearest(op, _OPS))
    if gradient and op in ("max", "min"):
        return ArgumentError(
            f"the {op} over ranks has no gradient here",
            where=f"fa.reduce(op={op!r}, gradient=True)",
            fix="gather the rows, fa.gather(x, gradient=True), and take it of them",
        )
    if op in ("max", "min") and any(dtype.is_complex for dtype in dtypes):
        return ArgumentError(
            f"complex numbers have no {op}",
            where=f"fa.reduce(op={op!r})",
            fix="reduce torch.view_as_real(x), or x.abs()",
        )
    return None
