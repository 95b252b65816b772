"""Assigns foreign tensors to the paths of a state, and lists every path that has no match.

No tensor is read or changed here. `adopting` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from fnaccel.checkpoint.choosing import Patterns, Rename, choose, renamed
from fnaccel.checkpoint.format.dtypes import name_of
from fnaccel.checkpoint.format.found import Found, Source
from fnaccel.errors import TreeMismatchError
from fnaccel.interchange.parameter_names import is_number, name_numbered, strips
from fnaccel.interchange.targets import Targets
from fnaccel.texts import counted


@attrs.frozen(eq=False)
class Fit:
    """The foreign tensor of each path.

    Attributes:
        pairs: by path.
        doubled: for paths of tied tensors that are there under two names, the other one.
        updates: the number of updates that belongs to the moments.
        step: the number of steps that belongs to the moments.
    """

    pairs: Mapping[str, Found]
    doubled: Mapping[str, Found]
    updates: int | None = None
    step: int | None = None


@attrs.frozen
class Choice:
    """The user's arguments, the name of the public function, and what it calls the object that it fills."""

    only: Patterns
    skip: Patterns
    rename: Rename
    where: str
    target: str = "like"


def fit(source: Source, targets: Targets, choice: Choice) -> Fit:
    """Place the tensors of a source.

    Names are used unchanged if they match, or else without the wrappers' parts and the prefix that all of
    them share.

    Raises:
        TreeMismatchError: lists each path that is missing, unexpected, or of another shape or kind of dtype.
        ArgumentError: a pattern that matches nothing, names that become one.
    """
    best: tuple[list[str], Fit] | None = None
    for strip in strips(source.weights):
        problems, fitted = _placed(source, targets, choice, strip)
        if best is None or len(problems) < len(best[0]):
            best = problems, fitted
        if not problems:
            break
    problems, fitted = best or ([], Fit({}, {}))
    if problems:
        hint = _rename_hint(source, targets, choice)
        raise mismatch(problems, source, choice.where, hint, choice.target)
    if any(path.startswith("opt/") for path in fitted.pairs):
        return attrs.evolve(fitted, updates=source.count_updates(), step=source.step)
    return fitted


def _placed(
    source: Source, targets: Targets, choice: Choice, strip: Callable[[str], str]
) -> tuple[list[str], Fit]:
    offered = _offered(source, targets, strip)
    names = renamed(offered, choice.rename, choice.where)
    placed: dict[str, Found] = {}
    doubled: dict[str, Found] = {}
    for old, tensor in offered.items():
        path = _home(names[old], targets)
        if path in placed:  # tied, and there under more than one name
            doubled[path] = placed[path]
        placed[path] = tensor
    for path in targets.tensors:
        if path.startswith("ema/") and path not in placed:
            for section in ("params/", "buffers/"):  # averages start from the adopted weights
                if (value := placed.get(path.replace("ema/", section, 1))) is not None:
                    placed[path] = value
    chosen = choose({*placed, *targets.tensors}, choice.only, choice.skip, choice.where)
    problems: list[str] = []
    pairs: dict[str, Found] = {}
    for path, tensor in targets.tensors.items():
        if path in chosen and path in placed:
            if _fits(tensor, placed[path]):
                pairs[path] = placed[path]
            else:
                problems.append(
                    f"{path}: {placed[path]} in the source, {_described(tensor)} in {choice.target}"
                )
        elif path in chosen and _needed(path, source, targets):
            problems.append(f"{path}: only in {choice.target} ({_described(tensor)})")
    problems += [
        f"{path}: only in the source ({tensor})"
        for path, tensor in placed.items()
        if path in chosen and path not in targets.tensors
    ]
    return problems, Fit(pairs, {path: tensor for path, tensor in doubled.items() if path in pairs})


