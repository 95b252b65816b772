"""`restore`: reads a checkpoint of any layout into a tree like the saved tree. All checks come first."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from fnaccel.checkpoint import random_streams as streams
from fnaccel.checkpoint import reading
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.background import Background
from fnaccel.checkpoint.changed_plan import tell_changes
from fnaccel.checkpoint.choosing import KEEP, Patterns, Rename
from fnaccel.checkpoint.disk.directory import Directory, attempt, attempts
from fnaccel.checkpoint.disk.finding import check_step, find
from fnaccel.checkpoint.disk.garbage import no_collection
from fnaccel.checkpoint.disk.publish import committed
from fnaccel.checkpoint.filling import Filling
from fnaccel.checkpoint.format.boxes import blocks_of, whole
from fnaccel.checkpoint.format.manifest import Manifest, Stored
from fnaccel.checkpoint.format.values import decode
from fnaccel.checkpoint.hooks import Registered
from fnaccel.checkpoint.machines import check_present, common_steps
from fnaccel.checkpoint.matching import match
from fnaccel.checkpoint.reading import Files
from fnaccel.checkpoint.saving import states_in
from fnaccel.checkpoint.selection import is_complete, select
from fnaccel.checkpoint.stored_states import fitted, has_axis_state, reader
from fnaccel.collectives import gather_objects
from fnaccel.errors import CheckpointError, UnleasedStateError
from fnaccel.state import TrainState, lease_of
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank
from fnaccel.world.paths import local_path
from fnaccel.world.progress_marks import within
from fnaccel.world.random_streams import fold
from fnaccel.world.undo import TorchSettings
from fnaccel.world.world import World, current

T = TypeVar("T")
_WHERE = "fa.restore"


@every_rank
@within("restore")
def restore(
    directory: str | os.PathLike[str],
    *,
    like: T,
    step: int | None = None,
    only: Patterns = None,
    skip: Patterns = None,
    rename: Rename = None,
    verify: bool = False,
    each_machine: bool = False,
    world: World | None = None,
) -> T:
    """Read a checkpoint into a tree like the one saved: any strategy, any number of ranks.

    Every rank must call it, and reads only the parts of tensors that it holds. Everything is checked
    before anything is changed: after an error `like` is as it was, and live (should a device fail in
    the middle of reading, a leased `like` is donated: its tensors are part old, part new). A save that
    replaces the checkpoint meanwhile does not change the result.

    Args:
        directory: a root that `fa.save` wrote to, or one checkpoint in it.
        like: the tree to restore into. The live state of a train step is refilled in place and donated.
            Of any other tree (a snapshot, a dict of tensors) the structure, the shapes, dtypes,
            devices and placements are taken, and it stays as it is. `extras=None` in a state takes
            the saved extras.
        step: the step. By default the newest.
        only: restore these paths and leave the rest of `like` as it is: shell patterns, one or several,
            such as `"params"` (all below it) or `"params/encoder.*"`.
        skip: leave these paths as they are.
        rename: the paths in `like` of stored paths: regular expressions and the text to put in their
            place, in order, or a function of the path. An expression that matches nothing raises.
        verify: also read every file and compare its checksum (their sizes always are).
        each_machine: each machine has a directory of its own, as `fa.save(each_machine=True)` wrote it. The
            step is the newest that all machines have. Ranks need the pieces that they had.
        world: the world, if none was started in this context.

    Returns:
        A tree like `like`: host values (step, seed, data position, extras) and tensors as saved. In
        `extras`, the saved values come back: an object of `like` is given its state by `load_state_dict`
        (before anything else is changed), dicts and nodes keep the classes of `like`, and tensors of the
        same shape its devices. Only a path of `like` that the checkpoint lacks is an error.

        A complete restore of the live state of a train step also puts this rank's global random streams
        (Python, NumPy, PyTorch, the device) back to their saved states. On another number of ranks they
        start from (seed, step, rank).

    Raises:
        TreeMismatchError: paths, shapes or dtypes differ. Lists each difference, with both sides.
        CheckpointError: there is no such checkpoint, or it is damaged, or a rank can't read it.
        StaleStateError: `like` was donated.
        ArgumentError: `directory` is one checkpoint, and of another step than `step`. Or a pattern of
            `only` that matches nothing. Or slots of an optimizer that stay at their first values would count
            the restored updates.

    Example:
        >>> path = fa.save("runs/base", state)
        >>> state = fa.restore("runs/base", like=train_step.init(seed=1))
        >>> state = fa.restore("runs/base", like=state, only="params", skip="*lm_head*")  # to fine-tune
    """
    active, root = current(world), local_path(directory, _WHERE)
    active.resource(Background).settle()
    chosen = _Chosen(root, step, like, only, skip, rename, verify, each_machine)
    with TorchSettings(), contextlib.ExitStack() as stack, no_collection():
        opened = _open(chosen, active, stack)
        hooks, path = active.resource(Registered), opened.files.path
        if hooks.hooks:
            together(active, _WHERE, lambda: hooks.run("before_restore", path, like))
        restorer = _Restorer(opened.files, active)
        restored = restorer.tree(like, opened.tree)
        if restorer.refilled and not chosen.partly:
            together(active, _WHERE, lambda: _put_back(opened.streams, restored, active))
            if active.is_main:
                tell_changes(opened.written_by, restored)
        if hooks.hooks:
            together(active, _WHERE, lambda: hooks.run("after_restore", path, restored))
    return restored


@attrs.frozen(eq=False)
class _Chosen:
    """The arguments of `restore`."""

    root: Path
    step: int | None
    like: Any
    only: Patterns
    skip: Patterns
    rename: Rename
    verify: bool
    each_machine: bool

    @property
    def partly(self) -> bool:
        """Whether some paths are to be left as they are."""
        return not (self.only is None and self.skip is None and self.rename is None)


@attrs.frozen(eq=False)
class _Opened:
    """A checkpoint that matches `like`: its files, its tree, this rank's random streams, and its origin."""

    files: Files
    tree: Any
    streams: dict[str, torch.Tensor]
    written_by: Mapping[str, Any]


