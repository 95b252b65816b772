"""A check of totals and weights before the first update: one row, and that row twice.

`fa.Mean` takes a sum and its weight. A mean in the place of the sum trains with gradients that are too small
by the number of rows, and nothing else shows it. If a row is given twice, its sum doubles and its mean stays.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch

from fnaccel import tree
from fnaccel.collectives import broadcast_objects
from fnaccel.data.cut import join, rows_of
from fnaccel.errors import LossError
from fnaccel.models.module_modes import ModuleModes
from fnaccel.program.lent_models import Given
from fnaccel.program.lower import Lowered
from fnaccel.program.owned import Owned
from fnaccel.program.plan import title
from fnaccel.program.probe import is_split, short
from fnaccel.program.put_back import put_back
from fnaccel.program.whole_parameters import is_sharded
from fnaccel.step.loss import Mean, read_loss
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh

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
    owned: Owned,
    lowered: Lowered,
    run: Callable[..., Any],
    function: Callable[..., Any],
    batch: Tree,
    lent: Given | None,
) -> None:
    """Check the loss and its aux: see `_check`.

    Args:
        owned: the engine and its modules.
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

    _check(owned, run, function, batch, parts, lent)


def check_metrics(owned: Owned, run: Callable[..., Any], function: Callable[..., Any], batch: Tree) -> None:
    """Check the result of a metric function: see `_check`."""
    _check(owned, run, function, batch, lambda output, _: output, None)


def _check(
    owned: Owned,
    run: Callable[..., Any],
    function: Callable[..., Any],
    batch: Tree,
    parts: Callable[[Any, Tree], Any],
    lent: Given | None,
) -> None:
    """Compare the totals and weights of one row with those of that row twice, once for each function.

    What raises is left alone, since the step itself raises then. So is a function on a runtime or on XLA.

    Raises:
        LossError: a total is a mean, or the mean of `fa.Mean.of` is a total.
    """
    world, code = owned.engine.layout.mesh.world, getattr(function, "__code__", function)
    left_alone = (
        owned.engine.runtime.native is not None or world.device.type == "xla" or world.backend == "fake"
    )
    if left_alone or code in owned.checked:
        return
    try:
        lenders = () if lent is None else lent.engines
        sharded = owned.sharded or any(is_sharded(each.layout.parameters.values()) for each in lenders)
        pair = _pair(batch, owned.engine.layout.mesh, communicates=sharded)
    except Exception:  # a batch of a class that nothing joins, or that does not pickle
        owned.checked.add(code)
        return
    results: list[dict[str, Mean]] = []
    with _evaluating(owned, lent):
        for rows in pair:
            output = _outcome(owned, run, function, rows, parts, lent)
            if output is None:
                owned.checked.add(code)
                return
            results.append(output)
    for name, one in results[0].items():
        if name in results[1]:
            _compare(name, one, results[1][name], title(function), rows_of(batch))
    owned.checked.add(code)


@contextlib.contextmanager
def _evaluating(owned: Owned, lent: Given | None) -> Generator[None]:
    """In the body all modules are in evaluation mode, and compiled functions run as they are written."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(owned.modes.during(training=False))
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
    owned: Owned,
    run: Callable[..., Any],
    function: Callable[..., Any],
    rows: Tree,
    parts: Callable[[Any, Tree], Any],
    lent: Given | None,
) -> dict[str, Mean] | None:
    """Each `fa.Mean` that the function returns, by its path. None if it raises."""

    def look() -> Any:
        return owned.engine.look(run, rows, *(() if lent is None else (lent.models,)))

    layout = owned.engine.layout
    others = () if lent is None else (m for engine in lent.engines for m in engine.layout.modules)
    owned.moving_buffers.begin()
    with put_back([function, *others], layout.modules, layout.mesh.world.device):
        try:
            output = parts(look() if lent is None else lent.within(look), rows)
            leaves = tree.items(output, is_leaf=lambda node: isinstance(node, Mean))
            return {path: leaf for path, leaf in leaves if isinstance(leaf, Mean)}
        except Exception:
            return None
        finally:
            owned.moving_buffers.put_back()


def _pair(batch: Tree, mesh: Mesh, *, communicates: bool) -> tuple[Tree, Tree]:
    """A row, and that row twice: rank 0's if a forward communicates, so that all ranks raise or none."""
    row = join([short(batch)])  # a copy: a loss may change its batch
    if communicates or is_split(mesh):
        row = tree.to(broadcast_objects(row, world=mesh.world), mesh.world.device)
    return row, join([row, row])


def _compare(name: str, one: Mean, two: Mean, where: str, rows: int) -> None:
    total, weight, total_2, weight_2 = map(_number, (one.total, one.weight, two.total, two.weight))
    finite = all(map(math.isfinite, (total, weight, total_2, weight_2)))
    if not finite or not total or not weight or not _close(weight_2, 2 * weight):
        return
    mean = not one.of_mean and _close(total_2, total)
    if mean or (one.of_mean and _close(total_2, 4 * total)):
        times = f"{rows * weight:g} times" if rows > 1 else "as many times as there are rows"
        text = (_MEAN_FOR_A_TOTAL if mean else _TOTAL_FOR_A_MEAN).format(
            what=_described(name), value=total, times=times
        )
        fix = "fa.Mean.of(mean, n), or a sum: reduction='sum'" if mean else "fa.Mean(total, weight=n)"
        if name == _OF_WEIGHT_FN:
            fix = "return a sum: reduction='sum'; or for a mean, fa.with_weight(step, lambda batch: 1)"
        raise LossError(text, where=where, fix=fix)


def _described(path: str) -> str:
    return path or "the result"


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= _TOLERANCE * abs(expected)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
