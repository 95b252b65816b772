"""The values of a pure update: copies of a state's, the choice between old and new ones, own states."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fnaccel import _torch, tree
from fnaccel.errors import ArgumentError, CapabilityError, OwnershipError
from fnaccel.models.building import is_owned
from fnaccel.step.loss import is_uncounted
from fnaccel.tree import Tree

_WHERE = "fa.pure(train_step)"


def signed(root: int) -> int:
    """A seed of 64 bits as int64 has it."""
    return root - (1 << 64) if root >> 63 else root


def copied(value: Tree) -> Any:
    """Plain dicts of copies. Numbers as 0-d tensors, whose dtype holds all their digits."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return tree.map(_copy, value)


def _copy(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone() if _torch.is_mapped(leaf) else leaf.detach().clone()
    if isinstance(leaf, bool | int | float):
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(leaf)]
        return torch.tensor(leaf, dtype=dtype)
    raise CapabilityError(
        f"a transform keeps a {type(leaf).__name__}, and values are tensors",
        where=_WHERE,
        fix="keep tensors and numbers in its state",
    )


def as_number(weight: Any, like: torch.Tensor) -> torch.Tensor:
    """A weight as a tensor."""
    return weight if isinstance(weight, torch.Tensor) else torch.full((), weight, device=like.device)


def no_row_counts(weight: Any, like: torch.Tensor) -> torch.Tensor | None:
    """Whether no row counts, a 0-d bool tensor. None if the host knows that some do."""
    uncounted = is_uncounted(weight)
    if isinstance(uncounted, torch.Tensor):
        return uncounted > 0
    return torch.ones((), dtype=torch.bool, device=like.device) if uncounted else None


def unless(skip: torch.Tensor | None, old: Any, new: Any) -> Any:
    """The old values if an update is left out, else the new ones. Not a product: those may be NaN."""
    if skip is None:
        return new
    before, structure = _torch.flatten(old)
    after, _ = _torch.flatten(new)
    chosen = [torch.where(skip, a, b) for a, b in zip(before, after, strict=True)]
    return _torch.unflatten(chosen, structure)


def keep(owns: dict[str, Any], name: str, state: Tree) -> None:
    """Keep the next state of a user's transform, in the dtypes of the one before."""
    if state is None and name not in owns:
        return
    old, structure = _torch.flatten(owns.get(name))
    new, other = _torch.flatten(state)
    if name not in owns or structure != other:
        raise ArgumentError(
            f"the state of transform {name!r} changed its structure",
            where=f"transform {name}",
            fix="give its first state by init=, and return a state of the same structure",
        )
    kept = [
        b.to(a.dtype) if isinstance(b, torch.Tensor) else torch.full_like(a, b)
        for a, b in zip(old, new, strict=True)
    ]
    owns[name] = _torch.unflatten(kept, structure)


def own_models(model: Any) -> Any:
    """Factories of a model: of a built module one that copies it as it is now.

    Raises:
        OwnershipError: a train step holds a built module, whose forward and flags it may have changed.
    """
    if isinstance(model, dict):
        return {key: own_models(each) for key, each in model.items()}
    if not isinstance(model, nn.Module):
        return model
    if is_owned(model):
        raise OwnershipError(
            f"a train step holds this {type(model).__name__}, and a pure update has its own modules",
            where=_WHERE,
            fix="give a factory, fa.distribute(lambda: Net()); or call fa.pure before train_step.init",
        )
    first = copy.deepcopy(model)
    return lambda: copy.deepcopy(first)
