"""`restore`: a checkpoint into a tree like the one saved, whatever its layout; all checks come first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs

from fnaccel.checkpoint import commit, manifest, reading
from fnaccel.checkpoint.filling import Filling
from fnaccel.checkpoint.grammar import decode
from fnaccel.checkpoint.manifest import Manifest, Stored
from fnaccel.checkpoint.match import match
from fnaccel.checkpoint.meeting import together
from fnaccel.checkpoint.pieces import part_of, whole
from fnaccel.errors import ArgumentError, CheckpointError, UnleasedStateError
from fnaccel.state import TrainState, lease_of
from fnaccel.world import World, current

_WHERE = "fa.restore"


def restore(
    directory: str | os.PathLike[str],
    *,
    like: Any,
    step: int | None = None,
    verify: bool = False,
    world: World | None = None,
) -> Any:
    """Read a checkpoint into a tree like the one saved: any strategy, any number of ranks.

    Every rank must call it, and reads only the parts of tensors that it holds. Everything is checked
    before anything is changed: after an error `like` is as it was, and live (should a device fail in
    the middle of reading, a leased `like` is donated: its tensors are part old, part new).

    Args:
        directory: a root that `fa.save` wrote to, or one checkpoint in it.
        like: what to restore into. The live state of a train step is refilled in place and donated.
            Of any other tree (a snapshot, a dict of tensors) the structure, the shapes, dtypes,
            devices and placements are taken, and it stays as it is. `extras=None` in a state takes
            what the checkpoint has.
        step: which step; the newest by default.
        verify: also read every file and compare its checksum (their sizes always are).
        world: the world, where none was started in this context.

    Returns:
        A tree like `like`: host values (step, seed, data position, extras) and tensors as saved.

    Raises:
        TreeMismatchError: paths, shapes or dtypes differ; lists every one, with both sides.
        CheckpointError: there is no such checkpoint, or it is damaged, or a rank can't read it.
        StaleStateError: `like` was donated.
        ArgumentError: `directory` is one checkpoint, and of another step than `step`.

    Example: `state = fa.restore("runs/gpt", like=train_step.init(seed=0))`.
    """
    found = current(world)
    path = together(found, _WHERE, lambda: _find(Path(directory), step) if found.is_main else Path())[0]
    trees: list[Any] = []  # stays here: what ranks tell each other is pickled
    together(found, _WHERE, lambda: trees.append(_check(path, like, step, found, verify=verify)))
    return _Restorer(path, found).tree(like, trees[0])


def _find(directory: Path, step: int | None) -> Path:
    if (directory / manifest.FILE).is_file():
        return directory
    there = commit.checkpoints(directory)
    chosen = [one.path for one in there if step is None or one.step == step]
    if not chosen:
        steps = ", ".join(str(one.step) for one in there)
        raise CheckpointError(
            f"{directory} holds no checkpoint" + ("" if step is None else f" of step {step}"),
            where=_WHERE,
            fix=f"choose one of the steps {steps}" if steps else "save one first: fa.save(directory, state)",
        )
    return chosen[-1]


def _check(path: Path, like: Any, step: int | None, world: World, *, verify: bool) -> Any:
    """The stored tree, once all that can be known before reading is as it must be."""
    found = reading.open_manifest(path)
    if step is not None and found.step != step:
        raise ArgumentError(
            f"{path} is the checkpoint of step {found.step}, and step={step} was asked for",
            where=_WHERE,
            fix="give the root above it, or leave step= out",
        )
    if verify:
        reading.verify(path, found, sorted(found.files)[world.rank :: world.size])
    tree = decode(found.tree, lambda name: _stored(found, name, path))
    pairs = match(like, tree).pairs
    reading.check(
        path,
        [
            (one, whole(one.shape) if target is None else part_of(target, world.rank).box)
            for target, one in pairs
        ],
    )
    return tree


def _stored(found: Manifest, name: str, path: Path) -> Stored:
    if name not in found.tensors:
        raise CheckpointError(
            f"the tree in the manifest holds the tensor {name}, which is stored nowhere",
            where=f"{_WHERE} of {path}",
            fix="the checkpoint is damaged: restore another of fa.checkpoints(directory)",
        )
    return found.tensors[name]


@attrs.frozen
class _Restorer:
    """Builds the tree that `restore` returns; by now `like` and the stored tree are known to match."""

    path: Path
    world: World

    def tree(self, like: Any, stored: Any) -> Any:
        filling = Filling(self.path, self.world, self.state)
        made = filling.value(like, stored)
        together(self.world, _WHERE, filling.read)
        return made

    def state(self, like: TrainState, stored: TrainState) -> TrainState:
        """A state: in place where it is the live one of a train step."""
        try:
            owner = lease_of(like, _WHERE).owner
        except UnleasedStateError:
            return self.fill(like, stored, in_place=False)
        return owner.refill(like, lambda target: self.fill(target, stored, in_place=True))

    def fill(self, like: TrainState, stored: TrainState, *, in_place: bool) -> TrainState:
        filling = Filling(self.path, self.world, self.state)
        made: list[TrainState] = []

        def read() -> None:
            made.append(filling.state(like, stored, in_place=in_place))
            filling.read()

        # inside of refill: where one rank fails, no rank goes on with these tensors
        together(self.world, _WHERE, read)
        return made[0]
