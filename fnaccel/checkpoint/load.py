"""`restore`: a checkpoint into a tree like the one saved, whatever its layout; all checks come first."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.checkpoint import commit, reading, streams
from fnaccel.checkpoint.background import Background
from fnaccel.checkpoint.choosing import Patterns, Rename
from fnaccel.checkpoint.filling import Filling
from fnaccel.checkpoint.finding import find
from fnaccel.checkpoint.grammar import decode
from fnaccel.checkpoint.manifest import Manifest, Stored
from fnaccel.checkpoint.match import match
from fnaccel.checkpoint.meeting import together
from fnaccel.checkpoint.pieces import part_of, whole
from fnaccel.checkpoint.reading import Files
from fnaccel.checkpoint.selecting import is_complete, select
from fnaccel.errors import CheckpointError, UnleasedStateError
from fnaccel.every_rank import every_rank
from fnaccel.state import TrainState, fold, lease_of
from fnaccel.world import World, current

_WHERE = "fa.restore"


@every_rank
def restore(
    directory: str | os.PathLike[str],
    *,
    like: Any,
    step: int | None = None,
    only: Patterns = None,
    skip: Patterns = None,
    rename: Rename = None,
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
        only: restore these paths and leave the rest of `like` as it is: shell patterns, one or several,
            such as `"params"` (all below it) or `"params/encoder.*"`.
        skip: leave these paths as they are.
        rename: what stored paths are called in `like`: regular expressions and what to put in their
            place, in order, or a function of the path.
        verify: also read every file and compare its checksum (their sizes always are).
        world: the world, where none was started in this context.

    Returns:
        A tree like `like`: host values (step, seed, data position, extras) and tensors as saved. In
        `extras`, what was saved comes back: an object of `like` is given its state by `load_state_dict`
        (before anything else is changed), dicts and nodes keep the classes of `like`, and tensors of the
        same shape its devices. Only what `like` has and the checkpoint lacks is an error.

        The live state of a train step, restored wholly, also puts this rank's global random streams
        (Python, NumPy, PyTorch, the device) back to where they were; on another number of ranks they
        begin anew from (seed, step, rank).

    Raises:
        TreeMismatchError: paths, shapes or dtypes differ; lists every one, with both sides.
        CheckpointError: there is no such checkpoint, or it is damaged, or a rank can't read it.
        StaleStateError: `like` was donated.
        ArgumentError: `directory` is one checkpoint, and of another step than `step`; a pattern of
            `only` that matches nothing.

    Example: `state = fa.restore("runs/gpt", like=train_step.init(seed=0))`; to begin from the
    parameters of another run, `fa.restore("runs/base", like=state, only="params", skip="*head*")`.
    """
    found = current(world)
    found.resource(Background).settle()
    root = Path(directory)
    path = together(found, _WHERE, lambda: find(root, step, _WHERE) if found.is_main else root)[0]
    trees: list[Any] = []  # stays here: what ranks tell each other is pickled

    def check() -> None:
        stack.enter_context(commit.held(path))  # no retention removes it meanwhile
        described = reading.open_manifest(path)
        if verify:
            reading.verify(path, described, sorted(described.files)[found.rank :: found.size])
        tree = decode(described.tree, lambda name: _stored(described, name, path))
        if isinstance(tree, TrainState) and "ranks" in described.written_by:
            position = tree.data.epoch, tree.data.samples
            found.saved_by[position] = described.written_by["ranks"]
        problems: list[str] = []
        if partly:
            tree, problems = select(like, tree, only, skip, rename)
        pairs = match(like, tree, problems).pairs
        wanted = [
            (one, whole(one.shape) if target is None else part_of(target, found.rank).box)
            for target, one in pairs
        ]
        files.check(wanted)
        trees.extend((tree, {} if partly else _streams(described, files, found)))

    partly = not (only is None and skip is None and rename is None)
    with contextlib.ExitStack() as stack, Files(path) as files:
        together(found, _WHERE, check)
        restorer = _Restorer(files, found)
        made = restorer.tree(like, trees[0])
        if restorer.refilled and not partly:
            together(found, _WHERE, lambda: _put_back(trees[1], made, found))
    return made


def _streams(found: Manifest, files: Files, world: World) -> dict[str, torch.Tensor]:
    """This rank's random streams by kind; none where they were saved on another number of ranks."""
    if found.written_by.get("ranks") != world.size:
        return {}
    prefix = f"{streams.ROOT}/{world.rank}/"
    stored = {
        path.removeprefix(prefix): one for path, one in found.tensors.items() if path.startswith(prefix)
    }
    try:
        streams.check_sizes({kind: (one.dtype, one.shape) for kind, one in stored.items()}, world.device)
        mine = {kind: files.read_whole(one) for kind, one in stored.items()}
        streams.check(mine)
    except ValueError as error:
        warnings.warn(
            f"the random streams in {files.path} can't be put back, and begin anew: {error}", stacklevel=2
        )
        return {}
    return mine


def _put_back(mine: dict[str, torch.Tensor], made: Any, world: World) -> None:
    if mine:
        streams.put_back(mine, world.device)
    elif isinstance(made, TrainState):
        streams.begin_anew(fold(made.rng.root, made.step, world.rank), world.device)


def _stored(found: Manifest, name: str, path: Path) -> Stored:
    if name not in found.tensors:
        raise CheckpointError(
            f"the tree in the manifest holds the tensor {name}, which is stored nowhere",
            where=f"{_WHERE} of {path}",
            fix="the checkpoint is damaged: restore another of fa.checkpoints(directory)",
        )
    return found.tensors[name]


@attrs.define
class _Restorer:
    """Builds the tree that `restore` returns; by now `like` and the stored tree are known to match."""

    files: Files
    world: World
    refilled: bool = False

    def tree(self, like: Any, stored: Any) -> Any:
        filling = Filling(self.files, self.world, self.state)
        made = filling.value(like, stored)
        together(self.world, _WHERE, filling.read)
        return made

    def state(self, like: TrainState, stored: TrainState) -> TrainState:
        """A state: in place where it is the live one of a train step."""
        filling = Filling(self.files, self.world, self.state)
        extras: list[Any] = []

        def own() -> None:
            extras.append(filling.extras(like.extras, stored.extras))
            filling.read()

        # the user's objects first: where one of them refuses its state, `like` is as it was
        together(self.world, _WHERE, own)
        try:
            owner = lease_of(like, _WHERE).owner
        except UnleasedStateError:
            return self.fill(like, stored, extras[0], in_place=False)
        self.refilled = True
        complete = all(is_complete(one) for one in (stored.params, stored.buffers))
        return owner.refill(
            like, lambda target: self.fill(target, stored, extras[0], in_place=True), complete=complete
        )

    def fill(self, like: TrainState, stored: TrainState, extras: Any, *, in_place: bool) -> TrainState:
        filling = Filling(self.files, self.world, self.state)
        made: list[TrainState] = []

        def read() -> None:
            made.append(filling.state(like, stored, extras, in_place=in_place))
            filling.read()

        # inside of refill: where one rank fails, no rank goes on with these tensors
        together(self.world, _WHERE, read)
        return made[0]
