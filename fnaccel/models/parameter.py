"""A trainable parameter as engines hand it to optimizers and transforms, and how axes cut parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any, Literal

import attrs
import torch

from fnaccel import _torch
from fnaccel.errors import ArgumentError
from fnaccel.step.callables import plan_text

Select = str | Callable[[str, Any], bool]
"""A pattern of parameter names, as a shell matches them, or a function `(name, parameter) -> bool`."""


@attrs.frozen(kw_only=True)
class Cut:
    """How an axis lays a parameter out over its ranks, while the module holds this rank's part.

    Attributes:
        shape: the shape of the whole parameter.
        dim: the dimension that is cut, or None if each rank holds all of it.
        matrices: how many matrices are packed in that dimension. Each of them is cut.
        partial: whether a rank's gradient is one summand of the whole gradient.
        axis: the mesh axis.
    """

    shape: torch.Size
    dim: int | None = None
    matrices: int = 1
    partial: bool = False
    axis: str = "tp"

    def part_shape(self, size: int) -> tuple[int, ...]:
        """The shape of the first rank's part, of `size` ranks. No other part is larger."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = -(-shape[self.dim] // size)
        return tuple(shape)

    @property
    def placement(self) -> Any:
        """The placement of a DTensor along the axis."""
        from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - slow to import

        if self.dim is None:
            return Replicate()
        return Shard(self.dim) if self.matrices == 1 else _torch.packed_shard(self.dim, self.matrices)


@attrs.frozen
class Leaf:
    """A trainable parameter.

    Attributes:
        name: its canonical name.
        param: the parameter itself, as its module has it (a DTensor under fsdp).
        shard: this rank's part of it, the tensor that updates are written to.
        shown: the parameter as states show it: a DTensor over all axes of the mesh if ranks hold parts.
        copies: the number of ranks with this part, among those which together hold the whole model.
        keep: notes a tensor with the layout of the parameter, if a runtime lays tensors out.
    """

    name: str
    param: Any
    shard: torch.Tensor
    shown: Any
    copies: int = 1
    keep: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts."""
        return type(self.shown) is not torch.Tensor and hasattr(self.shown, "placements")

    @property
    def shown_otherwise(self) -> bool:
        """Whether states show another layout than that of the parameter itself."""
        return self.sharded and getattr(self.param, "device_mesh", None) != self.shown.device_mesh

    def like(self, local: torch.Tensor) -> Any:
        """A local tensor laid out as states show the parameter."""
        return _torch.laid_out_as(self.shown, local) if self.keep is None else self.keep(local)

    def own(self, local: torch.Tensor) -> Any:
        """A local tensor laid out as the parameter itself is, such as its gradient."""
        return _torch.laid_out_as(self.param, local)


def takes(select: Select, name: str, param: Any) -> bool:
    """Whether a selection takes a parameter.

    Raises:
        ArgumentError: a function that gives no bool, or does not take two arguments.
    """
    try:
        taken: object = fnmatch.fnmatchcase(name, select) if isinstance(select, str) else select(name, param)
    except TypeError as error:
        raise ArgumentError(
            f"{plan_text(select)} can't select parameters: {error}",
            where="the selection of parameters",
            fix="take two arguments: lambda name, parameter: parameter.ndim == 2",
        ) from error
    if not isinstance(taken, bool):
        raise ArgumentError(
            f"{plan_text(select)} gave {taken!r} for {name!r}",
            where="the selection of parameters",
            fix="return True or False: lambda name, parameter: parameter.ndim == 2",
        )
    return taken


def memory_of(tensor: torch.Tensor) -> Literal["dense", "gaps", "shared"]:
    """How the elements of a tensor lie in memory.

    Returns:
        "dense": they fill a stretch of memory, in any order of the dimensions.
        "gaps": other memory lies between them.
        "shared": several elements have one place, as after `expand`.
    """
    expected, gaps = 1, False
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size < 2:
            continue
        if stride < expected:
            return "shared" if tensor.numel() else "dense"
        gaps = gaps or stride > expected
        expected = stride * size
    return "gaps" if gaps and tensor.numel() else "dense"
