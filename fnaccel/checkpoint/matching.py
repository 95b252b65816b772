"""Compares a checkpoint with the tree to restore into. Lists each path that differs, with both sides.

No tensor is read or changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fnaccel.checkpoint.choosing import KEEP
from fnaccel.checkpoint.format import walk
from fnaccel.checkpoint.format.dtypes import name_of
from fnaccel.checkpoint.format.manifest import Stored
from fnaccel.checkpoint.format.walk import NODES, Array, Node, Object
from fnaccel.errors import TreeMismatchError
from fnaccel.state import TrainState, check_live, plain
from fnaccel.texts import counted
from fnaccel.tree import Tree

_EXACT = 1 << 24  # float32 holds every whole number up to here


@attrs.frozen
class Match:
    """Each stored tensor with its target tensor, or with None if `like` has no tensor for it."""

    pairs: list[tuple[torch.Tensor | None, Stored]]


def match(like: Tree, stored: Tree, problems: Sequence[str] = ()) -> Match:
    """Compare a tree with a stored tree (`Stored` for a tensor, `KEEP` for an unchanged place).

    Args:
        like: the tree to restore into.
        stored: a decoded tree.
        problems: differences found earlier.

    Raises:
        TreeMismatchError: lists each path that is missing, unexpected, or of another kind, shape or dtype.
        StaleStateError: a state in `like` was donated.
    """
    matcher = _Matcher()
    matcher.problems.extend(problems)
    matcher.node("", like, stored)
    if matcher.problems:
        count = len(matcher.problems)
        raise TreeMismatchError(
            f"{counted(count, 'path differs', 'paths differ')} between the checkpoint and like=: "
            + "; ".join(matcher.problems),
            where="fa.restore",
            fix="give a like= with the models, optimizer and transforms that were saved, or select "
            "paths: only=, skip=, rename=. Nothing was changed",
        )
    return Match(matcher.pairs)


class _Matcher:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.pairs: list[tuple[torch.Tensor | None, Stored]] = []
        self.own = False  # in a state's extras
        self.averages = False  # in a state's ema

    def node(self, path: str, like: Tree, stored: Tree) -> None:
        if stored is KEEP:
            return
        like = plain(like)
        if self.own and comes_back(like, stored):
            self.collect(stored)
        elif isinstance(stored, Stored):
            self.tensor(path, like, stored)
        elif isinstance(stored, Array):
            self.array(path, like, stored)
        elif isinstance(stored, Object):
            self.object(path, like, stored)
        elif isinstance(like, dict) and isinstance(stored, dict):
            self.entries(path, like, stored)
        elif isinstance(like, TrainState) and isinstance(stored, TrainState):
            check_live(like)
            self.state(path, like, stored)
        elif isinstance(stored, Node) and type(like) not in (dict, list, tuple, *NODES.values()):
            opened = None if walk.is_object(like) else walk.opened(like)
            if opened is None:
                self.differ(path, like, stored)
            else:
                self.entries(path, opened[0], stored.entries)
        elif type(like) is not type(stored):
            self.differ(path, like, stored)
        elif (inner := walk.entries_of(like)) is not None:
            self.entries(path, inner, walk.entries_of(stored) or {})

    def object(self, path: str, like: Tree, stored: Object) -> None:
        """An object loads its state itself, and raises then if the state does not fit."""
        if walk.is_object(like):
            self.collect(stored.state)
        else:
            self.node(path, like, stored.state)

    def array(self, path: str, like: Tree, stored: Array) -> None:
        tensor: Stored = stored.tensor
        fits = walk.is_array(like) and (name_of(tensor.dtype), tensor.shape) == (str(like.dtype), like.shape)
        if fits:
            self.pairs.append((None, tensor))
        else:
            self.differ(path, like, stored)

    def entries(self, path: str, like: dict[Any, Any], stored: dict[Any, Any]) -> None:
        for key in [*like, *(key for key in stored if key not in like)]:
            entry_path = walk.child(path, key)
            if key not in stored:
                self.only(entry_path, like[key], "like")
            elif key not in like and self.own:
                self.collect(stored[key])
            elif key not in like:
                self.only(entry_path, stored[key], "the checkpoint")
            else:
                self.node(entry_path, like[key], stored[key])

    def state(self, path: str, like: TrainState, stored: TrainState) -> None:
        ours, saved = walk.entries_of(like) or {}, walk.entries_of(stored) or {}
        if ours["extras"] is None:  # the user's own come back whatever they are
            del ours["extras"]
            self.collect(saved.pop("extras"))
        else:
            was_own, self.own = self.own, True
            self.node(walk.child(path, "extras"), ours.pop("extras"), saved.pop("extras"))
            self.own = was_own
        averages = ours.pop("ema"), saved.pop("ema")
        if _counts(ours["updates"]) and _counts(saved["updates"]):
            self.updates(walk.child(path, "updates"), ours.pop("updates"), saved.pop("updates"))
        self.entries(path, ours, saved)
        self.averages = True
        self.node(walk.child(path, "ema"), *averages)
        self.averages = False

    def updates(self, path: str, like: Tree, stored: Tree) -> None:
        """An int in one tree may be a tensor in the other, if a transform skips updates."""
        if isinstance(stored, Stored):
            self.pairs.append((like if isinstance(like, torch.Tensor) else None, stored))
        elif isinstance(like, torch.Tensor) and stored > _EXACT:
            self.problems.append(f"{path}: {stored} in the checkpoint is too large for the float32 in like")

    def collect(self, stored: Tree) -> None:
        """Take a stored tree by itself."""
        if isinstance(stored, Stored):
            self.pairs.append((None, stored))
        elif isinstance(stored, Array):
            self.pairs.append((None, stored.tensor))
        elif isinstance(stored, Object):
            self.collect(stored.state)
        else:
            for entry in (walk.entries_of(stored) or {}).values():
                self.collect(entry)

    def tensor(self, path: str, like: Tree, stored: Stored) -> None:
        fits = isinstance(like, torch.Tensor) and tuple(like.shape) == stored.shape
        if stored.others and stored.dtype is torch.uint8:  # such as slots in 8 bits
            count = len(stored.others) + 1
            self.problems.append(f"{path}: codes of {count} replicas, which have no mean: go on with {count}")
        if fits and (like.dtype == stored.dtype or (self.averages and widens(stored.dtype, like.dtype))):
            self.pairs.append((like, stored))
        else:
            self.differ(path, like, stored)

    def differ(self, path: str, like: Tree, stored: Tree) -> None:
        self.problems.append(
            f"{walk.shown(path)}: {_described(stored)} in the checkpoint, {_described(like)} in like"
        )

    def only(self, path: str, value: Tree, side: str) -> None:
        """One line for each leaf below a path that one side lacks."""
        if value is KEEP:
            return
        inner = walk.entries_of(value) or {}
        for key, entry in inner.items():
            self.only(walk.child(path, key), entry, side)
        if not inner:
            self.problems.append(f"{path}: only in {side} ({_described(value)})")


def widens(stored: torch.dtype, like: torch.dtype) -> bool:
    """Whether averages were saved in 16 bits, as they once were, and are kept in 32."""
    return like is torch.float32 and stored in (torch.bfloat16, torch.float16)


def comes_back(like: Tree, stored: Tree) -> bool:
    """Whether a value of the user's extras is restored without `like`.

    `like` provides objects that load their state, classes of nodes and dicts, devices of tensors.
    """
    if isinstance(stored, Stored):
        return not (
            isinstance(like, torch.Tensor) and (like.dtype, tuple(like.shape)) == (stored.dtype, stored.shape)
        )
    if isinstance(stored, Object):
        return not walk.is_object(like)
    if isinstance(stored, Node):
        opened = None if walk.is_object(like) else walk.opened(like)
        return opened is None or opened[0].keys() != stored.entries.keys()
    if isinstance(stored, dict):
        return not isinstance(like, dict)
    if isinstance(stored, list | tuple):
        return type(like) is not type(stored) or len(like) != len(stored)
    return type(stored) not in NODES.values() or type(like) is not type(stored)


def _counts(value: Tree) -> bool:
    """Whether a value can be a number of updates."""
    if isinstance(value, torch.Tensor | Stored):
        return value.dtype == torch.float32 and tuple(value.shape) == ()
    return type(value) is int


def _described(value: Tree) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name_of(value.dtype)} {list(value.shape)}"
    if isinstance(value, Stored):
        return str(value)
    if isinstance(value, Array) or walk.is_array(value):
        leaf = value.tensor if isinstance(value, Array) else value
        return f"an array {name_of(leaf.dtype)} {list(leaf.shape)}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"a {type(value).__name__}"
