"""The subject of a measurement: a loss function, a model and one batch, imported from their references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import attrs
import torch

from fnaccel import tree
from fnaccel.benching.task import Task
from fnaccel.config import Recipe, from_yaml
from fnaccel.config.apply import make_optimizer
from fnaccel.config.references import load
from fnaccel.data.batch import Window
from fnaccel.data.cut import cut, rows_of
from fnaccel.data.seeding import reseed
from fnaccel.errors import ArgumentError, ConfigError, FnaccelError
from fnaccel.step.step import Step, as_step
from fnaccel.strategies import distribute
from fnaccel.tree import Tree
from fnaccel.world.world import World

_WHERE = "fnaccel bench"


@attrs.frozen(kw_only=True)
class Subject:
    """A step without `compile`, the model it trains, this rank's rows of the batch, and the recipe."""

    step: Step
    model: Any
    batch: Any
    recipe: Recipe


def find_subject(task: Task, world: World) -> Subject:
    """Import the references of a task, and take this rank's rows of the batch.

    Raises:
        FnaccelError: a reference has no target, or a target of another kind.
    """
    reseed(0)  # if the batch is random, all processes draw the same
    recipe = from_yaml(task.recipe)
    make_optimizer(recipe.optimizer)
    step = as_step(_imported(task.loss, "LOSS"), f"{_WHERE} {task.loss}")
    if step.settings.compiler is not None:
        raise ArgumentError(
            "this step says how it is compiled, and bench compares the ways to compile it",
            where=f"{_WHERE} {task.loss}",
            fix="give the step without fa.compile",
        )
    model = _imported(task.model, "--model")
    distribute(model, recipe.strategy)
    batch = first_batch(_imported(task.batch, "--batch"), f"{_WHERE} --batch {task.batch}")
    part = _of_rank(batch, world, f"{_WHERE} --batch {task.batch}")
    return Subject(step=step, model=model, batch=tree.to(part, world.device), recipe=recipe)


def first_batch(source: object, where: str) -> Any:
    """One batch: a pytree of tensors itself, the result of a function, or the first batch of an iterable.

    Args:
        source: a pytree of tensors, a function or an iterable. The function may return an iterable.
        where: the caller's name for error messages.

    Raises:
        ArgumentError: the batch has no tensor.

    Example:
        >>> sorted(first_batch(loader, "--batch"))
        ['labels', 'tokens']
    """
    if _holds_tensors(source):
        return source
    if callable(source):
        source = _called(cast("Callable[[], Any]", source), where)
    if not _holds_tensors(source) and isinstance(source, Iterable) and not isinstance(source, str | Mapping):
        source = _called(lambda: next(iter(cast("Iterable[Any]", source)), None), where)
    if not _holds_tensors(source):
        raise ArgumentError(
            f"there is no tensor in this batch: {type(source).__name__}",
            where=where,
            fix="name a pytree of tensors, a function without arguments that returns one, or a DataLoader",
        )
    return source


def _holds_tensors(value: Tree) -> bool:
    tree.learn(value)
    return any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(value))


def _imported(reference: str, option: str) -> Any:
    return _called(lambda: load(reference, f"{_WHERE} {option}"), f"{_WHERE} {option} {reference}")


def _called(fn: Callable[[], Any], where: str) -> Any:
    """Call the user's code. Its errors become a `ConfigError` that names the reference."""
    try:
        return fn()
    except FnaccelError:
        raise
    except SystemExit as stop:
        raise ConfigError(
            f"it ended the process, with code {stop.code}",
            where=where,
            fix="keep what a script runs under `if __name__ == '__main__':`, for it is imported here",
        ) from stop
    except Exception as error:
        raise ConfigError(
            f"it raised {type(error).__name__}: {error}", where=where, fix="make it run by itself in python"
        ) from error


def _of_rank(batch: Tree, world: World, where: str) -> Any:
    """This rank's rows of a global batch."""
    if isinstance(batch, Window):
        return Window([_of_rank(micro, world, where) for micro in cast("tuple[Any, ...]", batch)])
    if world.size == 1:
        return batch
    rows = rows_of(batch, where=where)
    share, more = divmod(rows, world.size)
    if share == 0:
        raise ArgumentError(
            f"a batch of {rows} rows has none for some of {world.size} ranks",
            where=where,
            fix=f"give {world.size} rows or more: the batch is that of all ranks",
        )
    return cut(batch, [share + (rank < more) for rank in range(world.size)], where=where)[world.rank]