def _open(chosen: _Chosen, world: World, stack: contextlib.ExitStack) -> _Opened:
    """Open one checkpoint on all ranks, and check all of it. Nothing is changed.

    Raises:
        CheckpointError, TreeMismatchError, StaleStateError, ArgumentError: see `restore`.
    """
    for last in attempts():
        paths = together(world, _WHERE, functools.partial(_find, chosen, world, _step(chosen, world)))
        path = paths[world.rank if chosen.each_machine else 0]
        opened: list[_Opened] = []  # not a return value: those are pickled and sent to the other ranks
        with contextlib.ExitStack() as attempt_stack:
            read = functools.partial(_read, chosen, world, attempt_stack, opened)
            digests = together(
                world, _WHERE, functools.partial(attempt, path, attempt_stack, read, last=last)
            )
            # a rank may have opened the checkpoint from before a save, and another rank the one from after
            if None not in digests and len(set(digests)) == 1:
                stack.push(attempt_stack.pop_all())
                return opened[0]
    raise CheckpointError(
        f"{chosen.root} is replaced again and again while ranks open it",
        where=_WHERE,
        fix="restore while no job saves this step, or restore a step that is not replaced",
    )


def _step(chosen: _Chosen, world: World) -> int | None:
    """The step to read: with a directory on each machine, the newest that all have."""
    if not chosen.each_machine or chosen.step is not None:
        return chosen.step
    if any(gather_objects(committed(chosen.root) is not None, world=world)):  # the path of one checkpoint
        return None
    return next(iter(common_steps(chosen.root, world, _WHERE)), None)


def _find(chosen: _Chosen, world: World, step: int | None) -> Path:
    return find(chosen.root, step, _WHERE) if world.is_main or chosen.each_machine else chosen.root


def _read(
    chosen: _Chosen,
    world: World,
    stack: contextlib.ExitStack,
    opened: list[_Opened],
    directory: Directory,
) -> str:
    """Check a checkpoint against `like`. Returns the digest of its manifest."""
    described = reading.open_manifest(directory, partial=chosen.each_machine)
    check_step(chosen.root, directory.path, described, chosen.step, _WHERE)
    if chosen.verify and chosen.each_machine:
        there = [name for name in sorted(described.files) if directory.size_of(name) is not None]
        reading.verify(directory, described, there[world.local_rank :: world.local_size])
    elif chosen.verify:
        reading.verify(directory, described, sorted(described.files)[world.rank :: world.size])
    where = f"{_WHERE} of {directory.path}"
    if "replicas" in described.written_by:
        first = next(iter(states_in(chosen.like)), None)
        nested = not isinstance(chosen.like, TrainState)
        read = reader(described, where, first, nested=nested, partly=chosen.partly, speaks=world.is_main)
    else:
        read = described.reader(where)
    stored = decode(described.tree, read)
    if isinstance(stored, TrainState) and "ranks" in described.written_by:
        world.saved_by[stored.data.epoch, stored.data.samples] = described.written_by
    stored = fitted(chosen.like, stored, described.written_by)
    if isinstance(stored, TrainState) and isinstance(chosen.like, TrainState):
        caches = frozenset(map(str, described.written_by.get("transient_buffers", ())))
        buffers = _without_grown(chosen.like.buffers, stored.buffers, caches)
        stored = attrs.evolve(stored, buffers=buffers)
    problems: list[str] = []
    if chosen.partly:
        stored, problems = select(chosen.like, stored, chosen.only, chosen.skip, chosen.rename)
    pairs = match(chosen.like, stored, problems).pairs
    files = stack.enter_context(Files(directory))
    wanted = [
        (tensor, box)
        for target, tensor in pairs
        for box in (
            (whole(tensor.shape),)
            if target is None or type(target) is torch.Tensor
            else blocks_of(target, world.rank)
        )
    ]
    if chosen.each_machine:
        check_present(directory, wanted, world.machine, _WHERE)
    files.check(wanted)
    own_streams = {} if chosen.partly else _streams(described, files, world)
    opened.append(_Opened(files, stored, own_streams, described.written_by))
    # the manifests of machines differ: they are of one save
    return (
        str(described.written_by.get("save", described.digest)) if chosen.each_machine else described.digest
    )


