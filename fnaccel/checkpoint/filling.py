"""Builds the tree that `restore` returns. `read` then fills all its tensors at once.

The stored tree must match `like` (`match` checks it).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from fnaccel.checkpoint.choosing import KEEP
from fnaccel.checkpoint.format import walk
from fnaccel.checkpoint.format.boxes import is_sharded, parts_of, whole
from fnaccel.checkpoint.format.manifest import Stored
from fnaccel.checkpoint.format.walk import Array, Node, Object
from fnaccel.checkpoint.matching import comes_back
from fnaccel.checkpoint.reading import Files, Request
from fnaccel.errors import CheckpointError
from fnaccel.state import ReadOnlyDict, TrainState, plain
from fnaccel.tree import Tree
from fnaccel.world.world import World

States = Callable[[TrainState, TrainState], TrainState]
"""A function that restores a state inside a tree."""


class Filling:
    """One reading of a checkpoint into one tree.

    Args:
        files: of the checkpoint.
        world: the ranks. If a tensor of `like` is on the meta device, its tensor goes on the world's device.
        states: restores the states in the tree.
    """

    def __init__(self, files: Files, world: World, states: States) -> None:
        self._files = files
        self._world = world
        self._states = states
        self._requests: list[Request] = []
        self._made: dict[tuple[int, str], torch.Tensor] = {}  # tied tensors stay tied
        self._objects: list[tuple[Any, Any]] = []
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._own = False

    def read(self) -> None:
        """Fill the tensors of all trees made so far, and give objects their states."""
        self._files.read(self._requests)
        for part, value in self._casts:
            part.copy_(value)
        for target, state in self._objects:
            target.load_state_dict(state)

    def extras(self, like: Tree, stored: Tree) -> Any:
        """The `extras` of a state. Never in place, since the user may hold these tensors elsewhere."""
        self._own = True
        try:
            return self.value(like, stored)
        finally:
            self._own = False

    def state(self, like: TrainState, stored: TrainState, extras: Tree, *, in_place: bool) -> TrainState:
        """The stored state with these extras. If `in_place`, in the containers and tensors of `like`."""
        fields: dict[str, Any] = {}
        for name in walk.fields_of(stored):
            target, source = getattr(like, name), getattr(stored, name)
            if name == "updates":
                fields[name] = self._updates(target, source, in_place=in_place)
            elif name == "extras":
                fields[name] = extras
            else:
                fields[name] = self.value(target, source, in_place=in_place)
        return TrainState(**fields)

    def value(self, like: Tree, stored: Tree, *, in_place: bool = False) -> Any:
        """A tree shaped as `like`. If `in_place`, with the dicts, lists and tensors of `like`."""
        if stored is KEEP:
            return like
        if self._own and comes_back(plain(like), stored):
            return self._alone(stored)
        if isinstance(stored, Stored):
            return self._tensor(like, stored, in_place=in_place)
        if isinstance(stored, Array):
            return self._alone(stored)
        if isinstance(stored, Object):
            return self._object(like, stored)
        if isinstance(stored, TrainState):
            return self._states(like, stored)
        if isinstance(stored, Node):
            children, rebuild = walk.opened(like) or ({}, tuple)
            return rebuild([self.value(target, stored.entries[name]) for name, target in children.items()])
        if isinstance(like, ReadOnlyDict):
            return ReadOnlyDict(self.value(dict(like), stored, in_place=in_place))
        entries = walk.entries_of(stored)
        if entries is None:
            return stored
        targets = like if isinstance(like, dict) else walk.entries_of(like) or {}
        values = {  # in stored order, which is the same on every rank
            key: self.value(targets[key], entry, in_place=in_place) if key in targets else self._alone(entry)
            for key, entry in entries.items()
        }
        if not isinstance(like, dict | list):
            return walk.rebuilt(stored, values)
        container: Any = like if in_place else copy.copy(like)
        for key, value in values.items():
            container[key] = value
        return container

    def _object(self, like: Tree, stored: Object) -> Any:
        if not walk.is_object(like):
            return self.value(like, stored.state)
        self._objects.append((like, self._alone(stored.state)))
        return like

    def _tensor(self, like: torch.Tensor, stored: Stored, *, in_place: bool) -> torch.Tensor:
        key = (id(like), stored.path)
        if key not in self._made:
            device = self._world.device if like.is_meta and not is_sharded(like) else like.device
            tensor = like if in_place else torch.empty_like(like.detach(), device=device)
            for part in parts_of(tensor, self._world.rank):
                local = part.local
                if local.dtype != stored.dtype:  # averages of before: see `matching.widens`
                    local = torch.empty_like(local, dtype=stored.dtype)
                    self._casts.append((part.local, local))
                self._requests.append(Request(stored, part.box, local))
            self._made[key] = tensor
        return self._made[key]

    def _updates(self, like: Tree, stored: Tree, *, in_place: bool) -> Any:
        """The number of updates, as `like` counts them: on the host, or on the device."""
        if stored is KEEP:
            return like
        if isinstance(stored, Stored):
            if isinstance(like, torch.Tensor):
                return self._tensor(like, stored, in_place=in_place)
            return self._whole_number(stored)
        if isinstance(like, torch.Tensor):
            tensor = like if in_place else torch.empty_like(like)
            return tensor.fill_(stored)
        return stored

    def _whole_number(self, stored: Stored) -> int:
        number = float(self._files.read_whole(stored))
        if not number.is_integer():
            raise CheckpointError(
                f"{stored.path} counts updates, and is {number}",
                where=f"fa.restore of {self._files.path}",
                fix="restore another of fa.checkpoint.checkpoints(directory)",
            )
        return int(number)

    def _alone(self, stored: Tree) -> Any:
        """A stored tree by itself, with tensors on the CPU."""
        if isinstance(stored, Stored):
            if (0, stored.path) not in self._made:
                tensor = torch.empty(stored.shape, dtype=stored.dtype)
                self._requests.append(Request(stored, whole(stored.shape), tensor))
                self._made[0, stored.path] = tensor
            return self._made[0, stored.path]
        if isinstance(stored, Array):
            return self._alone(stored.tensor).numpy()
        if isinstance(stored, Object):
            return self._alone(stored.state)
        entries = walk.entries_of(stored)
        if entries is None:
            return stored
        values = {key: self._alone(entry) for key, entry in entries.items()}
        return values if isinstance(stored, Node) else walk.rebuilt(stored, values)
