"""The private names of torch for FSDP2 on ranks that are simulated, with the versions each was checked on."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# ruff: noqa: SLF001
from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fnaccel.strategies._torch import shard_groups_of


def group_of(args: Sequence[Any]) -> str:
    """The name of the process group among the arguments of a collective's operation. (2.13)"""
    names = [arg for arg in args if isinstance(arg, str)]  # of a functional collective, the last text
    boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    found = names[-1:] or [dist.ProcessGroup.unbox(arg).group_name for arg in boxed[:1]]
    return found[0] if found else ""


def unsharded_gradients(root: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients that FSDP2 keeps whole, of micro-batches that do not communicate. (2.13)"""
    units: list[Any] = [module for module in root.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [group for unit in units for group in shard_groups_of(unit._get_fsdp_state())]
    params: list[Any] = [param for group in groups for param in group.fsdp_params]
    sums = [param.unsharded_accumulated_grad for param in params]
    sums += [param._unsharded_param.grad for param in params if hasattr(param, "_unsharded_param")]
    return [grad for grad in sums if grad is not None]


class _Chunks:
    """The chunks of a tensor for all ranks. FSDP2 takes two, or concatenates all along another dim."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __getitem__(self, rank: int) -> torch.Tensor:
        rows = self._tensor.shape[self._dim]
        size = -(-rows // self._count)
        start = min(rank * size, rows)
        if start == rows:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, rows - start))

    def joined(self, dim: int) -> torch.Tensor:
        """A tensor with the shape of all chunks, concatenated along `dim`, and no values."""
        shape = list(self._tensor.shape)
        shape[self._dim] //= self._count
        shape[dim] *= self._count
        return self._tensor.new_empty(shape)


class _WithoutChunks:
    """`torch`, but for the chunks of all ranks, which are not made."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    chunk = _Chunks

    @staticmethod
    def cat(values: Any, dim: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(values, _Chunks):
            return torch.cat(values, dim, out=out)
        return values.joined(dim) if out is None else out


@contextlib.contextmanager
def without_chunks() -> Generator[None]:
    """While the body runs, FSDP2 on tensors without values makes no tensors of the other ranks. (2.13)

    It makes one tensor for each rank as it shards a parameter, and in each gather of a parameter that is
    sharded along another dimension than the first. 90 parameters on 16,384 ranks would take minutes.
    """
    from torch.distributed.fsdp._fully_shard import (  # noqa: PLC0415 - slow to import
        _fsdp_collectives,
        _fsdp_param,
    )

    with (
        mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
        mock.patch.object(_fsdp_collectives, "torch", _WithoutChunks()),
    ):
        yield
