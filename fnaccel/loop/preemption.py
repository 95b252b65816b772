"""`preemption`: a signal to any rank lets all ranks end together, after the same step.

Only signals and their handlers live here. `Notice` carries the stop request between ranks, and
`scan(..., save=)` does the saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator, Iterable
from typing import Any

import torch.distributed as dist

from fnaccel.engine.stop_request import Notice
from fnaccel.errors import UnknownNameError, nearest
from fnaccel.program.train_step import TrainStep

SIGNALS = tuple(name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""The signals that schedulers send before they end a job, if the platform has them."""


@contextlib.contextmanager
def preemption(*train_steps: TrainStep, signals: Iterable[str] = SIGNALS) -> Generator[Notice]:
    """Catch signals in the body, and let all ranks know of one after the same step.

    For a loop of your own: `fa.scan(..., save=)` does this by itself. The ranks tell each other
    in the all-reduce that each call of a train step makes anyway. The handlers from before are put
    back at the end. A signal that came too late for the ranks to agree on is then sent again.

    Args:
        train_steps: the train steps that the body calls. Ranks agree in a call of any of them.
        signals: names of signals, or none if other code handles them. Only the main thread can catch any.

    Returns:
        A context manager that gives a `Notice`: `notice.stopping` is equal on all ranks after each
        call (on accelerators it tells of the call before, so that no step waits for it).

    Raises:
        UnknownNameError: the platform has no such signal.

    Example:
        >>> with fa.preemption(train_step) as notice:
        ...     for batch in batches:
        ...         state, metrics = train_step(state, batch)
        ...         if notice.stopping:
        ...             raise fa.errors.Preempted(state.step, fa.save("runs/gpt", state))
    """
    numbers = [_number(name) for name in signals]
    beyond = any(train_step.mesh.loss_size != train_step.mesh.world.size for train_step in train_steps)
    notice = Notice(dist.group.WORLD if beyond else None)
    before = [train_step.notice for train_step in train_steps]
    for train_step in train_steps:
        train_step.notice = notice
    try:
        with _caught(numbers, notice):
            yield notice
    finally:
        for train_step, its in zip(train_steps, before, strict=True):
            train_step.notice = its


def _number(name: str) -> signal.Signals:
    names = [member.name for member in signal.Signals]
    if name not in names:
        raise UnknownNameError(
            f"there is no signal {name!r} here", where="fa.preemption", fix=nearest(str(name), names)
        )
    return signal.Signals[name]


@contextlib.contextmanager
def _caught(numbers: Iterable[signal.Signals], notice: Notice) -> Generator[None]:
    """Install handlers, and put back the earlier handlers. Only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[signal.Signals] = []
    pid = os.getpid()
    previous: dict[signal.Signals, Any] = {}

    def handle(number: int, _: object) -> None:
        if os.getpid() != pid:  # a child that was forked meanwhile: it ends as it would have
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)
            return
        late.append(signal.Signals(number))
        notice.ask()

    # None: a handler that Python has not set, and could not put back
    previous.update(
        {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    )
    failed = left = False
    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    except GeneratorExit:  # the loop was left: nobody will act on the signal
        left = True
        raise
    except BaseException:
        failed = True
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if late and not failed and (left or not notice.stopping):
            signal.raise_signal(late[0])
