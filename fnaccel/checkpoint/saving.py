"""`save`: each rank writes its own part, rank 0 commits. The order of events is in `writing`."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fnaccel import tree
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.background import Background, Saving
from fnaccel.checkpoint.disk.garbage import no_collection
from fnaccel.checkpoint.disk.retention import Metrics, Mode, Retention, given_metrics
from fnaccel.checkpoint.format.values import encode
from fnaccel.checkpoint.stored_states import ALL, Replica
from fnaccel.checkpoint.writing import Hold, Writing
from fnaccel.collectives.objects import gather_objects
from fnaccel.collectives.signature import is_dtensor
from fnaccel.data.shard import HandReads
from fnaccel.engine.engine import Layout
from fnaccel.engine.same_rows import checksum
from fnaccel.errors import CheckpointError, UnleasedStateError
from fnaccel.state import Position, TrainState, lease_of
from fnaccel.strategies.strategy import MAKERS
from fnaccel.texts import first_of, ranks_of
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank
from fnaccel.world.paths import local_path
from fnaccel.world.progress_marks import within
from fnaccel.world.world import World, current

_SAMPLED = 64 << 20  # of a larger tensor some elements are compared
_TREES = ("params", "buffers", "opt", "scale", "ema", "transforms")


@every_rank
@within("save")
def save(
    directory: str | os.PathLike[str],
    state: Tree,
    *,
    step: int | None = None,
    metadata: Tree = None,
    keep: int | None = None,
    keep_every: int | None = None,
    metrics: Mapping[str, Any] | Metrics | None = None,
    best: str | None = None,
    mode: Mode = "min",
    keep_best: int = 1,
    each_machine: bool = False,
    between: bool = False,
    world: World | None = None,
) -> Path:
    """Write a checkpoint that any strategy on any number of ranks can restore.

    Every rank must call it, with a directory that all of them see. Ranks write only their own parts.
    Of a tensor that all hold (buffers, everything under ddp), rank 0's is written. Nothing is visible
    to readers before all of it is on the device. A failure or a crash leaves the earlier checkpoints.
    Saving a step that exists replaces it, as safely. The state stays live.

    Args:
        directory: the root under which each step has its directory. Made if it is missing.
        state: a TrainState, or any pytree of tensors (any layout), NumPy arrays, None, bool, int, float,
            str, bytes and states. An object with `state_dict()` and `load_state_dict()` is a leaf, too.
        step: the number in its name. By default the state's own, or else one after the newest.
        metadata: a pytree like `state`, without tensors, to read without restoring (`fnaccel inspect`).
        keep: how many of the newest checkpoints stay. Older ones are removed once this one is committed,
            but for those that someone is reading. None: all.
        keep_every: checkpoints whose step is a multiple of this stay besides.
        metrics: numbers by name that this state was found to have. Rank 0's are written.
        best: one of them. The `keep_best` checkpoints with its best values stay besides, also in later saves
            without it. `fa.checkpoint.best` finds the best one.
        mode: whether the best value of that metric is the smallest, `"min"`, or the largest, `"max"`.
        keep_best: how many of the best stay.
        each_machine: the machines do not share `directory`. Each writes what its own ranks need into its own,
            and `fa.restore(each_machine=True)` reads it there.
        between: also between two averages of replicas that train apart (`fa.local_sgd`). As many replicas go
            on with their own values, other layouts with the mean. By default that raises.
        world: the world, if none was started in this context.

    Returns:
        The directory of this checkpoint, `directory/step-0000000010`, as an absolute path.

    Raises:
        NotSerializableError: the tree has another leaf, such as a function. Nothing was written.
        CheckpointError: a rank could not write. It raises on every rank, and nothing is visible. Also:
            another job saves into `directory`, a save in the background has failed, or the name of this
            checkpoint belongs to a file or a directory that no save wrote, or a transform's state or extras
            differ between ranks.
        StaleStateError: the state was donated.
        ArgumentError: a step that is no number from 0 on, a `keep` below 1, or a metric that is no number.

    Example:
        >>> fa.save("runs/gpt", state, keep=3).name
        'step-0000000000'
        >>> state = fa.restore("runs/gpt", like=state)
    """
    where, active = "fa.save", current(world)
    given = None if metrics is None and best is None else given_metrics(metrics, best, mode, keep_best, where)
    plan = Retention(keep, keep_every), given
    return _begun(
        where, directory, state, step, metadata, plan, active, each_machine=each_machine, between=between
    ).run()


@every_rank
@within("save")
def save_async(
    directory: str | os.PathLike[str],
    state: Tree,
    *,
    step: int | None = None,
    metadata: Tree = None,
    keep: int | None = None,
    keep_every: int | None = None,
    metrics: Mapping[str, Any] | Metrics | None = None,
    best: str | None = None,
    mode: Mode = "min",
    keep_best: int = 1,
    each_machine: bool = False,
    world: World | None = None,
) -> Saving:
    """Like `save`, while training goes on: the call copies the state to the host, a thread does the rest.

    One save is under way at a time: the next one waits for it. Each rank holds a second copy of its part
    of the state in host memory (pinned for an accelerator), which is kept for the next save.

    A write that fails raises at the next `save`, `save_async` or `restore`, at `wait()`, or when the
    world is left, whichever comes first. A script without `with fa.start()` prints it as it ends.

    The arguments and errors are those of `save`. `state` may be donated as soon as this returns.

    Returns:
        The save under way: `.wait()` returns the path of the checkpoint, `.done` is true once it ended.

    Example:
        >>> saving = fa.save_async("runs/gpt", state, keep=3)
        >>> state, metrics = train_step(state, batch)
        >>> saving.wait().name
        'step-0000000000'
    """
    where, active = "fa.save_async", current(world)
    given = None if metrics is None and best is None else given_metrics(metrics, best, mode, keep_best, where)
    plan = Retention(keep, keep_every), given
    background = active.resource(Background)
    hold = background.copies.of
    return background.go(
        _begun(where, directory, state, step, metadata, plan, active, hold=hold, each_machine=each_machine)
    )


def check_same_on_ranks(
    states: Sequence[TrainState], where: str, *, between: bool = False, anchor: bool = False
) -> Replica | None:
    """See that ranks hold the same values, where they might not. All ranks call it.

    A checkpoint and an export take values that all ranks hold from one of them. The states of transforms are
    compared always, all values if an axis of a user lets ranks train apart.

    Args:
        states: the states.
        where: the public function, for messages.
        between: whether it keeps the values of each replica, also between two averages.
        anchor: whether it takes the anchor in the place of parameters there.

    Returns:
        The replica of this rank, if replicas train apart and their own values can be kept.

    Raises:
        CheckpointError: they don't at this step; or not even at a step at which `Layout.next_whole` says so.
    """
    replica: Replica | None = None
    for state in states:
        try:
            instance = lease_of(state, where).owner.instance
        except UnleasedStateError:  # a snapshot
            _refuse_axis_state(state, where)
            continue
        layout = instance.engine.layout
        apart, own = layout.next_whole is not None, layout.of_replicas
        same_at = layout.whole_from(state.step) if apart else state.step
        fix = f"train on to step {same_at}, after which all ranks hold the same"
        if same_at != state.step and anchor and layout.read_between is not None:
            _compare(state, ["buffers"], layout, where, instance.transient(), fix)
            continue
        if same_at != state.step and (own is None or not between):
            raise CheckpointError(
                f"after step {state.step} each rank holds values of its own, and one rank's would be kept",
                where=where,
                fix=fix if own is None else f"{fix}; or fa.save(between=True), which keeps all of them",
            )
        whole = apart and same_at == state.step
        if own is not None:
            replica = replica or Replica(layout.mesh)
            replica.add([getattr(state, name) for name in (own if whole else ALL)])
        if whole or state.transforms:
            names = [name for name in _TREES if name not in (own or ())] if whole else ["transforms"]
            _compare(state, names, layout, where, instance.transient() if whole else ())
    return replica


def _refuse_axis_state(state: TrainState, where: str) -> None:
    """Raise CheckpointError for a snapshot of replicas that train apart: it holds the values of one."""
    axes = [name for name in state.transforms if name in MAKERS]
    if axes and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError(
            f"a snapshot under {axes[0]} holds the values of this rank's replica, and others have their own",
            where=where,
            fix="save the live state, or adopt the snapshot first: state = train_step.adopt(snapshot)",
        )


def _compare(
    state: TrainState,
    names: Sequence[str],
    layout: Layout,
    where: str,
    made_anew: Collection[str],
    fix: str = "",
) -> None:
    """Compare the trees of these names between ranks by their checksums, but for buffers made anew.

    `fix` is the way out, if there is a better one than to mend what makes them.
    """
    trees = {name: getattr(state, name) for name in names}
    if made_anew and "buffers" in trees:
        trees["buffers"] = [x for path, x in tree.items(state.buffers) if path not in made_anew]
    found = gather_objects({name: _checksum(x) for name, x in trees.items()}, over=layout.mesh["loss"])
    mend = (
        "compute it from values that all ranks hold, such as parameters, averaged gradients and metrics, and "
        "not from a rank's own loss, clock or random numbers"
    )
    mend_apart = (
        "compute it from what all ranks hold: let Hooks.after_update make state.{} equal in the steps that "
        "are whole, or mend next_whole"
    )
    for name in names:
        other = [rank for rank, sums in enumerate(found) if sums[name] != found[0][name]]
        if other:
            raise CheckpointError(
                f"state.{name} differs between ranks (on {ranks_of(other)} of the mesh axis 'loss' from "
                "rank 0), and one rank's would be kept",
                where=where,
                fix=fix or (mend if layout.next_whole is None else mend_apart.format(name)),
            )


def _checksum(values: Tree) -> str:
    """Of all leaves but shards, which differ between ranks."""
    return checksum([leaf for leaf in tree.leaves(values) if not is_dtensor(leaf)])


class _ComparedExtras:
    """The entries of extras, with their shapes, whose tensors were found equal on all ranks."""

    __slots__ = ("entries",)

    def __init__(self, world: World) -> None:  # noqa: ARG002
        self.entries: set[str] = set()

    def close(self, *, clean: bool) -> None:
        """Nothing is left open."""


def _compare_extras(states: Sequence[TrainState], world: World, where: str) -> None:
    """Compare extras between ranks: numbers and shapes at each save, tensors at the first with their shapes.

    Raises:
        CheckpointError: they differ, and rank 0's would be kept.
    """
    compared = world.resource(_ComparedExtras).entries
    for extras in [trained.extras for trained in states] if world.size > 1 else ():
        entries: dict[Any, Any] = extras if isinstance(extras, dict) else {"": extras}

        def digests(entries: dict[Any, Any] = entries) -> dict[str, tuple[str, str]]:
            return {str(name): _digest(str(name), value, where, compared) for name, value in entries.items()}

        found = together(world, where, digests)
        names = dict.fromkeys(name for each in found for name in each)
        for name in names:
            other = [rank for rank, each in enumerate(found) if each.get(name) != found[0].get(name)]
            if other:
                raise CheckpointError(
                    f"extras/{name} differs between ranks (on {ranks_of(other)} from rank 0), and rank 0's "
                    "would be kept",
                    where=where,
                    fix="keep what all ranks hold, or all of them: fa.collectives.gather_objects(value) "
                    "before a save, and its entry world.rank after a restore on as many ranks",
                )
        compared.update(kinds for kinds, _ in found[0].values())


def _digest(name: str, value: Tree, where: str, compared: Collection[str]) -> tuple[str, str]:
    """A checksum of the shapes in an entry, and one of its numbers and of tensors not compared before."""
    encoded = encode({"extras": {name: value} if name else value}, where)
    shapes = {path: f"{x.dtype} {[*x.shape]}" for path, x in encoded.tensors.items()}
    kinds = checksum([name, json.dumps(shapes)])
    plain = checksum([json.dumps(encoded.structure)])
    if kinds in compared:
        return kinds, plain
    tensors = [x.detach() for x in encoded.tensors.values() if not is_dtensor(x)]
    return kinds, plain + checksum([x.reshape(-1)[:: 1 + x.nbytes // _SAMPLED] for x in tensors])


def states_in(saved: Tree) -> list[TrainState]:
    """All states in a tree."""
    if isinstance(saved, TrainState):
        return [saved]
    try:
        leaves = tree.leaves(saved, is_leaf=lambda node: isinstance(node, TrainState))
    except RecursionError:  # a tree that contains itself: the save says where
        return []
    return [leaf for leaf in leaves if isinstance(leaf, TrainState)]


def _warn_of_no_position(states: Sequence[TrainState], world: World, where: str) -> None:
    """Warn once if a state was trained on batches of `fa.shard`, and its position is still the beginning.

    So it is if a loop by hand feeds the data of each batch without the batch, such as a dict made from it.
    """
    reads = world.resource(HandReads)
    if not reads.any:
        return
    for trained in states:
        if trained.step and trained.data == Position():
            reads.any = False
            if world.is_main:
                warnings.warn(
                    f"{where}: after {trained.step} steps the position in the data is still the beginning, "
                    "because no step was given a batch of fa.shard itself. A resumed run begins the data "
                    "again. Give the batch with your data in it: "
                    "train_step(state, batch.replace(data))",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return


def _warn_of_grown_buffers(states: Sequence[TrainState], world: World, where: str) -> None:
    """Warn of buffers that a new process can't restore, since its model makes them in another shape."""
    for trained in states:
        with contextlib.suppress(UnleasedStateError):
            grown = lease_of(trained, where).owner.instance.grown_buffers()
            if grown and world.is_main:
                warnings.warn(
                    f"{where}: the buffer {first_of(grown)}. No run can be resumed from this checkpoint. "
                    "Make the buffer in its last shape, or with persistent=False if forward makes it again",
                    RuntimeWarning,
                    stacklevel=5,
                )


def check_extras(extras: Tree, where: str, world: World) -> None:
    """See on all ranks that a state with these extras can be saved, before a run that saves at its end.

    Raises:
        NotSerializableError: it can't. Names the paths of all values without a place in a checkpoint.
    """
    together(world, where, lambda: bool(encode({"extras": extras}, where)))


def _begun(
    where: str,
    directory: str | os.PathLike[str],
    state: Tree,
    step: int | None,
    metadata: Tree,
    plan: tuple[Retention, Metrics | None],
    world: World,
    *,
    each_machine: bool,
    between: bool = False,
    hold: Hold | None = None,
) -> Writing:
    """A save that is ready to run, once the one before it has ended."""
    states = states_in(state)
    replica = check_same_on_ranks(states, where, between=between)
    root = local_path(directory, where)
    retention, metrics = plan
    retention.check(where)
    world.resource(Background).settle()
    _compare_extras(states, world, where)
    _warn_of_no_position(states, world, where)
    _warn_of_grown_buffers(states, world, where)
    # absolute: a thread may write after the script has changed its directory
    writing = Writing(root.absolute(), retention, world, where, metrics=metrics, each_machine=each_machine)
    with no_collection():
        writing.begin(state, step, metadata, replica=replica, hold=hold)
    return writing
