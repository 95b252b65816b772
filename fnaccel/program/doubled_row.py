"""A check of totals and weights, at the user's call: one row, and that row twice.

`fa.Mean` takes a sum and its weight. If a row is given twice, its sum doubles and its mean stays. This holds
of any expression, and of metrics without a graph. The first update reads the graph: `step/total_graph.py`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.collectives import broadcast_objects, gather_objects
from fnaccel.data.cut import cut, join, rows_of
from fnaccel.errors import LossError
from fnaccel.models.moving_buffers import passes_put_back
from fnaccel.program.instance import Instance
from fnaccel.program.probe import short
from fnaccel.step.callables import title
from fnaccel.step.loss import Mean
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh
from fnaccel.world.progress_marks import NOW, enter
from fnaccel.world.undo import StreamStates

_TOLERANCE = 1e-5
OF_WEIGHT_FN = "the loss under fa.with_weight"
_MEAN_FOR_A_TOTAL = (
    "fa.Mean takes a total, and {what} holds a mean: if one row is given twice it stays {value:.4g}, and its "
    "weight doubles. It would be {times} too small"
)
_TOTAL_FOR_A_MEAN = (
    "fa.Mean.of takes a mean, and {what} holds a total: it doubles if one row is given twice, as its weight "
    "does. It would be {times} too large"
)


def check_doubled(
    instance: Instance,
    run: Callable[..., Any],
    function: Callable[..., Any],
    batch: Tree,
    parts: Callable[[Any, Tree], Any],
) -> None:
    """Compare the totals and weights of one row with those of that row twice.

    All ranks take the rows of rank 0, so that all raise or none. Modules are in evaluation mode. Afterwards
    buffers, random streams and modes are as before. What else the function changes stays changed.

    Args:
        instance: the engine and its modules.
        run: the function as the step runs it.
        function: the user's function, for messages.
        batch: this rank's batch.
        parts: `parts(output, rows)`: a pytree with each `fa.Mean` to look at.

    Raises:
        LossError: a total is a mean, or the mean of `fa.Mean.of` is a total.
        NotSerializableError: the rows don't pickle.
    """
    mesh = instance.engine.layout.mesh
    one, doubled, other = _two_rows(batch, mesh)
    with _evaluating(instance):
        means = [_outcome(instance, run, rows, parts) for rows in (one, doubled)]
        problem = _problem(means, rows_of(batch))
        if problem is not None and other is not None:
            # a count within the batch, such as that of nearest neighbours, does not double with equal rows
            others = other, join([one, other])
            means = [means[0], *(_outcome(instance, run, rows, parts) for rows in others)]
            problem = problem if _is_mean_of_two(problem.name, means) else None
    # what is drawn may differ on the ranks
    found = None if problem is None else (problem.text, problem.fix)
    if mesh.world.size > 1:
        found = next((text for text in gather_objects(found, world=mesh.world) if text is not None), None)
    if found is not None:
        raise LossError(found[0], where=title(function), fix=found[1])


@contextlib.contextmanager
def _evaluating(instance: Instance) -> Generator[None]:
    """In the body all modules are in evaluation mode, and compiled functions run as they are written."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(instance.module_modes.during(training=False))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _outcome(
    instance: Instance, run: Callable[..., Any], rows: Tree, parts: Callable[[Any, Tree], Any]
) -> dict[str, Mean]:
    """Each `fa.Mean` that the function returns, by its path."""
    enter(NOW.phase)  # each call has the whole limit of the phase
    layout = instance.engine.layout
    with passes_put_back(layout.modules, StreamStates.of(layout.mesh.world.device)):
        output = parts(instance.engine.look(run, rows), rows)
    leaves = tree.items(output, is_leaf=lambda node: isinstance(node, Mean))
    return {path: leaf for path, leaf in leaves if isinstance(leaf, Mean)}


def _two_rows(batch: Tree, mesh: Mesh) -> tuple[Tree, Tree, Tree | None]:
    """Copies of the first row, of that row twice, and of the second row if there is one: rank 0's."""
    rows = rows_of(batch)
    second = cut(batch, [1, 1, rows - 2])[1] if rows > 1 else None
    first = short(batch)
    # copies: a loss may change its batch
    pair: Any = join([first]), join([first, first]), None if second is None else join([second])
    if mesh.world.size > 1:
        pair = tree.to(broadcast_objects(pair, world=mesh.world), mesh.world.device)
    return pair


@attrs.frozen
class _Problem:
    """The name of an `fa.Mean` that is none, and the message."""

    name: str
    text: str
    fix: str


def _problem(means: Sequence[Mapping[str, Mean]], rows: int) -> _Problem | None:
    """The first total that does not follow its weight, of a row and of that row twice."""
    one, doubled = means
    for name, mean in one.items():
        total, weight = _numbers(mean)
        total_2, weight_2 = _numbers(doubled.get(name))
        finite = all(map(math.isfinite, (total, weight, total_2, weight_2)))
        if not finite or not total or not weight or not _close(weight_2, 2 * weight):
            continue
        stays = not mean.of_mean and _close(total_2, total)
        if not stays and not (mean.of_mean and _close(total_2, 4 * total)):
            continue
        text = _MEAN_FOR_A_TOTAL if stays else _TOTAL_FOR_A_MEAN
        times = f"{rows * weight:g} times" if rows > 1 else "as many times as there are rows"
        fix = "fa.Mean.of(mean, n), or a sum: reduction='sum'" if stays else "fa.Mean(total, weight=n)"
        if name == OF_WEIGHT_FN:
            fix = "return a sum: reduction='sum'; or for a mean, fa.with_weight(step, lambda batch: 1)"
        return _Problem(name, text.format(what=_described(name), value=total, times=times), fix)
    return None


def _is_mean_of_two(name: str, means: Sequence[Mapping[str, Mean]]) -> bool:
    """Whether the total of two rows is the mean of their totals, or in `fa.Mean.of` twice their sum."""
    first, second, both = (_numbers(found.get(name)) for found in means)
    (a, weight_a), (b, weight_b), (total, _) = first, second, both
    if not weight_a or not weight_b:
        return False
    if means[0][name].of_mean:  # each total is a sum times its weight
        return _close(total, (a / weight_a + b / weight_b) * (weight_a + weight_b))
    weighted = (weight_a * a + weight_b * b) / (weight_a + weight_b)
    return _close(total, weighted) or _close(total, (a + b) / 2)


def _numbers(mean: Mean | None) -> tuple[float, float]:
    return (math.nan, math.nan) if mean is None else (_number(mean.total), _number(mean.weight))


def _described(path: str) -> str:
    return path or "the result"


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= _TOLERANCE * abs(expected)


def _number(value: Any) -> float:
    try:
        return float(value.sum() if getattr(value, "shape", ()) else value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
