"""`resume_or_init`: the same line begins a run and goes on with it."""

from __future__ import annotations

import functools
import os
import re
import warnings
from pathlib import Path

from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.background import Background
from fnaccel.checkpoint.choosing import Patterns, Rename
from fnaccel.checkpoint.disk import publish
from fnaccel.checkpoint.disk.directory import attempts
from fnaccel.checkpoint.machines import common_steps
from fnaccel.checkpoint.restoring import restore
from fnaccel.checkpoint.saving import check_extras
from fnaccel.collectives import gather_objects
from fnaccel.errors import CheckpointError, FnaccelError, TreeMismatchError, require
from fnaccel.program.train_step import TrainStep
from fnaccel.state import TrainState, is_stale
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank
from fnaccel.world.paths import optional_path
from fnaccel.world.progress_marks import within

_WHERE = "fa.resume_or_init"
_NAMED = re.compile(r"step-(\d{10,19})")


@every_rank
@within("restore")
def resume_or_init(
    directory: str | os.PathLike[str] | None,
    train_step: TrainStep,
    *,
    seed: int = 0,
    extras: Tree = None,
    skip: Patterns = None,
    rename: Rename = None,
    verify: bool = True,
    fallback: bool = False,
    each_machine: bool = False,
) -> TrainState:
    """The state of the newest checkpoint under a root, or a first state if there is none yet.

    Every rank must call it. Any number of ranks, and any strategy, can continue a checkpoint of any other.
    A damaged checkpoint never lets a run start from the beginning: it raises, or with `fallback` the next
    older one is taken.

    Args:
        directory: the root that `fa.save` or `fa.scan` writes to. It need not exist. Several train
            steps (a GAN) have one each. None: a first state, as `fa.scan` saves nowhere then.
        train_step: the result of `fa.train_step`. Its `init` is called.
        seed: of a new run. A resumed run keeps its own.
        extras: your own pytree to keep in the state. A resumed run takes the saved values.
        skip, rename: see `fa.restore`. They count if the checkpoint does not fit without them.
            One that fits is restored whole, so that a restart of the changed run loses nothing.
        verify: compare the checksums of all files before anything is changed. Ranks share the files. False
            saves that reading of a large checkpoint.
        fallback: if the newest checkpoint is damaged, warn and take the newest that is not.
        each_machine: see `fa.restore`.

    Returns:
        The live state: at step 0, or at the step that was saved.

    Raises:
        NotSerializableError: `extras` holds what no checkpoint can. Nothing was built.
        CheckpointError: the newest checkpoint is damaged (with `fallback`: all are).
        TreeMismatchError: the checkpoint is of another model, optimizer or step.

    Example:
        >>> state = fa.resume_or_init("runs/gpt", train_step, seed=0)  # there is no checkpoint yet
        >>> state, metrics = train_step(state, batch)
        >>> path = fa.save("runs/gpt", state)
        >>> fa.resume_or_init("runs/gpt", train_step, seed=0).step
        1
    """
    require(
        isinstance(train_step, TrainStep),  # pyright: ignore[reportUnnecessaryIsInstance]
        f"train_step is a {type(train_step).__name__}",
        _WHERE,
        "fa.resume_or_init(directory, train_step): it calls train_step.init by itself",
    )
    root = optional_path(directory, _WHERE)
    world = train_step.mesh.world
    world.resource(Background).settle()
    if root is not None:
        check_extras(extras, _WHERE, world)
    state = train_step.init(seed, extras=extras)
    if root is None:
        return state

    def steps_now() -> list[int]:
        if each_machine:
            return common_steps(root, world, _WHERE, _steps(root))
        return together(world, _WHERE, lambda: _steps(root) if world.is_main else [])[0]

    for _ in attempts():
        steps = steps_now()
        for at, step in enumerate(steps):
            read = functools.partial(
                restore, root, like=state, step=step, verify=verify, each_machine=each_machine, world=world
            )
            try:
                return read()
            except FnaccelError as error:  # which restore raises on all ranks, or on none
                failed = error
            changed = not (skip is None and rename is None)
            if changed and any(gather_objects(isinstance(failed, TreeMismatchError), world=world)):
                return read(skip=skip, rename=rename)
            damaged = gather_objects(isinstance(failed, CheckpointError), world=world)
            if not all(damaged):  # to one rank the trees differ: no older checkpoint would help
                raise failed
            there = steps_now()
            if step not in there and not is_stale(state):  # a job beside this one keeps newer ones only
                break
            _go_on(failed, root, steps[at:], may=fallback and not is_stale(state))
        else:
            return state
    raise CheckpointError(
        f"the checkpoints in {root} are removed again and again while they are opened",
        where=f"{_WHERE}({str(root)!r})",
        fix="let the job that saves there keep more of them: keep=2",
    )


def _steps(root: Path) -> list[int]:
    """The steps under a root, newest first. A step without a manifest is damaged, not absent."""
    steps = {entry.step for entry in publish.checkpoints(root)}
    if root.is_dir():
        named = (_NAMED.fullmatch(path.name) for path in root.iterdir())
        steps |= {int(entry[1]) for entry in named if entry is not None}
    return sorted(steps, reverse=True)


def _go_on(damage: FnaccelError, root: Path, steps: list[int], *, may: bool) -> None:
    """Pass over the first of these steps for the next, or raise."""
    older = ", ".join(map(str, steps[1:]))
    if not may or not older:
        raise CheckpointError(
            f"the checkpoint of step {steps[0]} can't be read: {damage.what}",
            where=f"{_WHERE}({str(root)!r})",
            fix=f"older steps are {older}: fallback=True takes the newest of them that is intact"
            if older
            else "there is no older one: move this one away to start from step 0",
        ) from damage
    # on every rank: if warnings are errors, no rank may go on alone
    warnings.warn(
        f"the checkpoint of step {steps[0]} in {root} can't be read, and step {steps[1]} is taken "
        f"instead: {damage.what}",
        stacklevel=3,
    )
