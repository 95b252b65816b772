"""Does a checkpoint fit what it is to be restored into? Every path that does not, with both sides.

Nothing is read and nothing changed here; see `load` for what follows.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fnaccel.checkpoint.dtypes import name_of
from fnaccel.checkpoint.grammar import NODES, child, fields_of, shown
from fnaccel.checkpoint.manifest import Stored
from fnaccel.errors import TreeMismatchError
from fnaccel.state import TrainState, check_live

_EXACT = 1 << 24  # float32 holds every whole number up to here


@attrs.frozen
class Match:
    """What fits: each stored tensor with the tensor it goes to, None where `like` has none for it."""

    pairs: list[tuple[torch.Tensor | None, Stored]]


def match(like: Any, stored: Any) -> Match:
    """Compare a tree with a stored one (`Stored` where tensors are).

    Raises:
        TreeMismatchError: lists each path that is missing, unexpected, or of another kind, shape or dtype.
        StaleStateError: a state in `like` was donated.
    """
    found = _Matcher()
    found.node("", like, stored)
    if found.problems:
        count = len(found.problems)
        raise TreeMismatchError(
            f"{count} {'path differs' if count == 1 else 'paths differ'} between the checkpoint and like=: "
            + "; ".join(found.problems),
            where="fa.restore",
            fix="give a like= with the models, optimizer and transforms that were saved; nothing was changed",
        )
    return Match(found.pairs)


class _Matcher:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.pairs: list[tuple[torch.Tensor | None, Stored]] = []

    def node(self, path: str, like: Any, stored: Any) -> None:
        if isinstance(stored, Stored):
            self.tensor(path, like, stored)
        elif isinstance(like, dict) and isinstance(stored, dict):
            self.entries(path, like, stored)
        elif isinstance(like, TrainState) and isinstance(stored, TrainState):
            check_live(like)
            self.state(path, like, stored)
        elif type(like) is not type(stored):
            self.differ(path, like, stored)
        elif isinstance(like, list | tuple):
            self.entries(path, dict(enumerate(like)), dict(enumerate(stored)))
        elif type(like) in NODES.values():
            self.entries(path, _fields(like), _fields(stored))

    def entries(self, path: str, like: dict[Any, Any], stored: dict[Any, Any]) -> None:
        for key in [*like, *(key for key in stored if key not in like)]:
            where = child(path, key)
            if key not in stored:
                self.only(where, like[key], "like")
            elif key not in like:
                self.only(where, stored[key], "the checkpoint")
            else:
                self.node(where, like[key], stored[key])

    def state(self, path: str, like: TrainState, stored: TrainState) -> None:
        mine, theirs = _fields(like), _fields(stored)
        if mine["extras"] is None:  # the user's own come back whatever they are
            del mine["extras"]
            self.collect(theirs.pop("extras"))
        if _counts(mine["updates"]) and _counts(theirs["updates"]):
            self.updates(child(path, "updates"), mine.pop("updates"), theirs.pop("updates"))
        self.entries(path, mine, theirs)

    def updates(self, path: str, like: Any, stored: Any) -> None:
        """An int here may be a tensor there, where a transform skips updates: the number is the same."""
        if isinstance(stored, Stored):
            self.pairs.append((like if isinstance(like, torch.Tensor) else None, stored))
        elif isinstance(like, torch.Tensor) and stored > _EXACT:
            self.problems.append(f"{path}: {stored} in the checkpoint is too large for the float32 in like")

    def collect(self, stored: Any) -> None:
        if isinstance(stored, Stored):
            self.pairs.append((None, stored))
        elif isinstance(stored, dict):
            for entry in stored.values():
                self.collect(entry)
        elif isinstance(stored, list | tuple):
            for entry in stored:
                self.collect(entry)
        elif type(stored) in NODES.values():
            self.collect(_fields(stored))

    def tensor(self, path: str, like: Any, stored: Stored) -> None:
        if not isinstance(like, torch.Tensor) or (like.dtype, tuple(like.shape)) != (
            stored.dtype,
            stored.shape,
        ):
            self.differ(path, like, stored)
        else:
            self.pairs.append((like, stored))

    def differ(self, path: str, like: Any, stored: Any) -> None:
        self.problems.append(
            f"{shown(path)}: {_described(stored)} in the checkpoint, {_described(like)} in like"
        )

    def only(self, path: str, value: Any, side: str) -> None:
        """One line for each leaf below a path that one side lacks."""
        inner: dict[Any, Any] = {}
        if isinstance(value, dict):
            inner = value
        elif isinstance(value, list | tuple):
            inner = dict(enumerate(value))
        elif type(value) in NODES.values():
            inner = _fields(value)
        for key, entry in inner.items():
            self.only(child(path, key), entry, side)
        if not inner:
            self.problems.append(f"{path}: only in {side} ({_described(value)})")


def _fields(node: Any) -> dict[str, Any]:
    return {name: getattr(node, name) for name in fields_of(node)}


def _counts(value: Any) -> bool:
    """Whether a value can be a number of updates."""
    if isinstance(value, torch.Tensor | Stored):
        return value.dtype == torch.float32 and tuple(value.shape) == ()
    return type(value) is int


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name_of(value.dtype)} {list(value.shape)}"
    if isinstance(value, Stored):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"a {type(value).__name__}"
