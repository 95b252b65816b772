"""`profile`: traces of some steps by torch.profiler, with the phases of each step."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity

from fnaccel._torch import profiler_is_on
from fnaccel.errors import ArgumentError, UnknownNameError, nearest, require
from fnaccel.world.paths import local_path
from fnaccel.world.progress_marks import NOW, STAGE, Mark, listening
from fnaccel.world.world import find_current

PHASE = "fnaccel."
"""How the name of a phase begins in a trace."""

_logger = logging.getLogger("fnaccel")
_running: list[Profile] = []
Activity = Literal["cpu", "cuda", "xpu", "mtia", "hpu", "privateuse1"]
_ACTIVITIES = {kind.name.lower(): kind for kind in ProfilerActivity.__members__.values()}


class Profile(AbstractContextManager["Profile"]):
    """A context in which some steps are recorded. `fa.profile` makes it.

    Attributes:
        files: the traces that this rank has written.
        recorded: the number of cycles that were recorded.

    Example:
        >>> with fa.profile("trace", wait=0, active=1) as profile:
        ...     for state, metrics in fa.scan(train_step, state, fa.shard(loader)):
        ...         pass
        >>> [path.name for path in profile.files]
        ['rank0.2.pt.trace.json.gz']
    """

    def __init__(
        self,
        directory: Path,
        schedule: Callable[[int], torch.profiler.ProfilerAction],
        on_trace_ready: Callable[[Any], object] | None,
        options: dict[str, Any],
    ) -> None:
        self.directory = directory
        self.files: list[Path] = []
        self.recorded = 0
        self._schedule = schedule
        self._own = on_trace_ready
        self._options = options
        self._stack = ExitStack()
        self._profiler: Any = None
        self._range: Any = None
        self._newest = 0
        self._steps = 0

    def __enter__(self) -> Profile:
        """Begin. Steps are counted from here.

        Raises:
            ArgumentError: another profile is running, of this function or of torch.
            OSError: the directory can't be made.
        """
        # two profilers of torch at once end the process by SIGSEGV
        if _running or profiler_is_on():
            raise ArgumentError(
                "another profile is running: torch.profiler has one in a process",
                where="fa.profile",
                fix="end the other one first, or record these steps by it",
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._newest, self._steps = NOW.step, 0
        with ExitStack() as stack:
            self._profiler = torch.profiler.profile(
                schedule=self._schedule, on_trace_ready=self._write, **self._options
            )
            _running.append(self)
            stack.callback(self._end)
            stack.enter_context(self._profiler)
            stack.callback(self._leave)
            stack.enter_context(listening(self._enter))
            self._enter(NOW)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        steps = self._steps
        self._stack.close()
        if not self.recorded and error is None:
            warnings.warn(
                f"the profile of {self.directory} recorded nothing: {steps} steps ran, and "
                "skip_first=, wait= and warmup= come first",
                RuntimeWarning,
                stacklevel=2,
            )

    def _end(self) -> None:
        self._profiler = None
        _running.remove(self)

    def step(self) -> None:
        """End a step of a loop without a train step. `train_step` does it by itself.

        Raises:
            ArgumentError: the profile is not running.
        """
        require(
            self._profiler is not None,
            "the profile is not running",
            "fa.profile(...).step",
            "with fa.profile(directory) as profile: ... profile.step()",
        )
        self._steps += 1
        with warnings.catch_warnings():
            # each cycle is a file of its own, as torch warns
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profiler.step()

    def _enter(self, mark: Mark) -> None:
        self._leave()
        if mark.phase == "outside" and mark.step != self._newest:
            self._newest = mark.step
            self.step()
        stage = f"{STAGE}{mark.stage}" if mark.stage >= 0 else ""
        self._range = torch.profiler.record_function(f"{PHASE}{mark.phase}{stage}")
        self._range.__enter__()

    def _leave(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self, profiler: torch.profiler.profile) -> None:
        self.recorded += 1
        try:
            if self._own is None:
                self._export(profiler)
            else:
                self._own(profiler)
        except Exception:  # a full disk is no reason to end a run
            _logger.exception("a trace of step %d was not written; training goes on", self._steps)

    def _export(self, profiler: torch.profiler.profile) -> None:
        world = find_current()
        rank = 0 if world is None else world.rank
        # the names that TensorBoard's profiler page looks for
        path = self.directory / f"rank{rank}.{self._steps}.pt.trace.json.gz"
        profiler.export_chrome_trace(os.fspath(path))
        self.files.append(path)


def profile(
    directory: str | os.PathLike[str],
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    repeat: int = 1,
    skip_first: int = 0,
    memory: bool = False,
    shapes: bool = False,
    stacks: bool = False,
    flops: bool = False,
    modules: bool = False,
    activities: Activity | Iterable[Activity] | None = None,
    on_trace_ready: Callable[[Any], object] | None = None,
) -> Profile:
    """Record some steps by torch.profiler, on every rank, with the phases of each step as named ranges.

    A context around a loop, or an argument: `fa.Watch(profile=fa.profile(directory))`. Calls of `train_step`
    are the steps. Each rank writes a Chrome trace for each cycle, `rank0.5.pt.trace.json.gz`, for Perfetto,
    TensorBoard, and `fnaccel trace summarize DIRECTORY`. In it phases are called `fnaccel.forward` and so on.

    Args:
        directory: of the traces. It is made if it is missing.
        wait, warmup, active: a cycle: steps that are not recorded, steps recorded and thrown away (the first
            ones of a recording are slow), and steps that are kept.
        repeat: the number of cycles. 0: to the end of the run.
        skip_first: steps before the first cycle. Compilation is in the first step.
        memory: record allocations.
        shapes: record the shapes of arguments.
        stacks: record the lines of the script. Slow.
        flops: estimate floating-point operations of matrix products and convolutions.
        modules: record the names of modules. For TorchScript models only, says torch.
        activities: `"cpu"`, `"cuda"`, `"xpu"` or several. By default those that this machine has.
        on_trace_ready: called with the `torch.profiler.profile` after each cycle. No file is written then.
            An error in it is logged, and training goes on.

    Raises:
        ArgumentError: a negative count, `active` below 1, no path, or no function.
        UnknownNameError: no such activity.

    Source: https://docs.pytorch.org/docs/stable/profiler.html

    Example:
        >>> profile = fa.profile("trace", wait=0, active=1)
        >>> watch = fa.Watch(profile=profile)
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), watch=watch):
        ...     pass
        >>> [summary.rank for summary in fa.seeing.summarize("trace")]
        [0]
    """
    counts = {"wait": wait, "warmup": warmup, "repeat": repeat, "skip_first": skip_first, "active": active}
    bad = {
        name: count
        for name, count in counts.items()
        if type(count) is not int or count < (1 if name == "active" else 0)
    }
    require(not bad, f"{bad}", "fa.profile", "counts of steps, with active of 1 or more")
    folder = local_path(directory, "fa.profile")
    require(
        on_trace_ready is None or callable(on_trace_ready),
        f"on_trace_ready={on_trace_ready!r}",
        "fa.profile",
        "a function of the torch.profiler.profile",
    )
    with warnings.catch_warnings():
        # a cycle without warmup is a choice of the caller
        warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
        schedule = torch.profiler.schedule(**counts)
    options: dict[str, Any] = {
        "profile_memory": memory,
        "record_shapes": shapes,
        "with_stack": stacks,
        "with_flops": flops,
        "with_modules": modules,
        "activities": _named(activities),
    }
    return Profile(folder, schedule, on_trace_ready, options)


def _named(activities: str | Iterable[str] | None) -> list[ProfilerActivity]:
    if activities is None:
        return list(torch.profiler.supported_activities())
    names = [activities] if isinstance(activities, str) else list(activities)
    require(bool(names), "activities=[] records nothing", "fa.profile", 'activities="cpu"')
    unknown = [name for name in names if name not in _ACTIVITIES]
    if unknown:
        raise UnknownNameError(
            f"no activity is called {unknown[0]!r}",
            where="fa.profile(activities=)",
            fix=nearest(unknown[0], _ACTIVITIES),
        )
    return [_ACTIVITIES[name] for name in names]
