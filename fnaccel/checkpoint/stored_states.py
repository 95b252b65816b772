"""States that were saved otherwise than a train step holds them: by another strategy, or an older version.

Replicas that train apart hold values of their own. The first replica's lie at their paths in the tree, those
of replica i under `replicas/i/` before them, as the random streams of ranks do.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.checkpoint.choosing import KEEP
from fnaccel.checkpoint.format.manifest import Manifest, Stored
from fnaccel.checkpoint.selection import is_complete
from fnaccel.engine.engine import Engine
from fnaccel.errors import UnleasedStateError
from fnaccel.state import TrainState, lease_of
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh

ROOT = "replicas"
ALL = ("params", "buffers", "opt", "scale", "ema", "updates")
"""Between two averages replicas differ in these. An axis has a state that they share."""
_LATER = re.compile(r"(.+)\.\d+")
_LOG = logging.getLogger("fnaccel")


def engine_of(state: Tree) -> Engine | None:
    """The engine that a live state belongs to, or None."""
    try:
        return lease_of(state, "fa.save").owner.instance.engine if isinstance(state, TrainState) else None
    except UnleasedStateError:
        return None


class Replica:
    """The replica of this rank, and the tensors of a state that replicas hold values of their own of.

    Args:
        mesh: of the train step.

    Attributes:
        count, number: how many replicas there are, and which of them this rank is in.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.count = mesh.loss_size // mesh.gradient_size
        self.number = mesh.loss_rank // mesh.gradient_size
        self._mesh = mesh
        self._own: set[int] = set()

    def add(self, values: Tree) -> None:
        """Keep the tensors of a tree for each replica."""
        self._own.update(id(leaf) for leaf in tree.leaves(values))

    def place(self, path: str, value: torch.Tensor) -> str:
        """The path at which this rank's values of a tensor are stored."""
        return f"{ROOT}/{self.number}/{path}" if self.number and id(value) in self._own else path

    def writes(self, value: torch.Tensor) -> bool:
        """Whether this rank is the first of its replica among those that hold its part of a tensor."""
        names: tuple[str, ...] = self._mesh.shown.mesh_dim_names
        placements = getattr(value, "placements", [None] * len(names))
        copies = [n for n, at in zip(names, placements, strict=True) if at is None or at.is_replicate()]
        return not any(self._mesh.shown.get_local_rank(n) for n in copies if n not in self._mesh.apart)


def reader(
    described: Manifest, where: str, like: TrainState | None, *, nested: bool, partly: bool, speaks: bool
) -> Callable[[str], Stored]:
    """A function that returns the tensor at a path: of this rank's replica, or the mean over replicas.

    A replica takes its own slots if the run has as many replicas that keep theirs. It takes all its own
    values, from between two averages, if the run has the same axis, is between two averages at that step, and
    reads all.

    Args:
        described: the manifest.
        where: for messages.
        like: a state to restore into, or None.
        nested: whether it lies within a tree.
        partly: whether some paths are left alone.
        speaks: whether this rank logs that a mean is read.
    """
    read, engine = described.reader(where), engine_of(like)
    replica, goes_on, own_slots = None, False, False
    if engine is not None:
        replica = Replica(engine.layout.mesh)
        if described.written_by.get("axis_state") == engine.name and not partly:
            step = described.tree["TrainState"]["step"]  # `fa.save(step=)` may have named another
            goes_on = engine.layout.whole_from(step) != step
        own_slots = "opt" in (engine.layout.of_replicas or ())
    told: list[str] = []

    def of_replica(path: str) -> Stored:
        found = [read(path)]
        while (name := f"{ROOT}/{len(found)}/{path}") in described.tensors:
            found.append(described.tensors[name])
        slot = (path.partition("/")[2] if nested else path).startswith("opt/")
        own = goes_on or (slot and own_slots)
        if own and replica is not None and replica.count == len(found):
            return found[replica.number]
        if len(found) > 1 and speaks and not told:
            told.append(path)
            what = "optimizer slots" if slot else "parameters and optimizer slots"
            _LOG.warning("the checkpoint holds %s of %d replicas: their mean is read", what, len(found))
        return attrs.evolve(found[0], others=tuple(found[1:]))

    return of_replica


def fitted(like: Tree, stored: Tree, written_by: Mapping[str, Any]) -> Tree:
    """The stored tree with the states of transforms and axes that `like` has.

    The state of an axis that is not the run's is left out. That of the run's axis is `KEEP` if nothing is
    stored of it. In older checkpoints (until 24 November 2026) a transform that was applied twice had one
    state for both, and each begins with that.

    Args:
        like: the tree to restore into.
        stored: a decoded tree.
        written_by: of the manifest.
    """
    if not (isinstance(like, TrainState) and isinstance(stored, TrainState)):
        return stored
    if not (like.transforms or stored.transforms):
        return stored
    engine, saved = engine_of(like), dict(stored.transforms)
    gone = written_by.get("axis_state")
    if gone in saved and gone not in like.transforms:
        del saved[gone]
    if engine is not None and engine.hooks.init is not None:
        saved.setdefault(engine.name, KEEP)
    later = {name: found[1] for name in like.transforms if (found := _LATER.fullmatch(name)) is not None}
    shared = {name: first for name, first in later.items() if name not in saved and first in saved}
    if shared:
        names = ", ".join(sorted({*shared.values()}))
        warnings.warn(
            f"the checkpoint holds one state for {names}, which was applied several times: "
            f"{', '.join(shared)} begins with it too",
            UserWarning,
            stacklevel=2,
        )
    return attrs.evolve(
        stored, transforms={**saved, **{name: saved[first] for name, first in shared.items()}}
    )


def has_axis_state(like: TrainState, stored: TrainState) -> bool:
    """Whether all of the state of the axis of a live state is stored, and chosen."""
    engine, transforms = engine_of(like), stored.transforms
    return engine is None or (transforms is not KEEP and is_complete(transforms.get(engine.name, {})))
