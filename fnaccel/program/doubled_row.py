"""A check of totals and weights before the first update: one row, and that row twice.

`fa.Mean` takes a sum and its weight. A mean in the place of the sum trains with gradients that are too small
by the number of rows, and nothing else shows it. If a row is given twice, its sum doubles and its mean stays.
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
from fnaccel.errors import LossError, NotSerializableError, RankMismatchError
from fnaccel.models.module_modes import ModuleModes
from fnaccel.program.instance import Instance
from fnaccel.program.lent_models import LentModels
from fnaccel.program.lower import Lowered
from fnaccel.program.probe import short
from fnaccel.program.put_back import put_back
from fnaccel.step.callables import title
from fnaccel.step.loss import Mean, read_loss
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh
from fnaccel.world.progress_marks import NOW, enter

_TOLERANCE = 1e-5
_LOSS, _OF_WEIGHT_FN = "the loss", "the loss under fa.with_weight"
_MEAN_FOR_A_TOTAL = (
    "fa.Mean takes a total, and {what} holds a mean: if one row is given twice it stays {value:.4g}, and its "
    "weight doubles. It would be {times} too small"
)
_TOTAL_FOR_A_MEAN = (
    "fa.Mean.of takes a mean, and {what} holds a total: it doubles if one row is given twice, as its weight "
    "does. It would be {times} too large"
)


def check_loss(
    instance: Instance,
    lowered: Lowered,
    run: Callable[..., Any],
    function: Callable[..., Any],
    batch: Tree,
    lent: LentModels | None,
) -> None:
    """Check the loss and its aux: see `_check`.

    Args:
        instance: the engine and its modules.
        lowered: the step.
        run: the loss function as the step runs it.
        function: the user's function.
        batch: this rank's batch.
        lent: the models of other train steps.
    """
    weight_fn, where = lowered.loss.weight_fn, lowered.loss.where

    def parts(output: Tree, rows: Tree) -> dict[str, Any]:
        loss = read_loss(output, where)
        weight = loss.weight if weight_fn is None else weight_fn(rows)
        total = Mean(loss.total, weight, of_mean=getattr(output, "of_mean", False))
        name = _OF_WEIGHT_FN if weight_fn is not None else _LOSS
        return {"aux": loss.aux} | ({name: total} if loss.weighted or weight_fn is not None else {})

    _check(instance, run, function, batch, parts, lent)


def check_metrics(
    instance: Instance, run: Callable[..., Any], function: Callable[..., Any], batch: Tree
) -> None:
    """Check the result of a metric function: see `_check`."""
    _check(instance, run, function, batch, lambda output, _: output, None)


def _check(
    instance: Instance,
    run: Callable[..., Any],
    function: Callable[..., Any],
    batch: Tree,
    parts: Callable[[Any, Tree], Any],
    lent: LentModels | None,
) -> None:
    """Compare the totals and weights of one row with those of that row twice, once for each function.

    What raises is left alone, since the step itself raises then. So is a function on a runtime or on XLA.

    Raises:
        LossError: a total is a mean, or the mean of `fa.Mean.of` is a total.
    """
    world, code = instance.engine.layout.mesh.world, getattr(function, "__code__", function)
    left_alone = (
        instance.engine.runtime.native is not None or world.device.type == "xla" or world.backend == "fake"
    )
    if left_alone or code in instance.checked:
        return
    instance.checked.add(code)
    mesh = instance.engine.layout.mesh
    pair = _two_rows(batch, mesh)
    if pair is None:
        return
    one, doubled, other = pair
    with _evaluating(instance, lent):
        means = [_outcome(instance, run, function, rows, parts, lent) for rows in (one, doubled)]
        problem = _problem(means, rows_of(batch))
        if problem is not None and other is not None:
            # a count within the batch, such as that of nearest neighbours, does not double with equal rows
            others = other, join([one, other])
            means = [means[0], *(_outcome(instance, run, function, rows, parts, lent) for rows in others)]
            problem = problem if _is_mean_of_two(problem.name, means) else None
    # what is drawn may differ on the ranks, and all of them have to raise
    found = None if problem is None else (problem.text, problem.fix)
    if world.size > 1:
        found = next((text for text in gather_objects(found, world=world) if text is not None), None)
    if found is not None:
        instance.checked.discard(code)
        raise LossError(found[0], where=title(function), fix=found[1])


@contextlib.contextmanager
def _evaluating(instance: Instance, lent: LentModels | None) -> Generator[None]:
    """In the body all modules are in evaluation mode, and compiled functions run as they are written."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(instance.modes.during(training=False))
        if lent is not None:
            stack.enter_context(lent.frozen())  # at its end no gathered parameter is left
        for engine in () if lent is None else lent.engines:
            modules = engine.layout.modules
            modes = ModuleModes(modules, trains=any(module.training for module in modules))
            stack.enter_context(modes.during(training=False))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _outcome(
    instance: Instance,
    run: Callable[..., Any],
    function: Callable[..., Any],
    rows: Tree,
    parts: Callable[[Any, Tree], Any],
    lent: LentModels | None,
) -> dict[str, Mean] | None:
    """Each `fa.Mean` that the function returns, by its path. None if it raises."""

    def look() -> Any:
        return instance.engine.look(run, rows, *(() if lent is None else (lent.models,)))

    enter(NOW.phase)  # each call has the whole limit of the phase
    layout = instance.engine.layout
    others = () if lent is None else (m for engine in lent.engines for m in engine.layout.modules)
    instance.moving_buffers.begin()
    with put_back([function, *others], layout.modules, layout.mesh.world.device):
        try:
            output = parts(look() if lent is None else lent.within(look), rows)
            leaves = tree.items(output, is_leaf=lambda node: isinstance(node, Mean))
            return {path: leaf for path, leaf in leaves if isinstance(leaf, Mean)}
        except Exception:
            return None
        finally:
            instance.moving_buffers.put_back()


