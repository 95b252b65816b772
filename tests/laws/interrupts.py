"""Raises KeyboardInterrupt at a chosen line of a step, and looks at what is left; runs inside ranks too."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

import fnaccel as fa
from fnaccel.state import is_stale
from fnaccel.world.world import current
from tests.tiny_models import whole

PACKAGE = str(Path(fa.__file__).parent)
STEPS = 3  # one before the interrupt, the one that is interrupted, one after it
KINDS = {
    "local": ("local", None),
    "local captured": ("local", "step"),
    "ddp": ("ddp(hook='bf16')", None),
    "ddp captured": ("ddp(hook='bf16')", "step"),
    "fsdp": ("fsdp", None),
    "second gradient": ("local", None),
    "schedule-free": ("local", None),
}


class Net(nn.Module):
    """Dropout draws random numbers, batch norm moves buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.tanh(self.norm(self.inp(x)))))


def loss_fn(model: Any, batch: Any) -> fa.Mean:
    x, y = batch
    return fa.Mean(((model(x) - y) ** 2).sum(), weight=len(y))


def _second(grads: Any, own: Any, info: Any) -> Any:
    with torch.no_grad():
        return info.gradients_at({name: info.params[name] + 0.1 * grad for name, grad in grads.items()}), own


ascended = fa.Transform("ascended", fa.Phase.GRADS, apply=_second, needs="second gradient")
"""Sharpness-aware minimisation without the norm."""


def built(kind: str, model: Any = Net) -> Any:
    """A train step with most of what a step can hold."""
    strategy, scope = KINDS[kind]
    loss = ascended(loss_fn) if kind == "second gradient" else loss_fn
    step = fa.with_ema(fa.skip_nonfinite(fa.clip_norm(fa.accumulate(loss, 2), 0.5)), 0.9)
    if scope is not None:
        step = fa.compile(step, scope, backend="eager")
    optimizer: Any = fa.adamw(fa.schedules.cosine(0.1, 10))
    if kind == "schedule-free":
        optimizer = fa.optim.from_torch(AdamWScheduleFree, lr=0.1)
    return fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer)


def begun(kind: str) -> Any:
    """A train step, and its first state."""
    train_step = built(kind)
    return train_step, train_step.init(seed=0, extras={"mine": 1})


def batch(call: int) -> Any:
    generator = torch.Generator().manual_seed(10 * call + current().rank)
    x = torch.randn(8, 3, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def values(state: Any) -> dict[str, Any]:
    """All that a state holds, by path."""
    return {path: whole(x) if isinstance(x, torch.Tensor) else x for path, x in fa.tree.items(state)}


def differs(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [
        path
        for path in first.keys() | second.keys()
        if path not in first or path not in second or not _equal(first[path], second[path])
    ]


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class TimeIsUp(Exception):  # noqa: N818 - no error of the program
    """Of a handler of SIGALRM."""


class Interrupter:
    """Counts the lines of the package that run in its body, and raises at one of them.

    Args:
        at: the number of the line. None: none.
        signals: send so many SIGINTs, one at each line from there on, in the place of raising. -1: raise a
            TimeIsUp, as the handler of a SIGALRM does, which nothing holds back.
    """

    def __init__(self, at: int | None, signals: int = 0) -> None:
        self.at = at
        self.signals = signals
        self.lines = 0
        self.place = ""
        self.left = False  # whether another handler of SIGINT is there at the end

    def __enter__(self) -> Interrupter:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a pool's ranks ignore it
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self.left = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.at is not None and 0 <= self.lines - self.at < max(self.signals, 1):
                self.place = self.place or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                if self.signals < 0:
                    raise TimeIsUp
                held = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                if not self.signals and not held:  # a Ctrl-C would wait there
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return self._line


@attrs.frozen
class Outcome:
    """What an interrupt left: "live", "following" (the next state is live) or "dead"; `wrong` should be empty."""

    kind: str
    place: str
    wrong: list[str]


def reference(kind: str) -> list[dict[str, Any]]:
    """The states of a run that is not interrupted, from the first on."""
    train_step, state = begun(kind)
    seen = [values(state)]
    for call in range(STEPS):
        state, _ = train_step(state, batch(call))
        seen.append(values(state))
    train_step.close()
    return seen


def count_lines(kind: str) -> int:
    """The lines of the package that the second step runs."""
    train_step, state = begun(kind)
    state, _ = train_step(state, batch(0))
    with Interrupter(None) as interrupter:
        state, _ = train_step(state, batch(1))
    train_step.close()
    return interrupter.lines


def interrupt(kind: str, at: int, expected: list[dict[str, Any]], signals: int = 0) -> Outcome:
    """Interrupt the second step at a line, go on from what is live (or from a snapshot), compare to the bit."""
    train_step, state = begun(kind)
    state, _ = train_step(state, batch(0))
    before = fa.snapshot(state)
    generator = torch.random.get_rng_state()
    interrupter = Interrupter(at, signals)
    try:
        with interrupter:
            train_step(state, batch(1))
    except KeyboardInterrupt:
        pass
    wrong = [] if torch.equal(generator, torch.random.get_rng_state()) else ["torch's generator"]
    live = train_step.live_state
    if live is None:
        outcome = "dead"
        wrong += [] if is_stale(state) else ["a live state that live_state does not return"]
        live = train_step.adopt(before)
    else:
        outcome = "live" if live is state else "following"
    wrong += differs(values(live), expected[live.step])
    while live.step < STEPS:
        live, _ = train_step(live, batch(live.step))
    wrong += differs(values(live), expected[STEPS])
    train_step.close()
    return Outcome(outcome, interrupter.place, wrong)


def interrupt_many(kind: str, first: int, stride: int, signals: int = 0) -> list[Outcome]:
    """`interrupt` at every `stride`-th line of the second step, from `first` on."""
    expected = reference(kind)
    return [interrupt(kind, at, expected, signals) for at in range(first, count_lines(kind) + 1, stride)]
