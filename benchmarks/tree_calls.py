"""gather, reduce and pad of a tree: fnaccel, Accelerate, Lightning Fabric, and a call per leaf by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from interleave import race

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


def calls(operation: str, fabric: Any) -> Calls:
    """Every contestant's way to do one operation; Fabric has no pad."""
    from accelerate.utils import operations

    hand, lightning = "torch.distributed, a call per leaf", "Lightning Fabric"
    if operation == "gather":
        return {
            "fnaccel": fa.gather,
            "Accelerate": operations.gather,
            lightning: partial(_gather_by_fabric, fabric),
            hand: _gather_by_hand,
        }
    if operation == "reduce":
        return {
            "fnaccel": fa.reduce,
            "Accelerate": partial(operations.reduce, reduction="sum"),
            lightning: partial(fabric.all_reduce, reduce_op="sum"),
            hand: _reduce_by_hand,
        }
    return {
        "fnaccel": fa.pad_across_processes,
        "Accelerate": operations.pad_across_processes,
        hand: _pad_by_hand,
    }


def measure(operation: str, leaves: int, rows: int, width: int, blocks: int, each: int) -> dict[str, float]:
    """Seconds per call on this rank, once all results are seen to agree; runs on every rank."""
    peers.accelerate()
    fabric = _fabric()
    uneven = dist.get_rank() if operation == "pad" else 0
    value = tree_of(leaves, rows - uneven, width)
    found = calls(operation, fabric)
    expected = fa.reduce(value) if operation == "reduce" else found["fnaccel"](value)
    for name, call in found.items():
        # some of the peers' calls work in place
        result = call({key: leaf.clone() for key, leaf in value.items()})
        for key, leaf in expected.items():
            if not torch.allclose(result[key], leaf):
                raise SystemExit(f"{operation}: {name} gives another result in {key}")
    return race({name: partial(call, value) for name, call in found.items()}, blocks=blocks, calls=each)


_kept: list[Any] = []


def _fabric() -> Any:
    if not _kept:
        _kept.append(peers.fabric())
    return _kept[0]
