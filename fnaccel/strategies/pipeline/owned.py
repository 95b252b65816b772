"""A tensor that the ranks of one stage hold: other ranks know its shape, and have no memory for it.

States show the parameters of a pipeline so. An operation on tensors of one stage runs on that stage alone,
and its result lies there, too. Where stages meet, as in the sum of two stages' norms, or where a number is
read, the values are sent to all ranks. So every rank has to run the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch, tree
from fnaccel.extend import CapabilityError, Mesh
from fnaccel.strategies.pipeline._torch import NUMBERS
from fnaccel.tree import Tree

AXIS = "pp"


@attrs.frozen
class OnStage:
    """A placement along the axis of stages: the rank at this coordinate has the tensor, and no other one."""

    rank: int
    dim: int = 0

    def along(self, axis: str) -> str:
        """Where the tensor lies, for a table."""
        return f"on rank {self.rank} of {axis}"

    def is_replicate(self) -> bool:
        """Not all ranks have it."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:  # noqa: ARG002 - as placements of torch
        """No rank has a summand."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:  # noqa: ARG002 - as placements of torch
        """Ranks hold different parts: all of it, and nothing."""
        return True


class Owned(torch.Tensor):
    """A tensor of one stage. Attributes are named as those of a DTensor.

    Attributes:
        mesh: the ranks.
        rank: the coordinate along the axis of stages of the ranks that hold it.
        inner: the tensor as that stage has it. None on other ranks.
        device_mesh, placements: its layout, of which the axis of stages is one.
    """

    mesh: Mesh
    rank: int
    inner: Any
    device_mesh: Any
    placements: tuple[Any, ...]
    _local_tensor: torch.Tensor

    @staticmethod
    def make(
        inner: Any, shape: torch.Size, dtype: torch.dtype, mesh: Mesh, placements: tuple[Any, ...]
    ) -> Owned:
        """A tensor of one stage.

        Args:
            inner: the tensor itself, on ranks of the stage. None on others.
            shape, dtype: of the tensor.
            mesh: the ranks.
            placements: over the dimensions of `mesh.shown`. One is an `OnStage`.
        """
        made: Any = _torch.wrapper_tensor(Owned, shape, dtype, mesh.world.device)
        made.mesh, made.inner, made.placements = mesh, inner, placements
        made.rank = next(each.rank for each in placements if isinstance(each, OnStage))
        made.device_mesh = mesh.shown
        made._local_tensor = nothing(shape, dtype, mesh) if inner is None else _torch.local_of(inner)  # noqa: SLF001
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        held = "elsewhere" if self.inner is None else repr(self.inner)
        return f"Owned(stage rank {self.rank}, {list(self.shape)}, {self.dtype}: {held})"

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on all ranks, a copy. Every rank has to call it."""
        group: Any = self.mesh.group(AXIS)
        with torch.no_grad():
            if self.inner is None:
                whole = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.world.device)
            else:
                whole = tree.whole(self.inner).detach().clone().contiguous()
            if group is not None:
                dist.broadcast(whole, group=group, group_src=self.rank)
        return whole

    def to_local(self) -> torch.Tensor:
        """This rank's part: without elements on other stages."""
        return self._local_tensor

    def laid_out(self, local: torch.Tensor) -> Owned:
        """A tensor with this layout, of this rank's part."""
        inner = None if self.inner is None else _torch.laid_out_as(self.inner, local)
        return Owned.make(inner, self.shape, local.dtype, self.mesh, self.placements)

    def of_whole(self, whole: torch.Tensor) -> Owned:
        """A tensor with this layout, of values that each rank has whole."""
        inner = None if self.inner is None else tree.laid_out(whole, self.inner)
        return Owned.make(inner, self.shape, whole.dtype, self.mesh, self.placements)

    def local_offset(self) -> tuple[int, ...]:
        """The place of this rank's part in the tensor."""
        if self.inner is None or not hasattr(self.inner, "placements"):
            return (0,) * self.dim()
        return _torch.local_offset(self.inner)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise CapabilityError(
            "a tensor of one stage can't be pickled",
            where="a leaf of a state",
            fix="fa.tree.whole(value) is a tensor like any; fa.save(directory, state) writes all of them",
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the stage of its tensors, or on values that were sent to all ranks."""
        named = kwargs or {}
        owned = list(_owned((*args, *named.values())))
        first = owned[0]
        if func is torch.ops.aten.detach.default:
            return Owned.make(first.inner, first.shape, first.dtype, first.mesh, first.placements)
        writes = func._schema.is_mutable  # noqa: SLF001 - documented by torch
        target = args[0] if writes else None
        if writes and not isinstance(target, Owned):
            return func(*_mapped(Owned.full_tensor, args), **_mapped(Owned.full_tensor, named))
        alike = {each.rank for each in owned}  # the same on all ranks, as placements of results may not be
        reads = func in NUMBERS
        if writes and len(alike) > 1:  # a copy of what another stage has
            args = (target, *_mapped(Owned.full_tensor, args[1:]))
        elif reads or len(alike) > 1:
            return func(*_mapped(Owned.full_tensor, args), **_mapped(Owned.full_tensor, named))
        if first.inner is not None:
            args, named = _mapped(lambda each: each.inner, args), _mapped(lambda each: each.inner, named)
            result = func(*_beside(first.inner, args), **named)
        elif writes:
            return target
        else:
            result = func(*_mapped(_shape_alone, args), **(_mapped(_shape_alone, named) | _on_meta(named)))
        if writes:
            return target
        return tree.map(lambda made: first._result(made) if isinstance(made, torch.Tensor) else made, result)  # noqa: SLF001

    def _result(self, made: torch.Tensor) -> Owned:
        """The result of an operation on this rank, as a tensor of the stage."""
        inner = None if self.inner is None else made
        placements = tuple(
            each if isinstance(each, OnStage) else place
            for each, place in zip(self.placements, _placements(inner, self), strict=True)
        )
        return Owned.make(inner, made.shape, made.dtype, self.mesh, placements)


def nothing(shape: torch.Size, dtype: torch.dtype, mesh: Mesh) -> torch.Tensor:
    """The part of a tensor on a rank that has none of it: no rows."""
    return torch.empty((0, *shape[1:]), dtype=dtype, device=mesh.world.device)


def _placements(inner: Any, like: Owned) -> tuple[Any, ...]:
    """The placements of a result. A stage that has none of it takes those of the operand."""
    return getattr(inner, "placements", like.placements)


def _owned(values: Tree) -> Iterator[Owned]:
    for value in tree.leaves(values):
        if isinstance(value, Owned):
            yield value


def _mapped(fn: Callable[[Owned], Any], values: Any) -> Any:
    return tree.map(lambda value: fn(value) if isinstance(value, Owned) else value, values)


def _beside(inner: Any, args: Any) -> Any:
    """Whole tensors laid out beside a DTensor."""
    if not hasattr(inner, "placements"):
        return args
    return tree.map(
        lambda x: tree.laid_out(x, inner) if type(x) is torch.Tensor and x.shape == inner.shape else x, args
    )


def _shape_alone(value: Owned) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _on_meta(named: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if "device" in named else {}
