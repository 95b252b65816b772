"""Older checkpoints (until 24 November 2026): a transform that was applied twice had one state for both."""

from __future__ import annotations

import re
import warnings

import attrs

from fnaccel.state import TrainState
from fnaccel.tree import Tree

_LATER = re.compile(r"(.+)\.\d+")


def with_own_states(like: Tree, stored: Tree) -> Tree:
    """The stored tree, in which each application of a transform has the state that they shared.

    Args:
        like: the tree to restore into.
        stored: a decoded tree.
    """
    if not (isinstance(like, TrainState) and isinstance(stored, TrainState)):
        return stored
    saved = stored.transforms
    later = {name: found[1] for name in like.transforms if (found := _LATER.fullmatch(name)) is not None}
    shared = {name: first for name, first in later.items() if name not in saved and first in saved}
    if not shared:
        return stored
    names = ", ".join(sorted({*shared.values()}))
    warnings.warn(
        f"the checkpoint holds one state for {names}, which was applied several times: {', '.join(shared)} "
        "begins with it too",
        UserWarning,
        stacklevel=2,
    )
    own = {name: saved[first] for name, first in shared.items()}
    return attrs.evolve(stored, transforms={**saved, **own})
