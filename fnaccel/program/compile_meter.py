"""The cost of compilation for a train step: how often, how long, and for which shapes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.data.micro_batches import MicroBatches
from fnaccel.engine.totals import Question
from fnaccel.errors import ArgumentError, NotCompiledError, RecompileLimitError
from fnaccel.step.settings import Compiler
from fnaccel.world.progress_marks import mark_compilations

_SHOWN = 4


@attrs.frozen(kw_only=True)
class Compilation:
    """The work of `torch.compile` for a train step so far.

    Attributes:
        scope: the compiled part: `"block"`, `"loss"` or `"step"`.
        graphs: graphs captured, those of the first call included.
        recompilations: later calls in which something was compiled again.
        seconds: time of the calls in which something was compiled.
        cache_hits, cache_misses: graphs of inductor (forward and backward apart) that came from the
            cache on disk, and that did not.
        since: with `background=`, the step from which compiled code runs. None before.

    Example:
        >>> step = fa.compile(loss_fn, "loss", backend="aot_eager")
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), batch)
        >>> train_step.compilation.scope, train_step.compilation.graphs
        ('loss', 1)
    """

    scope: str
    graphs: int = 0
    recompilations: int = 0
    seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    since: int | None = None


class Meter:
    """Watches the calls of one train step: see `Compilation`.

    Attributes:
        questions: what ranks ask each other while another process compiles, and steps run uncompiled.
        found: the work so far.
    """

    def __init__(self, settings: Compiler, where: str) -> None:
        self._settings = settings
        self._where = where
        self._called = False
        self._shapes: dict[str, list[str]] = {}
        process = settings.process
        self.questions: tuple[Question, ...] = () if process is None or process.over else (process,)
        self.found = Compilation(scope=settings.scope, since=process.since if process is not None else None)

    def begin(self, step: int, batch: Any) -> None:
        """Raise RecompileLimitError if the step was compiled too often. Nothing was changed."""
        if self.found.recompilations > self._settings.limit:
            raise self._too_often()
        if self.questions:
            process = self._settings.process
            process.begin(step, batch)
            if process.over:
                self.questions = ()
                self.found = attrs.evolve(self.found, since=process.since)

    def close(self) -> None:
        """End the process that compiles, if there is one."""
        if self._settings.process is not None:
            self._settings.process.close()

    @contextlib.contextmanager
    def watch(self, micro_batches: MicroBatches) -> Generator[None]:
        """In the body compiled code may run on these micro-batches.

        Raises:
            ArgumentError: `dynamic=` names dimensions that the batch has not.
            NotCompiledError: torch can't compile it, or found nothing to compile.
            RecompileLimitError: torch gave up compiling again.
        """
        if self.questions:
            yield
            return
        datas = [part.data for part in micro_batches]
        for pattern, dims in self._settings.dims:
            self._mark(datas, pattern, dims)
        if not self._called:  # a step of a process that had not imported dynamo
            mark_compilations()
        before, start = _torch.compile_counts(), time.perf_counter()
        try:
            with _torch.compiling(self._settings.limit):
                yield
        except _torch.compile_errors() as error:
            self._note(datas)
            if "recompile" in type(error).__name__.lower():
                raise self._too_often() from error
            raise NotCompiledError(
                f"torch can't compile this step: {_first_line(error)}",
                where=_last_place(error) or self._where,
                fix="change that line; or fa.compile(step, scope='loss') (under fsdp: 'block'), which "
                "leaves to Python the lines that torch can't compile",
            ) from error
        after = _torch.compile_counts()
        if after[0] > before[0]:
            self._count([b - a for a, b in zip(before, after, strict=True)], time.perf_counter() - start)
            self._note(datas)
        elif not self._called:
            raise NotCompiledError(
                "compile was asked for, and the first call compiled nothing",
                where=self._where,
                fix="look for torch._dynamo.disable or a graph break at once (TORCH_LOGS=graph_breaks), "
                "or remove fa.compile",
            )
        self._called = True

    def _count(self, counts: Sequence[int], seconds: float) -> None:
        graphs, hits, misses = counts
        before = self.found
        self.found = attrs.evolve(
            before,
            graphs=before.graphs + graphs,
            recompilations=before.recompilations + (1 if self._called else 0),
            seconds=before.seconds + seconds,
            cache_hits=before.cache_hits + hits,
            cache_misses=before.cache_misses + misses,
        )

    def _note(self, datas: Sequence[Any]) -> None:
        """Remember the shapes for which something was compiled."""
        shapes = {"number of micro-batches": str(len(datas))}
        for data in datas:
            for path, value in tree.items(data):
                if isinstance(value, torch.Tensor):
                    shapes[path or "batch"] = f"{list(value.shape)} {value.dtype}".replace("torch.", "")
                elif isinstance(value, int | float | str):
                    shapes[path] = repr(value)
        for path, shape in shapes.items():
            seen = self._shapes.setdefault(path, [])
            if shape not in seen:
                seen.append(shape)

    def _mark(self, datas: Sequence[Any], pattern: str, dims: tuple[int, ...]) -> None:
        named = [(path, x) for data in datas for path, x in tree.items(data) if isinstance(x, torch.Tensor)]
        matched = [(path, x) for path, x in named if fnmatchcase(path, pattern)]
        marked = [(x, dim) for _, x in matched for dim in dims if -x.dim() <= dim < x.dim()]
        if not marked:
            raise ArgumentError(
                f"dynamic={{{pattern!r}: {dims}}} names no dimension of the batch",
                where=self._where,
                fix=f"the batch holds {', '.join(sorted({f'{path} {list(x.shape)}' for path, x in named}))}",
            )
        for value, dim in marked:
            _torch.mark_dynamic(value, dim % value.dim())

    def _too_often(self) -> RecompileLimitError:
        changed = [
            f"{path} was {', '.join(shapes[-_SHOWN:])}"
            for path, shapes in self._shapes.items()
            if len(shapes) > 1
        ]
        return RecompileLimitError(
            f"this step was compiled {self.found.recompilations} times more after its first call, and "
            f"{self._settings.limit} are allowed: "
            + ("; ".join(changed) or "no shape changed: a Python value that the loss reads does"),
            where=self._where,
            fix='say which dimensions vary, fa.compile(step, dynamic={"tokens": 1}), or pad batches to a '
            "few shapes; fa.compile(limit=) allows more",
        )


def _last_place(error: BaseException) -> str:
    """The innermost line of the user's code that torch names."""
    _, _, listed = str(error).partition("from user code:")
    places = [line.strip() for line in listed.splitlines() if line.strip().startswith("File ")]
    return places[-1] if places else ""


def _first_line(error: BaseException) -> str:
    """What torch says first. Of an error in a backend that is the error's own line too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith("raised:") else 1])
