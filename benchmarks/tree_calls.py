"""gather, reduce and pad of a tree: fnaccel, Accelerate, Lightning Fabric, and a call per leaf by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from environment import is_installed
from interleave import Samples, race

import fnaccel as fa

Tree = dict[str, torch.Tensor]
Calls = dict[str, Callable[[Tree], Any]]


def tree_of(leaves: int, rows: int, width: int) -> Tree:
    """`leaves` tensors `[rows, width]`; each rank's own values."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {f"leaf{i}": torch.randn(rows, width, generator=generator) for i in range(leaves)}


def _gather_by_hand(value: Tree) -> Tree:
    found = {}
    for name, leaf in value.items():
        everyone = leaf.new_empty(dist.get_world_size() * leaf.shape[0], *leaf.shape[1:])
        _ALL_GATHER(everyone, leaf)
        found[name] = everyone
    return found


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_by_hand(value: Tree) -> Tree:
    found = {}
    for name, leaf in value.items():
        found[name] = leaf.clone()
        dist.all_reduce(found[name])
    return found


def _pad_by_hand(value: Tree) -> Tree:
    found = {}
    for name, leaf in value.items():
        most = torch.tensor(leaf.shape[0])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = F.pad(leaf, (0, 0, 0, int(most) - leaf.shape[0]))
    return found


def _gather_by_fabric(fabric: Any, value: Tree) -> Tree:
    # Fabric stacks the ranks in a dimension of their own
    return {name: leaf.flatten(0, 1) for name, leaf in fabric.all_gather(value).items()}


def calls(operation: str) -> Calls:
    """The way of every contestant to do one operation. Fabric has no pad."""
    ours = {"gather": fa.gather, "reduce": fa.reduce, "pad": fa.pad_across_processes}
    by_hand = {"gather": _gather_by_hand, "reduce": _reduce_by_hand, "pad": _pad_by_hand}
    contestants: Calls = {"fnaccel": ours[operation]}
    if is_installed("Accelerate"):
        contestants["Accelerate"] = _by_accelerate(operation)
    if is_installed("Lightning Fabric") and operation != "pad":
        contestants["Lightning Fabric"] = _by_fabric(operation)
    return {**contestants, "torch.distributed, a call per leaf": by_hand[operation]}


def _by_accelerate(operation: str) -> Callable[[Tree], Any]:
    from accelerate.utils import operations

    peers.accelerate()
    if operation == "reduce":
        return partial(operations.reduce, reduction="sum")
    return operations.gather if operation == "gather" else operations.pad_across_processes


def _by_fabric(operation: str) -> Callable[[Tree], Any]:
    fabric = _fabric()
    if operation == "reduce":
        return partial(fabric.all_reduce, reduce_op="sum")
    return partial(_gather_by_fabric, fabric)


def measure(operation: str, leaves: int, rows: int, width: int, blocks: int, each: int) -> Samples:
    """Seconds per call on this rank, after a check that all results agree. Runs on every rank."""
    uneven = dist.get_rank() if operation == "pad" else 0
    value = tree_of(leaves, rows - uneven, width)
    contestants = calls(operation)
    expected = fa.reduce(value) if operation == "reduce" else contestants["fnaccel"](value)
    for name, call in contestants.items():
        # some of the peers' calls work in place
        result = call({key: leaf.clone() for key, leaf in value.items()})
        for key, leaf in expected.items():
            if not torch.allclose(result[key], leaf):
                raise SystemExit(f"{operation}: {name} gives another result in {key}")
    return race({name: partial(call, value) for name, call in contestants.items()}, blocks=blocks, calls=each)


@functools.cache  # a process has one process group, and one Fabric
def _fabric() -> Any:
    return peers.fabric()
