"""Gradients averaged over ranks inside a compiled graph: flat buckets, one all-reduce each.

The hooks of DistributedDataParallel (Li et al. 2020), written as plain operations. As written, all of them
come after the backward pass: `begin_when_ready` moves each to where its gradients are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from fnaccel import _torch

MIB = 1 << 20
_SMALLEST, _LARGEST = 1 * MIB, 25 * MIB
TORCH_SIZES = (1 * MIB, 25 * MIB)
"""The sizes of DistributedDataParallel's first bucket and of the others, by default."""
_WANTED = 8


def bucket_bytes(total: int, bucket_mb: float | None = None) -> float:
    """Size of a bucket: so many MiB, or by the bytes of gradients about eight buckets of 1 to 25 MiB."""
    if bucket_mb is not None:
        return bucket_mb * MIB
    return min(_LARGEST, max(_SMALLEST, -(-total // _WANTED)))


@attrs.frozen
class Buckets:
    """The buckets of gradients, their dtype and their process group.

    Attributes:
        members: indices of gradients by bucket, last parameter first: backward makes these first.
        group: the process group.
        size: the number of ranks. Gradients are divided by it before they are summed.
        dtype: the dtype of the all-reduce. None: the gradients' own.
    """

    members: tuple[tuple[int, ...], ...]
    group: Any
    size: int
    dtype: torch.dtype | None = None

    def average(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mean over ranks of each gradient, for compiled code."""
        reductions = [self._begin([grads[i] for i in bucket]) for bucket in self.members]
        averaged = list(grads)
        for bucket, flat in zip(self.members, reductions, strict=True):
            whole = _torch.end_collective(flat)
            parts = whole.split([grads[i].numel() for i in bucket])
            for index, part in zip(bucket, parts, strict=True):
                averaged[index] = part.view(grads[index].shape).to(grads[index].dtype)
        return averaged

    def graph_pass(self) -> Callable[..., Any] | None:
        """The pass over the graph by which all-reduces run beside the backward pass."""
        if not _torch.can_make_leaves():  # of torch 2.11 only graphs without a pass were run
            return None
        group = self.group.group_name
        return _torch.graph_pass(functools.partial(_all_reduce_when_ready, group=group), (__file__,), group)

    def _begin(self, grads: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        if self.dtype is not None:
            flat = flat.to(self.dtype)
        return _torch.begin_all_reduce(flat / self.size, self.group)


def lay_out(tensors: Sequence[torch.Tensor], bucket_mb: float | None) -> tuple[tuple[int, ...], ...]:
    """Buckets of indices, last tensor first, each of one dtype.

    Args:
        tensors: the parameters.
        bucket_mb: MiB in a bucket. None: from the size of the model.
    """
    total = sum(t.numel() * t.element_size() for t in tensors)
    most = bucket_bytes(total, bucket_mb)
    buckets: list[list[int]] = []
    filled: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        size = tensor.numel() * tensor.element_size()
        bucket, filled_bytes = filled.get(tensor.dtype, ([], 0))
        if not bucket or filled_bytes + size > most:
            bucket, filled_bytes = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filled[tensor.dtype] = bucket, filled_bytes + size
    return tuple(map(tuple, buckets))


def _all_reduce_when_ready(graph: fx.Graph, group: str) -> None:
    begin_when_ready(graph, "all_reduce", {group}, in_order=True)
    graph.lint()


def begin_when_ready(graph: fx.Graph, kind: str, groups: Container[str], *, in_order: bool) -> list[fx.Node]:
    """Move each reduction, and what is computed for it alone, to the last node that it needs. Returns them.

    Args:
        graph: the graph of a step.
        kind: of the reductions.
        groups: the names of their process groups.
        in_order: whether none passes one before it. A rank whose loss leaves parameters out has zeros, and
            could send them at once, while other ranks wait for another reduction.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    first = max((node for node in place if node.op == "placeholder"), key=place.__getitem__)
    before, earliest = first, first
    reduces = [node for node in place if kind in str(node.target) and node.args[-1] in groups]
    for reduce in reduces:
        own, waiting = {reduce}, list(reduce.all_input_nodes)
        while waiting:
            node = waiting.pop()
            if node.op == "call_function" and own.issuperset(node.users):
                own.add(node)
                waiting.extend(node.all_input_nodes)
        needed = {arg for node in own for arg in node.all_input_nodes if arg not in own}
        ready = max(needed, key=place.__getitem__, default=first)
        if in_order and place[ready] <= place[earliest]:
            after = before
        else:
            after = earliest = ready
        for node in sorted(own, key=place.__getitem__):
            after.append(node)
            after = node
        before = after
    return reduces
