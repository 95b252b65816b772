"""Arithmetic on trees of tensors, in any layout. Norms and products are of whole tensors.

Operations work on the parts that this rank holds, by torch's list kernels where these can: DTensor's own take
up to 18 times as long for many small tensors, with a collective for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.errors import ArgumentError
from fnaccel.tree.trees import Tree, columns, unflatten

Factor = float | torch.Tensor


def norm(tree: Tree) -> torch.Tensor:
    """The Euclidean norm of all tensors of a tree together.

    Every rank calls it if tensors are sharded. One all-reduce of a number for each axis of their mesh.

    Args:
        tree: real or complex tensors, DTensors among them. Other leaves raise.

    Returns:
        A 0-d tensor, equal on all ranks, in fp32 at least. fp32 numbers below 1e-22 count as 0.

    Raises:
        ArgumentError: a leaf is no tensor.

    Example:
        >>> float(fa.tree.norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}))
        5.0
    """
    return _summed([tree], _squares, "fa.tree.norm").sqrt()


def dot(first: Tree, second: Tree) -> torch.Tensor:
    """The inner product of two trees of one structure and one layout, a 0-d tensor.

    Every rank calls it if tensors are sharded. The first one's complex numbers are conjugated, as by
    `torch.vdot`.

    Raises:
        ArgumentError: a leaf is no tensor, or two tensors have different shapes or layouts.
        ValueError: the structures differ.

    Example:
        >>> float(fa.tree.dot({"a": torch.ones(3)}, {"a": torch.arange(3.0)}))
        3.0
    """
    return _summed([first, second], _products, "fa.tree.dot")


def scale(tree: Tree, factor: Factor) -> Tree:
    """A tree with each tensor multiplied by a number or a 0-d tensor.

    Example:
        >>> fa.tree.scale({"a": torch.ones(2)}, 3.0)
        {'a': tensor([3., 3.])}
    """
    return _mapped("fa.tree.scale", lambda xs: _scaled(xs, factor), tree)


def axpy(factor: Factor, first: Tree, second: Tree) -> Tree:
    """`factor * first + second`, for two trees of one structure.

    Raises:
        ArgumentError: a leaf is no tensor, or two sharded tensors have different layouts.
        ValueError: the structures differ.

    Example:
        >>> fa.tree.axpy(-0.1, {"a": torch.ones(2)}, {"a": torch.ones(2)})
        {'a': tensor([0.9000, 0.9000])}
    """

    def added(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[torch.Tensor]:
        if not _in_lists([*xs, *ys], factor):
            return [x * factor + y for x, y in zip(xs, ys, strict=True)]
        if isinstance(factor, torch.Tensor):
            return _torch.foreach_add(_scaled(xs, factor), ys)
        return _torch.foreach_add(ys, xs, alpha=factor)

    return _mapped("fa.tree.axpy", added, first, second)


def lerp(first: Tree, second: Tree, weight: Factor) -> Tree:
    """`first + weight * (second - first)`, for two trees of one structure.

    Tensors of two dtypes give the one that holds both. Integers and bools give torch's default dtype.

    Raises:
        ArgumentError: a leaf is no tensor, or two sharded tensors have different layouts.
        ValueError: the structures differ.

    Example:
        >>> fa.tree.lerp({"a": torch.zeros(2)}, {"a": torch.ones(2)}, 0.25)
        {'a': tensor([0.2500, 0.2500])}
    """

    def between(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[torch.Tensor]:
        kinds = [torch.promote_types(x.dtype, y.dtype) for x, y in zip(xs, ys, strict=True)]
        kinds = [k if k.is_floating_point or k.is_complex else torch.get_default_dtype() for k in kinds]
        weights = [weight.to(k) if isinstance(weight, torch.Tensor) else weight for k in kinds]
        return [torch.lerp(x.to(k), y.to(k), w) for x, y, w, k in zip(xs, ys, weights, kinds, strict=True)]

    return _mapped("fa.tree.lerp", between, first, second)


def laid_out(whole: Tree, like: Tree) -> Tree:
    """Tensors that each rank has whole, laid out as those of another tree: the way back from `fa.tree.whole`.

    Each rank keeps its part, without communication. DTensors stay, and tensors that are whole in `like`.

    Args:
        whole: tensors, equal on all ranks, in any dtype.
        like: a tree of the same structure with tensors of the same shapes, such as `state.params`.

    Raises:
        ArgumentError: a leaf is no tensor, or has another shape or layout.
        ValueError: the structures differ.

    Example:
        >>> noise = {name: torch.ones(value.shape) for name, value in state.params.items()}
        >>> moved = fa.tree.axpy(0.1, fa.tree.laid_out(noise, like=state.params), state.params)
    """
    found, structure = columns(whole, like)
    alike = [_in_one_layout(row, "fa.tree.laid_out") for row in zip(*found, strict=True)]
    return unflatten(structure, [row[0] for row in alike])


Parts = list[torch.Tensor]


def _mapped(where: str, fn: Callable[..., Parts], *trees: Tree) -> Tree:
    """A tree of what `fn` makes of the lists of this rank's parts, laid out as the first tree is."""
    with _torch.without_draws():
        shown, parts, structure = _columns(where, *trees)
        made = fn(*parts) if shown else []
        return unflatten(structure, map(_torch.laid_out_as, shown, made))


def _columns(where: str, *trees: Tree) -> tuple[list[Any], list[Parts], Any]:
    """The tensors of the first tree, this rank's parts of those of each tree, and the structure."""
    found, structure = columns(*trees)
    rows = [_in_one_layout(row, where) for row in zip(*found, strict=True)]
    found = [list(column) for column in zip(*rows, strict=True)] or found
    return found[0], [[_torch.local_of(x) for x in column] for column in found], structure


