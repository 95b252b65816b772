"""A part of a stored tree, laid over the one that it is to be restored into: only=, skip=, rename=."""

from __future__ import annotations

from typing import Any

from fnaccel.checkpoint.choosing import KEEP, Patterns, Rename, choose, renamed
from fnaccel.checkpoint.format.walk import child, entries_of, rebuilt
from fnaccel.state import TrainState, check_live
from fnaccel.tree import Tree

_WHERE = "fa.restore"


def select(like: Tree, stored: Tree, only: Patterns, skip: Patterns, rename: Rename) -> tuple[Any, list[str]]:
    """A tree shaped as `like` with the selected values of `stored`, and `KEEP` elsewhere.

    Args:
        like: the tree to restore into.
        stored: the decoded tree of a checkpoint.
        only, skip: patterns of paths, as `like` has them.
        rename: from stored paths to the paths of `like`.

    Returns:
        The tree, and the chosen paths that only one side has.

    Raises:
        ArgumentError: a pattern that matches nothing, or a rename that makes two paths one.
        StaleStateError: a state in `like` was donated.
    """
    selection = _Selection(stored, rename)
    ours = selection.open(like)
    selection.chosen = choose([*ours, *selection.theirs], only, skip, _WHERE)
    selected = selection.over("", like)
    problems = [f"{path}: only in like" for path in ours if selection.lacks(path)]
    beyond = sorted(selection.chosen & selection.theirs.keys() - set(ours))
    return selected, problems + [f"{path}: only in the checkpoint" for path in beyond]


def is_complete(selected: Tree) -> bool:
    """Whether nothing below a node is kept."""
    return selected is not KEEP and all(is_complete(inner) for inner in (entries_of(selected) or {}).values())


class _Selection:
    def __init__(self, stored: Tree, rename: Rename) -> None:
        stored_leaves = dict(_leaves("", stored))
        names = renamed(stored_leaves, rename, _WHERE)
        self.theirs = {names[path]: value for path, value in stored_leaves.items()}
        self.chosen: set[str] = set()
        self._stored = stored

    def open(self, like: Tree) -> list[str]:
        """The paths of the leaves of `like`."""
        if isinstance(like, TrainState):
            check_live(like)
            if like.extras is None and isinstance(self._stored, TrainState):
                # the user's own come back whatever they are: as one
                self.theirs = {k: v for k, v in self.theirs.items() if not k.startswith("extras/")}
                self.theirs["extras"] = self._stored.extras
        return [path for path, _ in _leaves("", like)]

    def lacks(self, path: str) -> bool:
        """Whether a chosen path of `like` is not in the checkpoint."""
        return path in self.chosen and path not in self.theirs

    def over(self, path: str, like: Tree) -> Any:
        """The chosen part of the checkpoint, shaped as `like`."""
        inner = entries_of(like)
        if not inner:
            return self.theirs[path] if path in self.chosen and path in self.theirs else KEEP
        selected = {key: self.over(child(path, key), entry) for key, entry in inner.items()}
        return rebuilt(like, selected)


def _leaves(path: str, value: Tree) -> Any:
    inner = entries_of(value)
    if inner is None:
        yield path, value
        return
    for key, entry in inner.items():
        yield from _leaves(child(path, key), entry)
