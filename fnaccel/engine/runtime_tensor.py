"""A tensor that a foreign runtime keeps in its own way: fetched whole when an operation needs it.

DeepSpeed partitions values flat, swaps them to disk, keeps a second copy in half precision. States show
such a value as a `Remote`: it has a shape and a dtype, takes no memory, and every torch operation on it
works on the runtime's values at that moment. `copy_` writes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.errors import CapabilityError
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh


class Remote(torch.Tensor):
    """A tensor behind two functions of a runtime. Every rank has to use it: fetching is collective."""

    _name: str
    _read: Callable[[], torch.Tensor]
    _write: Callable[[torch.Tensor], None]
    _mesh: Mesh

    @staticmethod
    def make(
        shape: torch.Size,
        *,
        name: str,
        read: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
        mesh: Mesh,
    ) -> Remote:
        """Make a `Remote` in fp32. Nothing is fetched.

        Args:
            shape: of the whole tensor.
            name: for printing.
            read: returns a copy of the whole tensor, on the device of this rank.
            write: takes the whole tensor.
            mesh: the ranks that `part` and `solid` spread it over.
        """
        remote: Any = _torch.wrapper_tensor(Remote, shape, torch.float32, mesh.world.device)
        remote._name, remote._read, remote._write, remote._mesh = name, read, write, mesh  # noqa: SLF001
        return remote

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Remote({self._name}, {list(self.shape)}, {self.dtype})"

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, a copy, as `DTensor.full_tensor` gives it."""
        with torch.no_grad():
            return self._read()

    def part(self) -> tuple[tuple[int, ...], torch.Tensor, bool]:
        """This rank's rows, as `Shard(0)` lays them out: their offset, values, and whether there are any."""
        rank, size = self._mesh.batch_rank, self._mesh.batch_size
        whole = self.full_tensor()
        if whole.dim() == 0 or size == 1:
            return (0,) * whole.dim(), whole, rank == 0
        each = -(-whole.shape[0] // size)
        start, end = (min(place * each, whole.shape[0]) for place in (rank, rank + 1))
        return (start, *(0,) * (whole.dim() - 1)), whole[start:end].clone(), end > start

    def solid(self) -> torch.Tensor:
        """A copy in memory, of which each rank holds its rows."""
        from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 - slow to import

        if self._mesh.batch_size == 1:
            return self.full_tensor()
        if self.dim() == 0:
            return DTensor.from_local(self.full_tensor(), self._mesh.device, [Replicate()], run_check=False)
        _, rows, _ = self.part()
        return DTensor.from_local(
            rows,
            self._mesh.device,
            [Shard(0)],
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def __setitem__(self, index: Any, value: Tree) -> None:
        whole = self.full_tensor()
        with torch.no_grad():
            whole[index] = _fetched(value)
            self._write(whole)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.solid()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _no_memory(self, "pickled")

    def share_memory_(self) -> Any:
        """Raise: there is no memory to share."""
        raise _no_memory(self, "shared")

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Fetch the values and run the operation on them. Changes in place are written back, `clone` spreads.

        A view is one of the copy: changing it changes nothing here.
        """
        ops = torch.ops.aten
        if func is ops.detach.default:
            return args[0]._alias()  # noqa: SLF001
        if func is ops.clone.default:
            return args[0].solid()
        if func is ops.copy_.default and isinstance(args[0], Remote):
            target = args[0]
            source = _fetched(args[1]).to(device=target.device, dtype=target.dtype)
            target._write(source.expand(target.shape).contiguous())  # noqa: SLF001
            return target
        named = kwargs or {}
        fetched = [_fetched(value) for value in args]
        fetched_named = {name: _fetched(value) for name, value in named.items()}
        result = func(*fetched, **fetched_named)
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - documented by torch
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            before = args[place] if place < len(args) else named.get(argument.name)
            after = fetched[place] if place < len(args) else fetched_named.get(argument.name)
            for target, value in _changed(before, after):
                target._write(value)  # noqa: SLF001
                result = target if result is value else result
        return result

    def _alias(self) -> Remote:
        return Remote.make(self.shape, name=self._name, read=self._read, write=self._write, mesh=self._mesh)


def _changed(before: Tree, after: Tree) -> Iterator[tuple[Remote, torch.Tensor]]:
    """Each Remote that an operation was to change, with the copy that it did change."""
    if isinstance(before, Remote):
        yield before, after
    elif isinstance(before, list | tuple):
        for value, copy in zip(before, after, strict=True):
            yield from _changed(value, copy)


def _no_memory(value: Remote, action: str) -> CapabilityError:
    return CapabilityError(
        f"{value!r} is kept by a runtime, and can't be {action}",
        where="a leaf of a state",
        fix="value.full_tensor() is a tensor like any; fa.snapshot(state) copies a whole state",
    )


def _fetched(value: Tree) -> Any:
    """Whole tensors in the place of a Remote or of a DTensor, also in a list."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if isinstance(value, list | tuple):
        return type(value)(_fetched(item) for item in value)
    return value