def _without_grown(like: Tree, stored: Any, caches: Collection[str], prefix: str = "") -> Any:
    """Stored buffers without caches (`persistent=False`) of another shape than in `like`."""
    fitting: dict[str, Any] = {}
    for key, value in stored.items():
        name = f"{prefix}{key}"
        target: Any = like.get(key)
        if isinstance(value, Mapping) and isinstance(target, Mapping):
            fitting[key] = _without_grown(target, value, caches, f"{name}/")
        elif name not in caches or list(getattr(target, "shape", ())) == list(getattr(value, "shape", ())):
            fitting[key] = value
        elif target is not None:
            fitting[key] = KEEP
    return fitting


def _streams(manifest: Manifest, files: Files, world: World) -> dict[str, torch.Tensor]:
    """This rank's random streams by kind. Empty if they were saved on another number of ranks."""
    if manifest.written_by.get("ranks") != world.size:
        return {}
    prefix = f"{streams.ROOT}/{world.rank}/"
    stored = {
        path.removeprefix(prefix): tensor
        for path, tensor in manifest.tensors.items()
        if path.startswith(prefix)
    }
    try:
        streams.check_sizes(
            {kind: (tensor.dtype, tensor.shape) for kind, tensor in stored.items()}, world.device
        )
        rank_streams = {kind: files.read_whole(tensor) for kind, tensor in stored.items()}
        streams.check(rank_streams)
    except ValueError as error:
        warnings.warn(
            f"the random streams in {files.path} can't be put back, and begin anew: {error}", stacklevel=2
        )
        return {}
    return rank_streams


def _put_back(rank_streams: dict[str, torch.Tensor], restored: Tree, world: World) -> None:
    if rank_streams:
        streams.put_back(rank_streams, world.device)
    elif isinstance(restored, TrainState):
        streams.begin_anew(fold(restored.rng.root, restored.step, world.rank), world.device)


@attrs.define
class _Restorer:
    """Builds the tree that `restore` returns. `like` and the stored tree have been compared before."""

    files: Files
    world: World
    refilled: bool = False

    def tree(self, like: Tree, stored: Tree) -> Any:
        filling = Filling(self.files, self.world, self.state)
        restored = filling.value(like, stored)
        together(self.world, _WHERE, filling.read)
        return restored

    def state(self, like: TrainState, stored: TrainState) -> TrainState:
        """A state. In place if it is the live state of a train step."""
        filling = Filling(self.files, self.world, self.state)
        extras: list[Any] = []

        def own() -> None:
            self.refuse_late(like, stored)
            extras.append(filling.extras(like.extras, stored.extras))
            filling.read()

        # the user's objects first: if an object refuses its state, `like` is unchanged
        together(self.world, _WHERE, own)
        try:
            owner = lease_of(like, _WHERE).owner
        except UnleasedStateError:
            return self.fill(like, stored, extras[0], in_place=False)
        self.refilled = True
        complete = all(is_complete(part) for part in (stored.params, stored.buffers))
        return owner.refill(
            like,
            lambda target: self.fill(target, stored, extras[0], in_place=True),
            complete=complete,
            fresh=bool(like.transforms) and not has_axis_state(like, stored),
        )

    def refuse_late(self, like: TrainState, stored: TrainState) -> None:
        """Raise ArgumentError if slots that are skipped would count the stored updates."""
        number: Any = stored.updates
        if number is KEEP or is_complete(stored.opt):
            return
        updates = int(self.files.read_whole(number)) if isinstance(number, Stored) else int(number)

        def kept(keys: list[str]) -> bool:
            node: Any = stored.opt
            for key in keys:
                node = node if node is KEEP else node[key]
            return node is KEEP

        with contextlib.suppress(UnleasedStateError):
            lease_of(like, _WHERE).owner.refuse_late(like, kept, updates, _WHERE)

    def fill(self, like: TrainState, stored: TrainState, extras: Tree, *, in_place: bool) -> TrainState:
        filling = Filling(self.files, self.world, self.state)
        states: list[TrainState] = []

        def read() -> None:
            states.append(filling.state(like, stored, extras, in_place=in_place))
            try:
                filling.read()
            except (CheckpointError, OSError) as error:
                if not in_place:
                    raise
                what = getattr(error, "what", error)
                raise CheckpointError(
                    f"{what}; by then like= was part old, part new, so it was donated",
                    where=_WHERE,
                    fix="make a new state (train_step.init, fa.resume_or_init), and restore into that",
                ) from error

        # inside of refill: if a rank fails, no rank goes on with these tensors
        together(self.world, _WHERE, read)
        return states[0]