def _offered(source: Source, targets: Targets, strip: Callable[[str], str]) -> dict[str, Found]:
    """The tensors of a source under paths of a state."""
    offered = {f"params/{strip(name)}": value for name, value in source.weights.items()}
    for name, stored_name in source.same.items():  # stored under one of its names only
        if targets.path_of(f"params/{strip(name)}") in targets.tensors:
            offered.setdefault(f"params/{strip(name)}", source.weights[stored_name])
    offered |= {f"buffers/{strip(name)}": offered.pop(f"params/{strip(name)}") for name in source.buffers}
    if _has(targets, "ema/"):
        offered |= {f"ema/{strip(name)}": value for name, value in source.averages.items()}
    if not _has(targets, "opt/"):
        return offered
    moments = [(strip(name), slots) for name, slots in source.slots.items()]
    moments += _numbered(source, targets)
    for name, slots in moments:
        for slot, value in slots.items():
            path = f"opt/{name}/{slot}"
            # here one count serves all parameters
            if not is_number(slot) or targets.path_of(path) in targets.tensors:
                offered[path] = value
    return offered


def _numbered(source: Source, targets: Targets) -> list[tuple[str, Mapping[str, Found]]]:
    if source.numbered is None:
        return []
    shapes = {
        path.removeprefix("params/"): tuple(tensor.shape)
        for path, tensor in targets.tensors.items()
        if path.startswith("params/")
    }
    trained = {
        path.removeprefix("opt/").rpartition("/")[0] for path in targets.tensors if path.startswith("opt/")
    }
    # the optimizer was given all parameters, or those alone that are trained
    names = name_numbered(source.numbered, shapes) or name_numbered(
        source.numbered, {name: shape for name, shape in shapes.items() if name in trained}
    )
    return [
        (names[number] if names else f"parameter number {number}", slots)
        for number, slots in source.numbered.slots.items()
    ]


def _home(path: str, targets: Targets) -> str:
    """The path in the state. A source does not mark buffers, and may use any tied name of a tensor."""
    section, _, name = path.partition("/")
    path = targets.path_of(path)
    if section in ("params", "buffers") and path not in targets.tensors:
        other = targets.path_of(f"{'buffers' if section == 'params' else 'params'}/{name}")
        for candidate in (path, other):
            if targets.tied.get(candidate) in targets.tensors:
                return targets.tied[candidate]
        if other in targets.tensors:
            return other
    return path


def _has(targets: Targets, section: str) -> bool:
    return any(path.startswith(section) for path in targets.tensors)


def _needed(path: str, source: Source, targets: Targets) -> bool:
    section = path.partition("/")[0]
    if section == "buffers":
        return targets.persistent is not None and path in targets.persistent
    return section == "params" or (section == "opt" and source.has_moments)


def _fits(tensor: torch.Tensor, stored: Found) -> bool:
    if tuple(tensor.shape) != stored.shape:
        return False
    return tensor.dtype == stored.dtype or (tensor.dtype.is_floating_point and stored.dtype.is_floating_point)


def _rename_hint(source: Source, targets: Targets, choice: Choice) -> str | None:
    """The `rename=` to suggest if all names of a source match after adding one prefix."""
    paths = [path for path in (*targets.tensors, *targets.tied) if path.startswith(("params/", "buffers/"))]
    here = {path.partition("/")[2] for path in paths}
    name = next(iter(source.weights), None)
    if choice.rename is not None or name is None or here.issuperset(source.weights):
        return None
    for candidate in sorted(here, key=len):
        prefix = candidate.removesuffix(name)
        if candidate.endswith("." + name) and all(prefix + weight in here for weight in source.weights):
            return f'rename={{r"^params/": "params/{prefix}"}} makes the names fit. Nothing was changed'
    return None


def mismatch(
    problems: list[str], source: Source, where: str, hint: str | None = None, target: str = "like"
) -> TreeMismatchError:
    """The error that lists them."""
    count = len(problems)
    moments = all(problem.startswith("opt/") for problem in problems)
    other = "a like= of the same model" if target == "like" else "the model that was saved"
    fix = hint or f"rename=, skip= or only= if names differ, or {other}. Nothing was changed"
    if moments:
        fix = (
            'skip="opt/*" leaves the moments out, or give a like= of the same optimizer. Nothing was changed'
        )
    if moments and source.numbered is not None:
        fix = 'skip="opt/*" leaves the moments out: they have numbers, and get names only if each '
        fix += "group of the optimizer keeps the model's order. Nothing was changed"
    return TreeMismatchError(
        f"{counted(count, 'path differs', 'paths differ')} between {source.path} "
        f"(read as {source.format}) and {target}{'=' if target == 'like' else ''}: " + "; ".join(problems),
        where=where,
        fix=fix,
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{name_of(tensor.dtype)} {list(tensor.shape)}"
