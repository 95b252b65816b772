"""The differences between the plan of a run that goes on and that of the run that saved, in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fnaccel.errors import UnleasedStateError
from fnaccel.state import TrainState, lease_of
from fnaccel.tree import Tree

_ROW = re.compile(r"  [A-Z]+ +(\S.*?)(?:  +(.*?))?(?:  \[by .*\])?")
_NOT_COMPARED = ("gradients",)
"""Rows that say how gradients are averaged over ranks."""
_LOG = logging.getLogger("fnaccel")


def tell_changes(written_by: Mapping[str, Any], restored: Tree) -> None:
    """Log one line if a state goes on with a checkpoint whose plan computed something else.

    The strategy, the ranks and the notes may differ: any layout goes on with the checkpoint of any other.

    Args:
        written_by: of the manifest.
        restored: the tree that was restored. Only a live state has a plan.
    """
    if not isinstance(restored, TrainState) or not isinstance(written_by.get("plan"), str):
        return
    try:
        now = str(lease_of(restored, "fa.restore").owner.plan)
    except UnleasedStateError:
        return
    changes = changes_of(written_by["plan"], now)
    if changes:
        _LOG.warning("the run goes on from step %d with another plan: %s", restored.step, "; ".join(changes))


def changes_of(before: str, now: str) -> list[str]:
    """The rows in which two printed plans differ.

    Example:
        >>> plans = [
        ...     str(fa.train_step(loss_fn, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(lr)).plan)
        ...     for lr in (0.1, 0.2)
        ... ]
        >>> changes_of(*plans)
        ['sgd is sgd(lr=0.2, momentum=0.0, nesterov=False, weight_decay=0.0), and was ...']
    """
    old, new = _rows(before), _rows(now)
    named = [name for name in (*old, *new) if old.get(name) != new.get(name)]
    return [_change(name, old.get(name), new.get(name)) for name in dict.fromkeys(named)]


def _rows(plan: str) -> dict[str, str]:
    """The text of each row by its name, and the name of the loss."""
    first, *lines = plan.splitlines()
    rows = {"loss": first.rpartition(":")[2]}
    for line in lines:
        found = _ROW.fullmatch(line)
        if found is not None and found[1] not in _NOT_COMPARED:
            rows[found[1]] = found[2] or ""
    return rows


def _change(name: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return f"{name} ({new if old is None else old}) is {'new' if old is None else 'gone'}"
    return f"{name} is {new}, and was {old}"
