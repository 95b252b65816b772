"""Which foreign tensor goes where in a state, and every path where that does not work out.

Nothing is read and nothing changed here; see `adopting` for what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from fnaccel.checkpoint.choosing import Patterns, Rename, choose, renamed
from fnaccel.checkpoint.format.dtypes import name_of
from fnaccel.checkpoint.format.found import Found, Source
from fnaccel.errors import TreeMismatchError
from fnaccel.interchange.parameter_names import name_numbered, strips
from fnaccel.interchange.targets import Targets


@attrs.frozen(eq=False)
class Fit:
    """What goes where.

    Attributes:
        pairs: by path.
        doubled: for paths of tied tensors that are there under two names, the other one.
        updates: the count that comes with the moments.
        step: likewise.
    """

    pairs: Mapping[str, Found]
    doubled: Mapping[str, Found]
    updates: int | None = None
    step: int | None = None


@attrs.frozen
class Choice:
    """What the user asked for, and in which function."""

    only: Patterns
    skip: Patterns
    rename: Rename
    where: str


def fit(source: Source, targets: Targets, choice: Choice) -> Fit:
    """Place the tensors of a source.

    Names are taken as they are where that works, or else without the wrappers' parts and the prefix that
    all of them share.

    Raises:
        TreeMismatchError: lists each path that is missing, unexpected, or of another shape or kind of dtype.
        ArgumentError: a pattern that matches nothing, names that become one.
    """
    best: tuple[list[str], Fit] | None = None
    for strip in strips(source.weights):
        problems, found = _placed(source, targets, choice, strip)
        if best is None or len(problems) < len(best[0]):
            best = problems, found
        if not problems:
            break
    problems, found = best or ([], Fit({}, {}))
    if problems:
        raise mismatch(problems, source, choice.where, _rename_hint(source, targets, choice))
    if any(path.startswith("opt/") for path in found.pairs):
        return attrs.evolve(found, updates=source.count_updates(), step=source.step)
    return found


def _placed(
    source: Source, targets: Targets, choice: Choice, strip: Callable[[str], str]
) -> tuple[list[str], Fit]:
    offered = _offered(source, targets, strip)
    names = renamed(offered, choice.rename, choice.where)
    placed: dict[str, Found] = {}
    doubled: dict[str, Found] = {}
    for old, found in offered.items():
        path = _home(names[old], targets)
        if path in placed:  # tied, and there under more than one name
            doubled[path] = placed[path]
        placed[path] = found
    for path in targets.tensors:
        if path.startswith("ema/") and path not in placed:
            weight = placed.get(path.replace("ema/", "params/", 1))
            if weight is not None:  # averages start from what is adopted
                placed[path] = weight
    chosen = choose({*placed, *targets.tensors}, choice.only, choice.skip, choice.where)
    problems: list[str] = []
    pairs: dict[str, Found] = {}
    for path, tensor in targets.tensors.items():
        if path in chosen and path in placed:
            if _fits(tensor, placed[path]):
                pairs[path] = placed[path]
            else:
                problems.append(f"{path}: {placed[path]} in the source, {_described(tensor)} in like")
        elif path in chosen and _needed(path, source, targets):
            problems.append(f"{path}: only in like ({_described(tensor)})")
    problems += [
        f"{path}: only in the source ({found})"
        for path, found in placed.items()
        if path in chosen and path not in targets.tensors
    ]
    return problems, Fit(pairs, {path: found for path, found in doubled.items() if path in pairs})


def _offered(source: Source, targets: Targets, strip: Callable[[str], str]) -> dict[str, Found]:
    """The tensors of a source under paths of a state."""
    found = {f"params/{strip(name)}": value for name, value in source.weights.items()}
    for name, kept in source.same.items():  # stored under one of its names only
        if targets.path_of(f"params/{strip(name)}") in targets.tensors:
            found.setdefault(f"params/{strip(name)}", source.weights[kept])
    found |= {f"buffers/{strip(name)}": found.pop(f"params/{strip(name)}") for name in source.buffers}
    if _has(targets, "ema/"):
        found |= {f"ema/{strip(name)}": value for name, value in source.averages.items()}
    if not _has(targets, "opt/"):
        return found
    moments = [(strip(name), slots) for name, slots in source.slots.items()]
    moments += _numbered(source, targets)
    for name, slots in moments:
        for slot, value in slots.items():
            path = f"opt/{name}/{slot}"
            # here one count serves all parameters
            if slot != "step" or targets.path_of(path) in targets.tensors:
                found[path] = value
    return found


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
    known = name_numbered(source.numbered, shapes) or name_numbered(
        source.numbered, {name: shape for name, shape in shapes.items() if name in trained}
    )
    return [
        (known[number] if known else f"parameter number {number}", slots)
        for number, slots in source.numbered.slots.items()
    ]


def _home(path: str, targets: Targets) -> str:
    """Where a path leads: weights come without saying whether they are buffers, and under any tied name."""
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


def _fits(tensor: torch.Tensor, found: Found) -> bool:
    if tuple(tensor.shape) != found.shape:
        return False
    return tensor.dtype == found.dtype or (tensor.dtype.is_floating_point and found.dtype.is_floating_point)


def _rename_hint(source: Source, targets: Targets, choice: Choice) -> str | None:
    """What to write where all names of a source fit with one prefix before them."""
    paths = [path for path in (*targets.tensors, *targets.tied) if path.startswith(("params/", "buffers/"))]
    here = {path.partition("/")[2] for path in paths}
    name = next(iter(source.weights), None)
    if choice.rename is not None or name is None or here.issuperset(source.weights):
        return None
    for candidate in sorted(here, key=len):
        prefix = candidate.removesuffix(name)
        if candidate.endswith("." + name) and all(prefix + one in here for one in source.weights):
            return f'rename={{r"^params/": "params/{prefix}"}} makes the names fit; nothing was changed'
    return None


def mismatch(problems: list[str], source: Source, where: str, hint: str | None = None) -> TreeMismatchError:
    """The error that lists them."""
    count = len(problems)
    moments = all(problem.startswith("opt/") for problem in problems)
    fix = (
        hint
        or "rename=, skip= or only= where names differ; give a like= of the same model; nothing was changed"
    )
    if moments:
        fix = (
            'skip="opt/*" leaves the moments out; or give a like= of the same optimizer; nothing was changed'
        )
    if moments and source.numbered is not None:
        fix = 'skip="opt/*" leaves the moments out: they have numbers, and names are only found where each '
        fix += "group of the optimizer keeps the model's order; nothing was changed"
    return TreeMismatchError(
        f"{count} {'path differs' if count == 1 else 'paths differ'} between {source.path} "
        f"(read as {source.format}) and like=: " + "; ".join(problems),
        where=where,
        fix=fix,
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{name_of(tensor.dtype)} {list(tensor.shape)}"
