"""Whether all ranks hold the values that a checkpoint takes from one of them.

Axes of a user may let ranks train apart between two averages: `Layout.next_whole` says until when.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from fnaccel import tree
from fnaccel.collectives.objects import gather_objects
from fnaccel.engine.engine import Layout
from fnaccel.engine.same_rows import checksum
from fnaccel.errors import CheckpointError, UnleasedStateError
from fnaccel.state import TrainState, lease_of
from fnaccel.texts import ranks_of
from fnaccel.tree import Tree

_TREES = ("params", "buffers", "opt", "scale", "ema", "transforms")


def check_same_on_ranks(saved: Tree, where: str) -> None:
    """See that ranks hold the same values, where an axis lets them train apart. All ranks call it.

    Raises:
        CheckpointError: they don't at this step; or not even at a step at which the axis says so.
    """
    try:
        leaves = tree.leaves(saved, is_leaf=lambda node: isinstance(node, TrainState))
    except RecursionError:  # a tree that contains itself: the save says where
        return
    for state in leaves:
        layout = _layout_of(state, where) if isinstance(state, TrainState) else None
        if layout is None or layout.next_whole is None:
            continue
        whole = layout.next_whole(state.step)
        if whole != state.step:
            raise CheckpointError(
                f"after step {state.step} each rank holds values of its own, and one rank's would be kept",
                where=where,
                fix=f"train on to step {whole}, after which all ranks hold the same",
            )
        group = layout.mesh["loss"]
        found = gather_objects({name: _checksum(getattr(state, name)) for name in _TREES}, over=group)
        for name in _TREES:
            other = [rank for rank, sums in enumerate(found) if sums[name] != found[0][name]]
            if other:
                raise CheckpointError(
                    f"state.{name} differs between ranks (on {ranks_of(other)} of the mesh axis 'loss' from "
                    f"rank 0), though the axis says that step {state.step} is whole",
                    where=where,
                    fix=f"let Hooks.after_update make state.{name} equal in these steps, or mend next_whole",
                )


def _checksum(values: Tree) -> str:
    """Of all leaves but shards, which differ between ranks."""
    return checksum([leaf for leaf in tree.leaves(values) if not isinstance(leaf, DTensor)])


def _layout_of(state: TrainState, where: str) -> Layout | None:
    """The layout of a live state. None for a snapshot."""
    try:
        return lease_of(state, where).owner.engine.layout
    except UnleasedStateError:
        return None
