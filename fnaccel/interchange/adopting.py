"""`adopt`: weights of any format into a state of any layout. All checks come first."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.choosing import Patterns, Rename
from fnaccel.checkpoint.disk.directory import attempts
from fnaccel.checkpoint.format.boxes import blocks_of, is_sharded, parts_of
from fnaccel.checkpoint.format.dtypes import name_of
from fnaccel.checkpoint.format.found import Found, Source
from fnaccel.checkpoint.format.walk import child
from fnaccel.errors import ArgumentError, CheckpointError, UnleasedStateError
from fnaccel.interchange.fitting import Choice, Fit, fit, mismatch
from fnaccel.interchange.sources.detect import Format
from fnaccel.interchange.sources.detect import opened as open_source
from fnaccel.interchange.targets import SECTIONS, sections_of, targets_of, tensors_of
from fnaccel.state import TrainState, lease_of
from fnaccel.tree import Tree
from fnaccel.world.paths import local_path
from fnaccel.world.undo import TorchSettings
from fnaccel.world.world import World, current

T = TypeVar("T")
_WHERE = "fa.interchange.adopt"
_WIDE = 1e38


def adopt(
    path: str | os.PathLike[str],
    *,
    like: T,
    format: Format | None = None,  # noqa: A002 - the word for it
    only: Patterns = None,
    skip: Patterns = None,
    rename: Rename = None,
    trust_pickle: bool = False,
    world: World | None = None,
) -> T:
    """Read weights that another tool wrote into a state: any strategy, any number of ranks.

    Every rank must call it, and takes only its part of each tensor. Everything is checked before anything
    is changed: names, shapes, that each tensor can be read, and the checksums of a checkpoint of `fa.save`.
    Floating-point values are converted to the dtypes of `like`. Names that have a wrapper's part in them
    (`module.`, `_orig_mod.`), or a prefix that all of them share, are read without it if that makes them fit.
    Adam's and SGD's moments come along if the source has them, and with Adam's the number of updates. Without
    any, moments stay as they are. Averages (`with_ema`) start from the adopted weights, unless the source has
    its own.

    Args:
        path: safetensors (a file, or a directory with or without an index), a file of `torch.save`, or the
            directory of Accelerate's `save_state`, `torch.distributed.checkpoint`, DeepSpeed, or `fa.save`.
        like: the live state of a train step, which is refilled in place and donated. Or a snapshot or a
            dict of tensors (`state.params`), which stays as it is.
        format: `"safetensors"`, `"torch"`, `"accelerate"`, `"dcp"`, `"deepspeed"` or `"fnaccel"`. By
            default detected from the files.
        only, skip: shell patterns of paths of the state that are to be read, or not: `"params/head.*"`,
            `"opt"`.
        rename: regular expressions and their replacements, in order, or a function. From the source's
            path (`params/NAME`) to the state's.
        trust_pickle: load pickles, which can run code: DCP and DeepSpeed need it.
        world: the world, if none was started in this context.

    Returns:
        A tree like `like`.

    Raises:
        TreeMismatchError: names, shapes or kinds of dtype differ. Lists every path. Nothing was changed.
        CheckpointError: nothing known is there, it is damaged, or a pickle in it is not trusted. `like` stays
            live, unless a device fails or files are replaced while values are copied: the message says so.
        MissingBackendError: a DeepSpeed checkpoint, and deepspeed is not installed.
        ArgumentError: a pattern that matches nothing, names that become one. Or slots that are left out
            would count the updates of the others.
        StaleStateError: `like` was donated.

    Example:
        >>> torch.save(GPT().state_dict(), "gpt.pt")
        >>> state = fa.interchange.adopt("gpt.pt", like=train_step.init(seed=0))
    """
    ranks = current(world)
    choice = Choice(only, skip, rename, _WHERE)
    request = _Request(local_path(path, _WHERE), format, trust_pickle, like, choice)
    for _ in attempts():
        # not a return value: those are pickled and sent to the other ranks
        opened: list[tuple[Fit, Source]] = []
        with ExitStack() as stack:
            check = functools.partial(_check, request, ranks, stack, opened)
            # a save may have replaced the checkpoint after one rank opened it, and before another did
            if len(set(together(ranks, _WHERE, check))) == 1:
                return _filled(like, *opened[0], ranks)
    raise CheckpointError(
        f"{path} is replaced again and again while ranks open it",
        where=_WHERE,
        fix="adopt while no job saves this step, or adopt a step that is not replaced",
    )


@attrs.frozen(eq=False)
class _Request:
    """The arguments of `adopt`."""

    path: Path
    format: str | None
    trust: bool
    like: Any
    choice: Choice


def _check(request: _Request, world: World, stack: ExitStack, opened: list[tuple[Fit, Source]]) -> str:
    """Open the source, and check all that can fail before a value is written. Returns the source's digest."""
    targets = targets_of(request.like, _WHERE)
    source = stack.enter_context(open_source(request.path, request.format, trust=request.trust))
    fitted = fit(source, targets, request.choice)
    _check_readable(fitted, targets.tensors, world)
    source.verify(world.rank, world.size)
    _check_doubled(fitted, source, targets.tensors, world)
    _check_ranges(fitted, source, targets.tensors, world)
    _check_counts(request.like, fitted)
    _check_point(request.like, fitted, source)
    source.check_unchanged()
    opened.append((fitted, source))
    return source.digest


