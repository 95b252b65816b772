"""`gather_state_dict`: the weights of a model as one dict, on rank 0."""

from __future__ import annotations

from typing import Any

import torch

from fnaccel import tree
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.choosing import Patterns, Rename
from fnaccel.checkpoint.format.items import pick
from fnaccel.errors import ArgumentError
from fnaccel.interchange.exporting import Style, dtype_in, keys_of, one_model, weights_of, world_of
from fnaccel.interchange.targets import check_exportable, modules_of
from fnaccel.state import TrainState
from fnaccel.step.choices import DtypeName
from fnaccel.tree import Tree
from fnaccel.world.world import World

_WHERE = "fa.interchange.gather_state_dict"


def gather_state_dict(
    state: Tree,
    *,
    dtype: DtypeName | torch.dtype | None = None,
    ema: bool = False,
    model: str | None = None,
    only: Patterns = None,
    skip: Patterns = None,
    rename: Rename = None,
    world: World | None = None,
) -> dict[str, torch.Tensor] | None:
    """Parameters and persistent buffers, whole and on the CPU, as `Module.state_dict` names them.

    Every rank calls it: sharded tensors are gathered one at a time. Rank 0 holds the whole model in host
    memory. To write files, `fa.interchange.export_hf` and `fa.save` need no such copy.

    Args:
        state: the state of a train step, or a snapshot of it.
        dtype, ema, model, only, skip, rename: as for `fa.interchange.export_hf`.
        world: the world, if none was started in this context.

    Returns:
        Name -> tensor on rank 0, a tied one under each of its names (a snapshot has the first name only).
        None on the other ranks.

    Raises:
        ArgumentError: no state, several models and none chosen, no averages, patterns that match nothing.
        StaleStateError: the state was donated.

    Example:
        >>> weights = fa.interchange.gather_state_dict(state, dtype="bf16")
        >>> weights["lm_head.weight"].dtype
        torch.bfloat16
    """
    if not isinstance(state, TrainState):
        raise ArgumentError(
            f"state is a {type(state).__name__}", where=_WHERE, fix="give the state of a train step"
        )
    check_exportable(state, _WHERE)
    style = Style(dtype=dtype, ema=ema, model=model, only=only, skip=skip, rename=rename, where=_WHERE)
    active = world_of(world, state)
    picked: dict[str, Any] = {}

    def choose() -> None:
        tensors = one_model(weights_of(state, modules_of(state), style), keys_of(state), style)
        picked.update(pick(tensors, only, skip, rename, _WHERE))
        dtype_in(style)

    together(active, _WHERE, choose)
    target = dtype_in(style)
    gathered: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for name, value in picked.items():
        known = first.setdefault(id(value), name)
        if known != name:  # tied: one tensor under two names
            gathered |= {name: gathered[known]} if active.is_main else {}
            continue
        whole = tree.whole(value).detach()
        if active.is_main:
            chosen = target if target is not None and whole.is_floating_point() else whole.dtype
            gathered[name] = whole.to("cpu", chosen, copy=True)
    return gathered if active.is_main else None