def _in_lists(parts: Parts, factor: Factor = 1.0) -> bool:
    """Whether list kernels take these: torch.func has none, and integers would not turn to floats.

    A factor that is differentiated has none either, and compiled code fuses operations by itself.
    """
    if torch.compiler.is_compiling():
        return False
    graph = torch.is_grad_enabled()
    tensors = [*parts, factor] if isinstance(factor, torch.Tensor) else parts
    return not any(
        _torch.is_mapped(x) or not x.is_floating_point() or (graph and x.requires_grad) for x in tensors
    )


def _scaled(xs: Parts, factor: Factor) -> Parts:
    return _torch.foreach_mul(xs, factor) if _in_lists(xs, factor) else [x * factor for x in xs]


def _squares(xs: Parts) -> Parts:
    """What adds up to the sum of all squares."""
    if not _in_lists(xs):
        xs = [x if x.is_floating_point() or x.is_complex() else x.float() for x in xs]
        return [x.abs().square().sum() for x in xs]
    norms = _torch.foreach_norm(xs)
    if len({(x.dtype, x.device) for x in norms}) > 1:
        return _torch.foreach_mul(norms, norms)
    return [torch.stack(norms).square().sum()]


def _products(xs: Parts, ys: Parts) -> Parts:
    return [(x.conj() * y).sum() for x, y in zip(xs, ys, strict=True)]


def _in_one_layout(tensors: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """Tensors of one shape, the whole ones among them laid out as the sharded one is."""
    first, last = tensors[0], tensors[-1]
    if type(first) is type(last) is torch.Tensor and first.shape == last.shape:
        return tensors  # an attribute that is missing costs 0.3 us
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"a leaf is {type(x).__name__}, not a tensor",
                where=where,
                fix="give tensors alone: fa.tree.select(tree, pattern)",
            )
    if first.shape != last.shape:
        raise ArgumentError(
            f"two tensors have the shapes {list(first.shape)} and {list(last.shape)}",
            where=where,
            fix="give trees with tensors of the same shapes",
        )
    like = next((x for x in tensors if hasattr(x, "placements")), None)
    if like is not None:
        lay_out = getattr(like, "of_whole", None) or functools.partial(
            _part_of, like
        )  # on one stage, or a DTensor
        tensors = tuple(x if hasattr(x, "placements") else lay_out(x) for x in tensors)
    layouts = [getattr(x, "placements", None) for x in tensors]
    if any(each != layouts[0] for each in layouts) or any(p.is_partial() for p in layouts[0] or ()):
        raise ArgumentError(
            f"two tensors have the layouts {layouts[0]} and {layouts[-1]}",
            where=where,
            fix="bring them into one: fa.tree.map(fa.tree.whole, tree), or value.redistribute(...)",
        )
    return tensors


def _part_of(like: Any, whole: torch.Tensor) -> torch.Tensor:
    """A DTensor with the layout of another one, of values that each rank has whole."""
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - slow to import

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


_WHOLE = None, 1


def _held_by(tensor: Any) -> tuple[Any, int]:
    """The mesh of a DTensor, and how many of its ranks hold the same part. None and 1 for a plain tensor."""
    mesh, copies = getattr(tensor, "device_mesh", None), 1
    if mesh is None:
        return _WHOLE
    for dim, placement in enumerate(tensor.placements):
        copies *= 1 if placement.is_shard() else mesh.size(dim)
    return mesh, copies


def _summed(trees: list[Tree], fn: Callable[..., Parts], where: str) -> torch.Tensor:
    """The sum of `fn` over all leaves, each part of a tensor counted once."""
    with _torch.without_draws():
        return _added(*_columns(where, *trees)[:2], fn)


def _added(shown: list[Any], parts: list[Parts], fn: Callable[..., Parts]) -> torch.Tensor:
    rows: dict[tuple[Any, int], list[tuple[torch.Tensor, ...]]] = {}
    for first, row in zip(shown, zip(*parts, strict=True), strict=True):
        rows.setdefault(_WHOLE if type(first) is torch.Tensor else _held_by(first), []).append(row)
    plain: Parts = []
    over: dict[Any, Parts] = {}
    for (mesh, copies), group in rows.items():
        values = fn(*([_wide(x) for x in column] for column in zip(*group, strict=True)))
        if mesh is None:
            plain += values
        else:
            over.setdefault(mesh, []).extend(value / copies for value in values)
    total = _sum(plain)
    for mesh, values in over.items():
        part = _sum(values)
        part = part if mesh.device_type == part.device.type else part.to(mesh.device_type)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.all_reduce(part, group=mesh.get_group(dim))
        total = total + part.to(total.device) if plain else part
        plain = [total]
    return total


def _wide(value: torch.Tensor) -> torch.Tensor:
    """A small dtype in fp32 or int64: a sum of bf16 would stop growing, and a product of int8 overflow."""
    if value.is_floating_point():
        return value.float() if value.element_size() < 4 else value
    return value if value.is_complex() else value.long()


def _sum(values: Parts) -> torch.Tensor:
    if len(values) < 2:
        return values[0] if values else torch.zeros(())
    kinds = {(value.dtype, value.device) for value in values}
    if len(kinds) > 1:
        kind = functools.reduce(torch.promote_types, (value.dtype for value in values))
        values = [value.to(values[0].device, kind) for value in values]
    return torch.stack(values).sum()