def _check_counts(like: Tree, fitted: Fit) -> None:
    """Check that slots which are left out do not count the updates of the others.

    Raises:
        ArgumentError: they do.
    """
    if not (isinstance(like, TrainState) and fitted.updates):
        return

    def kept(keys: list[str]) -> bool:
        return functools.reduce(child, keys, "opt") not in fitted.pairs

    with suppress(UnleasedStateError):
        lease_of(like, _WHERE).owner.refuse_late(like, kept, fitted.updates, _WHERE)


def _check_point(like: Tree, fitted: Fit, source: Source) -> None:
    """Check that slots of an optimizer with `train()` and `eval()` come from a checkpoint of `fa.save`.

    In files of others nothing says whether the weights are those that train, nor how many updates were made.

    Raises:
        ArgumentError: they come from another file.
    """
    if source.format == "fnaccel" or not any(path.startswith("opt/") for path in fitted.pairs):
        return
    with suppress(UnleasedStateError):
        if lease_of(like, _WHERE).owner.instance.updater.switching:
            raise ArgumentError(
                "the file has slots of an optimizer with train() and eval(), and nothing says at which of "
                "the two points its weights are",
                where=_WHERE,
                fix='skip="opt*" takes the weights alone, best those of optimizer.eval(), and the optimizer '
                "begins anew",
            )


