"""The phase of training that this process is in. The step writes it. Profiles, memory meters and the watchdog
read it.

A process trains in one thread, so there is one mark. A phase lasts until the next one begins: 0.1 us for each
if nobody listens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from types import TracebackType
from typing import Any, TypeVar

from fnaccel import _torch

T = TypeVar("T")

PHASES = (
    "outside",  # code of the script
    "data",  # waiting for a batch
    "forward",
    "backward",
    "gradients",  # waiting for the gradients and totals of other ranks
    "update",
    "captured step",  # forward, backward and update as one program
    "compile",
    "evaluate",
    "init",
    "save",
    "restore",
)
"""All phases. Their order is the numbering of the watchdog's records."""


class Mark:
    """Where this process is.

    Attributes:
        phase: one of `PHASES`.
        step: the number of the step that runs, or that runs next.
        micro_batch: its micro-batch.
        stage: the stage of a pipeline whose forward or backward it is, or -1.
        first: whether this is the first step of its train step, which may compile and build for minutes.
        of: the name of its train step.
        shares: whether all other ranks take part in the step, so that ranks wait for each other.
    """

    __slots__ = ("first", "micro_batch", "of", "phase", "shares", "stage", "step")

    def __init__(self) -> None:
        self.phase = "outside"
        self.step = 0
        self.micro_batch = 0
        self.stage = -1
        self.first = True
        self.of = ""
        self.shares = False

    def __str__(self) -> str:
        return place(self.step, self.phase, self.micro_batch, self.stage)


STAGE = ", stage "
"""What is between a phase and its stage."""


def place(step: int, phase: str, micro_batch: int, stage: int = -1) -> str:
    """A place in training, as `"step 5, backward, micro-batch 1"`, with the stage if it is of one."""
    part = f", micro-batch {micro_batch}" if phase in ("forward", "backward") else ""
    return f"step {step}, {phase}{part}{f'{STAGE}{stage}' if stage >= 0 else ''}"


NOW = Mark()
"""The mark of this process."""

Listener = Callable[[Mark], None]

_listeners: list[Listener] = []


def enter(phase: str, micro_batch: int = 0, stage: int = -1) -> None:
    """Begin a phase of a step, and end the one before it. Profiles and messages of hangs name it.

    Args:
        phase: one of `PHASES`.
        micro_batch: of a forward or a backward.
        stage: of a pipeline, if only this one runs. Else -1.

    Example:
        >>> from fnaccel.extend import enter
        >>> from fnaccel.world.progress_marks import NOW
        >>> enter("backward", 3, stage=1)
        >>> NOW.phase, NOW.micro_batch, NOW.stage
        ('backward', 3, 1)
        >>> enter("outside")
    """
    NOW.phase = phase
    NOW.micro_batch = micro_batch
    NOW.stage = stage
    for listener in _listeners:
        listener(NOW)


def enter_step(step: int, of: str, *, first: bool, shares: bool) -> None:
    """Begin a step. Its phases are entered one by one."""
    if _begin_compilation not in _told and "torch._dynamo.callback" in sys.modules:  # slow to import
        mark_compilations()
    NOW.step, NOW.of, NOW.first, NOW.shares = step, of, first, shares


WAITS = "waits for "
"""How a note begins if what it notes waits for another rank."""

NOTED: list[Callable[[str], None]] = []
"""Functions that hear what this process does within its phase, with other ranks."""


def note(what: str) -> None:
    """Note what this process begins within its phase: a unit that it gathers, or a call inside of a step.

    Args:
        what: the predicate of a sentence. `"waits for "` and what it waits for says that another rank is to
            blame if this one hangs. The next note ends that.

    Example:
        >>> from fnaccel.extend import note
        >>> note("waits for stage 2")
        >>> note("runs stage 3")
    """
    for listener in NOTED:
        listener(what)


_compiling = ExitStack()
_told: list[Callable[[Any], None]] = []
"""The functions that torch calls as a compilation begins."""


def mark_compilations() -> None:
    """From now on the phase is `compile` while torch compiles, whichever phase it does so in.

    `torch.compiler.reset()` ends that, so each step looks.
    """
    global _told
    _told = _torch.on_compilation(_begin_compilation, _end_compilation)


def _begin_compilation(_: object) -> None:
    _compiling.enter_context(within("compile"))


def _end_compilation(_: object) -> None:
    _compiling.close()


def leave_step(step: int) -> None:
    """End a step. `step` is the number of the next one."""
    NOW.step, NOW.first = step, False
    enter("outside")


class within(ContextDecorator):  # noqa: N801 - a context, read as a word
    """In the body, or in each call of a function, the phase is `phase`, and afterwards that of before."""

    __slots__ = ("_before", "_phase")

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def _recreate_cm(self) -> within:  # each call of a decorated function has a context of its own
        return within(self._phase)

    def __enter__(self) -> None:
        self._before = NOW.phase, NOW.micro_batch, NOW.stage
        enter(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        enter(*self._before)


class waiting(Iterator[T]):  # noqa: N801 - a function, read as a word
    """The items. The phase is `phase` while one is waited for.

    No generator: one that is dropped runs its `finally`, and Python swallows a Ctrl-C in it.
    """

    def __init__(self, items: Iterator[T], phase: str = "data") -> None:
        self._items = items
        self._waits = within(phase)

    def __next__(self) -> T:
        with self._waits:
            return next(self._items)

    def close(self) -> None:
        """Close the items, if they can be closed."""
        getattr(self._items, "close", lambda: None)()


class listening(AbstractContextManager[None]):  # noqa: N801 - a context, read as a word
    """In the body `listener` gets the mark at the beginning of each phase, in the thread that trains."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        _listeners.append(self._listener)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _listeners.remove(self._listener)
