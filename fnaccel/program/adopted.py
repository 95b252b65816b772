"""How a state takes the values of another one. `adopt` checks all of it before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fnaccel import tree
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.errors import ArgumentError, TreeMismatchError
from fnaccel.program.instance import Instance
from fnaccel.state import Position, Seed, TrainState, following, not_counted, plain
from fnaccel.texts import unmatched

_WHERE = "train_step.adopt"


def absorb(instance: Instance, state: TrainState, begin: Callable[[], None]) -> TrainState:
    """Copy a state's values into the tensors of a train step. Returns a state that shows those tensors.

    Args:
        instance: owns the tensors.
        state: the values.
        begin: called before the first tensor changes.

    Raises:
        ArgumentError: a count that is no whole number from 0 on. Nothing was changed.
        TreeMismatchError: every path that differs. Nothing was changed.
    """
    instance.check_modules()
    _check_counts(state)
    first = instance.first_state(state.rng.root, state.extras)
    pairs = _matched(first, state)
    shown = following(
        first,
        step=plain(state.step),
        updates=first.updates if isinstance(first.updates, torch.Tensor) else int(state.updates),
        data=state.data,
        rng=state.rng,
        transforms=tree.map_tensors(torch.clone, state.transforms),
    )
    begin()
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(tree.laid_out(source, target))
    instance.restored()
    return shown


def _check_counts(state: TrainState) -> None:
    """Raise ArgumentError if a count of a state is no whole number from 0 on, by name."""
    for name, node, kind in (
        ("", state, TrainState),
        ("data", state.data, Position),
        ("rng", state.rng, Seed),
    ):
        if not isinstance(node, kind):
            raise _no_count(name, node, f"a {kind.__name__}")
        wrong = not_counted(node)
        if wrong is not None:
            path = f"{name}/{wrong}" if name else wrong
            raise _no_count(path, getattr(node, wrong), "a whole number from 0 on")


def _no_count(path: str, value: object, what: str) -> ArgumentError:
    return ArgumentError(
        f"{path} is {value!r}, not {what}"[:300],
        where=_WHERE,
        fix="map the tensors only: fa.tree.map(fn, state.params, ...), and "
        "attrs.evolve(state, params=result); a mean of whole states is one of their counts too",
    )


def _matched(first: TrainState, source_state: TrainState) -> list[tuple[Any, Any]]:
    """Pairs of tensors to copy: of the first state of a train step, and of the one that is adopted.

    Raises:
        TreeMismatchError: paths, shapes, dtypes or layouts differ.
    """
    skipped = ("extras", "extras/")  # which are anything
    targets, sources = (
        {path: leaf for path, leaf in tree.items(state) if not path.startswith(skipped)}
        for state in (first, source_state)
    )
    problems = unmatched(targets, sources)
    pairs: list[tuple[Any, Any]] = []
    for path in targets.keys() & sources.keys():
        target, source = targets[path], sources[path]
        if not isinstance(target, torch.Tensor) or target is source:
            continue
        problem = _problem(target, source)
        if problem is not None:
            problems.append(f"{path} is {problem}")
        elif not path.startswith("transforms/"):  # values, of which the caller makes copies
            pairs.append((target, source))
    if problems:
        raise TreeMismatchError(
            f"the state differs from that of this train step: {'; '.join(sorted(problems))}",
            where=_WHERE,
            fix="adopt a state of the same models, optimizer, transforms and strategy; fa.save and "
            "fa.restore carry one to another layout",
        )
    return pairs


def _problem(target: torch.Tensor, source: Any) -> str | None:
    """Why a tensor can't be copied into another one. None if it can."""
    if not isinstance(source, torch.Tensor):
        return f"{type(source).__name__}, not a tensor"
    if target.shape != source.shape or target.dtype != source.dtype:
        return f"{list(source.shape)} {source.dtype}, not {list(target.shape)} {target.dtype}"
    if source.is_meta and not target.is_meta:
        return "without values, on the meta device"
    if source.layout is not target.layout:
        return f"{source.layout}, not {target.layout}"
    if isinstance(target, Remote) or isinstance(source, Remote):
        return None  # it reads and writes whole values
    mesh, held = (getattr(tensor, "device_mesh", None) for tensor in (target, source))
    if held is None or mesh == held:
        return None
    return "cut over ranks, not whole" if mesh is None else f"cut over {held}, not over {mesh}"