def _two_rows(batch: Tree, mesh: Mesh) -> tuple[Tree, Tree, Tree | None] | None:
    """Copies of the first row, of that row twice, and of the second row if there is one.

    All ranks take those of rank 0, so that all raise or none.

    None for a batch of a class that nothing joins, or that does not pickle.
    """
    pair: Any = None
    with contextlib.suppress(Exception):
        rows = rows_of(batch)
        second = cut(batch, [1, 1, rows - 2])[1] if rows > 1 else None
        first = short(batch)
        # copies: a loss may change its batch
        pair = join([first]), join([first, first]), None if second is None else join([second])
    if mesh.world.size > 1:
        try:
            pair = tree.to(broadcast_objects(pair, world=mesh.world), mesh.world.device)
        except (NotSerializableError, RankMismatchError):  # raised on all ranks
            return None
    return pair


@attrs.frozen
class _Problem:
    """The name of an `fa.Mean` that is none, and the message."""

    name: str
    text: str
    fix: str


def _problem(means: Sequence[Mapping[str, Mean] | None], rows: int) -> _Problem | None:
    """The first total that does not follow its weight, of a row and of that row twice."""
    one, doubled = means
    for name, mean in (one or {}).items():
        total, weight = _numbers(mean)
        total_2, weight_2 = _numbers(None if doubled is None else doubled.get(name))
        finite = all(map(math.isfinite, (total, weight, total_2, weight_2)))
        if not finite or not total or not weight or not _close(weight_2, 2 * weight):
            continue
        stays = not mean.of_mean and _close(total_2, total)
        if not stays and not (mean.of_mean and _close(total_2, 4 * total)):
            continue
        text = _MEAN_FOR_A_TOTAL if stays else _TOTAL_FOR_A_MEAN
        times = f"{rows * weight:g} times" if rows > 1 else "as many times as there are rows"
        fix = "fa.Mean.of(mean, n), or a sum: reduction='sum'" if stays else "fa.Mean(total, weight=n)"
        if name == _OF_WEIGHT_FN:
            fix = "return a sum: reduction='sum'; or for a mean, fa.with_weight(step, lambda batch: 1)"
        return _Problem(name, text.format(what=_described(name), value=total, times=times), fix)
    return None


def _is_mean_of_two(name: str, means: Sequence[Mapping[str, Mean] | None]) -> bool:
    """Whether the total of two rows is the mean of their totals, or in `fa.Mean.of` twice their sum."""
    first, second, both = (_numbers((found or {}).get(name)) for found in means)
    (a, weight_a), (b, weight_b), (total, _) = first, second, both
    if not weight_a or not weight_b:
        return False
    if (means[0] or {})[name].of_mean:  # each total is a sum times its weight
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