def _check_readable(fitted: Fit, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Check that this rank's part of each tensor can be read, before anything is written.

    Raises:
        CheckpointError: a file is damaged.
    """
    for path, source in fitted.pairs.items():
        for box in blocks_of(tensors[path], world.rank):
            if source.check is not None:
                source.check(box)
            elif box.numel:
                source.read(box, torch.empty(box.shape, dtype=source.dtype))


def _check_doubled(fitted: Fit, source: Source, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Check that tied weights with two values in the source are equal, in this rank's part.

    Raises:
        TreeMismatchError: they differ.
    """
    problems: list[str] = []
    for path, other in fitted.doubled.items():
        tensor = fitted.pairs[path]
        if tensor.shape != other.shape or not _same(tensor, other, tensors[path], world):
            problems.append(f"{path}: tied in like, and has two values in the source")
    if problems:
        raise mismatch(problems, source, _WHERE)


def _check_ranges(fitted: Fit, source: Source, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Check that no value saturates in its new dtype: torch saturates in fp8 without a warning.

    Raises:
        TreeMismatchError: a value of this rank's part would.
    """
    problems: list[str] = []
    for path, tensor in fitted.pairs.items():
        dtype = tensors[path].dtype
        if not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            continue
        most = torch.finfo(dtype).max
        if most > _WIDE or torch.finfo(tensor.dtype).max <= most:  # bf16 reaches nearly as far as fp32
            continue
        for box in blocks_of(tensors[path], world.rank):
            if not box.numel:
                continue
            value = torch.empty(box.shape, dtype=torch.float32)
            tensor.read(box, value)
            largest = float(value.abs().max())
            if most < largest < float("inf"):
                problems.append(f"{path}: holds {largest:g}, and {name_of(dtype)} ends at {most:g}")
                break
    if problems:
        raise mismatch(problems, source, _WHERE, "store these in a wider dtype. Nothing was changed")


def _same(first: Found, second: Found, tensor: torch.Tensor, world: World) -> bool:
    for box in blocks_of(tensor, world.rank):
        values = [torch.empty(box.shape, dtype=tensor.dtype) for _ in range(2)]
        if box.numel:
            first.read(box, values[0])
            second.read(box, values[1])
        if not torch.equal(*values):
            return False
    return True


def _filled(like: Tree, fitted: Fit, source: Source, world: World) -> Any:
    if isinstance(like, TrainState):
        try:
            owner = lease_of(like, _WHERE).owner
        except UnleasedStateError:
            pass
        else:
            # the tensors that a model built without values needs. Its buffers have values
            paths = _tensors(like)
            params = {path for path in paths if path.startswith("params/")}
            needed = [path for path in paths if path.replace("ema/", "params/", 1) in params]
            complete = all(path in fitted.pairs for path in needed)
            return owner.refill(
                like, lambda state: _in_place(state, fitted, source, world), complete=complete
            )
    results: list[Any] = []
    together(world, _WHERE, lambda: results.append(_fresh(like, fitted, source, world)))
    return results[0]


def _in_place(state: TrainState, fitted: Fit, source: Source, world: World) -> TrainState:
    states: list[TrainState] = []

    def fill() -> None:
        try:
            _read(_tensors(state), fitted, world)
            source.check_unchanged()
        except (CheckpointError, OSError) as error:
            raise CheckpointError(
                f"{getattr(error, 'what', error)}; by then like= was part old, part new, so it was donated",
                where=_WHERE,
                fix="make a new state (train_step.init, fa.resume_or_init), and adopt into that",
            ) from error
        states.append(_counted(state, fitted, in_place=True))

    # inside of refill: if a rank fails, no rank goes on with these tensors
    together(world, _WHERE, fill)
    return states[0]


def _fresh(like: Tree, fitted: Fit, source: Source, world: World) -> Any:
    filled = {
        path: _empty(tensor, world) if path in fitted.pairs else tensor.detach().clone()
        for path, tensor in _tensors(like).items()
    }
    _read(filled, fitted, world)
    source.check_unchanged()
    if isinstance(like, TrainState):
        parts = {name: _rebuilt(getattr(like, name), name, filled) for name in SECTIONS}
        return _counted(attrs.evolve(like, **parts), fitted, in_place=False)
    if isinstance(like.get("params"), dict):
        return {key: _rebuilt(node, key, filled) if key in SECTIONS else node for key, node in like.items()}
    return _rebuilt(like, "params", filled)


def _tensors(like: Tree) -> dict[str, torch.Tensor]:
    parts = sections_of(like, _WHERE).items()
    return {path: tensor for name, part in parts for path, tensor in tensors_of(part, name, _WHERE).items()}


def _empty(tensor: torch.Tensor, world: World) -> torch.Tensor:
    device = world.device if tensor.is_meta and not is_sharded(tensor) else tensor.device
    return torch.empty_like(tensor.detach(), device=device)


def _read(tensors: Mapping[str, torch.Tensor], fitted: Fit, world: World) -> None:
    with TorchSettings(), torch.no_grad():
        for path, source in fitted.pairs.items():
            for part in parts_of(tensors[path], world.rank):
                if part.box.numel:
                    source.read(part.box, part.local)


def _rebuilt(node: Tree, path: str, filled: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        return filled[path]
    if isinstance(node, dict):
        return {key: _rebuilt(value, child(path, key), filled) for key, value in node.items()}
    return node


def _counted(state: TrainState, fitted: Fit, *, in_place: bool) -> TrainState:
    """The state with the number of updates that belongs to its moments."""
    if fitted.updates is None:
        return state
    updates: Any = fitted.updates
    if isinstance(state.updates, torch.Tensor):
        updates = state.updates if in_place else torch.empty_like(state.updates)
        updates.fill_(fitted.updates)
    return attrs.evolve(state, updates=updates, step=fitted.updates if fitted.step is None else fitted.step)
