"""`python -m fnaccel.cli.benching.measuring FOLDER TASK`: one rank of one scope, started by the launcher."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch

import fnaccel as fa
from fnaccel import _torch, tree
from fnaccel.cli.benching.answer import EAGER, Failed, Measured, Task, failure_of, write_answer
from fnaccel.collectives import gather_objects
from fnaccel.config import Recipe, apply, from_yaml
from fnaccel.config.applying import make_optimizer
from fnaccel.config.references import load
from fnaccel.data.batch import Window
from fnaccel.data.cut import cut, rows_of, split_sizes
from fnaccel.errors import ConfigError, FnaccelError, require
from fnaccel.extend import Mesh
from fnaccel.step.step import Step, as_step
from fnaccel.strategies import distribute
from fnaccel.tree import Tree
from fnaccel.world.random_streams import generators_of, reseed
from fnaccel.world.world import World

_WHERE = "fnaccel bench"
_WARM_UPS = 3
"""Steps between the first step and the timed steps. Their losses and the first step's are compared."""


def main(folder: Path, task: Task) -> int:
    """Measure a task, and write the answer of this rank into the folder. Returns the exit code."""
    with fa.start() as world:
        setup = True
        try:
            subject = find_subject(task)
            setup = False
            answer = measure(subject, task.scope, task.steps, world)
        except Exception as error:
            answer = failure_of(error, setup=setup)
        if world.is_main or isinstance(answer, Failed):
            write_answer(folder, answer, world.rank)
        return int(isinstance(answer, Failed))


@attrs.frozen(kw_only=True)
class Subject:
    """A step without `compile`, the model it trains, the batch of all ranks, and the recipe."""

    step: Step
    model: Any
    batch: Any
    recipe: Recipe


def find_subject(task: Task) -> Subject:
    """Import the references of a task.

    Raises:
        FnaccelError: a reference has no target, or a target of another kind.
    """
    reseed(0)  # if the batch is random, all processes draw the same
    recipe = from_yaml(task.recipe)
    make_optimizer(recipe.optimizer)
    step = as_step(_imported(task.loss, "LOSS"), f"{_WHERE} {task.loss}")
    require(
        step.settings.compiler is None,
        "this step says how it is compiled, and bench compares the ways to compile it",
        f"{_WHERE} {task.loss}",
        "give the step without fa.compile",
    )
    model = _imported(task.model, "--model")
    distribute(model, recipe.strategy)
    where = f"{_WHERE} --batch {task.batch}"
    batch = first_batch(_imported(task.batch, "--batch"), where)
    return Subject(step=step, model=model, batch=batch, recipe=recipe)


def first_batch(source: object, where: str) -> Any:
    """A pytree of tensors itself, the result of a function, or the first batch of an iterable.

    Raises:
        ArgumentError: the batch has no tensor.
    """
    if not _holds_tensors(source) and callable(source):
        source = _called(cast("Callable[[], Any]", source), where)
    if not _holds_tensors(source) and isinstance(source, Iterable) and not isinstance(source, str | Mapping):
        source = _called(lambda: next(iter(cast("Iterable[Any]", source)), None), where)
    require(
        _holds_tensors(source),
        f"there is no tensor in this batch: {type(source).__name__}",
        where,
        "name a pytree of tensors, a function without arguments that returns one, or a DataLoader",
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
    except (Exception, SystemExit) as error:
        what, fix = f"it raised {type(error).__name__}: {error}", "make it run by itself in python"
        if isinstance(error, SystemExit):
            what = f"it ended the process, with code {error.code}"
            fix = "keep what a script runs under `if __name__ == '__main__':`, for it is imported here"
        raise ConfigError(what, where=where, fix=fix) from error


def rows_of_rank(batch: Tree, mesh: Mesh) -> Any:
    """This rank's rows of a global batch. Ranks of `tensor` and `context` share rows.

    Raises:
        ArgumentError: the batch has fewer rows than there are parts.
    """
    if isinstance(batch, Window):
        return Window([rows_of_rank(micro, mesh) for micro in cast("tuple[Any, ...]", batch)])
    parts = mesh.batch_size
    if parts == 1:
        return batch
    where = f"{_WHERE} --batch"
    rows = rows_of(batch, where=where)
    require(
        rows >= parts,
        f"a batch of {rows} rows has none for some of {parts} ranks",
        where,
        f"give {parts} rows or more: the batch is that of all ranks",
    )
    return cut(batch, split_sizes(rows, parts), where=where)[mesh.batch_rank]


def measure(subject: Subject, scope: Any, steps: int, world: World) -> Measured:
    """Train on one batch, and time the steps. All ranks call this, and all get the same peak.

    Raises:
        FnaccelError: the strategy can't do it. Errors of model, loss and compiler pass as they are.
    """
    # before `compile`: some scopes import the compiler at once, and the memory of that import counts
    memory = Memory(world.device)
    step = subject.step if scope == EAGER else fa.compile(subject.step, scope)
    train_step = apply(attrs.evolve(subject.recipe, compile=None), step, subject.model, world=world)
    state = train_step.init(seed=0)
    batch = tree.to(rows_of_rank(subject.batch, train_step.mesh), world.device)
    times: list[float] = []
    losses: list[float] = []
    for number in range(1 + _WARM_UPS + steps):
        _wait(world)
        start = time.perf_counter()
        state, metrics = train_step(state, batch)
        _wait(world)
        times.append(time.perf_counter() - start)
        if number <= _WARM_UPS:
            losses.append(float(metrics["loss"]))
    peak = max(gather_objects(memory.peak(), world=world))
    hits, misses, draws = 0, 0, False
    if scope == EAGER:  # dropout, a module or a function, advances a generator of torch
        micro = batch[0] if isinstance(batch, Window) else batch
        before = _random_states(world)
        train_step.look(state, subject.step.loss_fn, micro, train=True)
        draws = not all(map(torch.equal, before, _random_states(world)))
    else:
        _, hits, misses = _torch.compile_counts()
    return Measured(
        first=times[0], seconds=statistics.median(times[1 + _WARM_UPS :]), peak=peak, losses=losses,
        draws=draws, cache_hits=hits, cache_misses=misses, device=world.device.type,
    )  # fmt: skip


def _wait(world: World) -> None:
    """Wait until the device has finished all queued work."""
    if world.device.type != "cpu":
        torch.accelerator.synchronize()


def _random_states(world: World) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators_of(world.device)]


class Memory:
    """The peak memory from now on: allocated on an accelerator, on the CPU the growth of this process."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            with contextlib.suppress(OSError):  # Linux: reset the peak to the present size
                Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident("VmRSS")
        else:
            torch.accelerator.reset_peak_memory_stats()

    def peak(self) -> float:
        """The peak in MiB."""
        if self._on_cpu:
            return max(0, _resident("VmHWM") - self._before) / 2**20
        return torch.accelerator.max_memory_allocated() / 2**20


def _resident(name: str) -> int:
    """Resident bytes of this process: now (VmRSS) or the peak (VmHWM). Outside Linux always the peak."""
    with contextlib.suppress(OSError):
        line = re.search(rf"^{name}:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        if line is not None:
            return int(line[1]) * 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Task(**json.loads(sys.argv[2]))))
