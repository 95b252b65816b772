"""Raises KeyboardInterrupt at a chosen line of `init`, `scan`, `save` or `restore`, and looks at what is left."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.state import is_stale
from fnaccel.world.world import current
from tests.laws.interrupts import (
    STEPS,
    Interrupter,
    Net,
    Outcome,
    TimeIsUp,
    batch,
    begun,
    built,
    differs,
    loss_fn,
    values,
)

EXTRAS = {"mine": 1}


def shards() -> Any:
    x = torch.randn(8 * STEPS * current().size, 3, generator=torch.Generator().manual_seed(4))
    return fa.shard(
        DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True).sin()), batch_size=8, shuffle=True)
    )


class Case:
    """One call on a train step: what comes before it, the call itself, and what must hold after its interrupt.

    Attributes:
        wrong: what does not hold.
        kind: "live" if the state of before is live, "following" if the result is, or "dead".
    """

    def __init__(self, of: str, folder: Path) -> None:
        self.of, self.folder = of, folder
        self.wrong: list[str] = []
        self.kind = "live"

    def see(self, state: Any, expected: Any) -> None:
        self.wrong += differs(values(state), expected)

    def goes_on(self, train_step: Any, state: Any, expected: list[Any]) -> None:
        while state.step < STEPS:
            state, _ = train_step(state, batch(state.step))
        self.see(state, expected[STEPS])


@contextmanager
def init(case: Case, expected: list[Any]) -> Generator[Callable[[], Any]]:
    """A train step whose `init` was interrupted can be initialised, and is as any other."""
    train_step = built(case.of)
    yield lambda: train_step.init(seed=0, extras=EXTRAS)
    state = train_step.live_state
    case.kind = "dead" if state is None else "following"
    if state is None:
        state = train_step.init(seed=0, extras=EXTRAS)
    case.see(state, expected[0])
    case.goes_on(train_step, state, expected)
    train_step.close()


@contextmanager
def save(case: Case, expected: list[Any]) -> Generator[Callable[[], Any]]:
    """The state stays live. A checkpoint is there as a whole or not at all, and the next save is."""
    train_step, state = begun(case.of)
    state, _ = train_step(state, batch(0))
    yield lambda: fa.save(case.folder, state)
    case.wrong += [] if train_step.live_state is state else ["the state is not live"]
    case.see(state, expected[1])
    if fa.checkpoint.checkpoints(case.folder):
        case.kind = "following"
        case.see(fa.restore(case.folder, like=fa.snapshot(state), verify=True), expected[1])
    state, _ = train_step(state, batch(1))
    fa.save(case.folder, state)
    case.see(fa.restore(case.folder, like=fa.snapshot(state), verify=True), expected[2])
    case.goes_on(train_step, state, expected)
    train_step.close()


@contextmanager
def restore(case: Case, expected: list[Any]) -> Generator[Callable[[], Any]]:
    """The state is as it was, as it is restored, or stale: then a new one takes its place."""
    train_step, state = begun(case.of)
    state, _ = train_step(state, batch(0))
    fa.save(case.folder, state)
    state, _ = train_step(state, batch(1))
    yield lambda: fa.restore(case.folder, like=state)
    live = train_step.live_state
    if live is None:
        case.kind = "dead"
        case.wrong += [] if is_stale(state) else ["a live state that live_state does not return"]
        live = fa.resume_or_init(case.folder, train_step)
    elif live is not state:
        case.kind = "following"
    case.see(live, expected[live.step])
    if live.step == STEPS - 1:
        live = fa.restore(case.folder, like=live)
    case.see(live, expected[1])
    case.goes_on(train_step, live, expected)
    train_step.close()


@contextmanager
def scan(case: Case, expected: list[Any]) -> Generator[Callable[[], Any]]:
    """The next `scan` goes on from the live state, with the batch that follows it."""
    train_step, state = begun(case.of)
    rows = shards()
    states = fa.scan(train_step, state, rows, steps=STEPS, save=fa.Autosave(case.folder, every=1))
    state, _ = next(iter(states))
    before = fa.snapshot(state)
    yield lambda: next(iter(states))
    live = train_step.live_state
    case.kind = "live" if live is state else "dead" if live is None else "following"
    live = train_step.adopt(before) if live is None else live
    case.see(live, expected[live.step])
    for live, _ in fa.scan(train_step, live, rows, steps=STEPS, save=case.folder):
        pass
    case.see(live, expected[STEPS])
    train_step.close()


@contextmanager
def init_built(case: Case, expected: list[Any]) -> Generator[Callable[[], Any]]:
    """As `init`, of a built module: it is in use, or free, or fsdp has begun to shard it."""

    def made() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return built(case.of, model=Net())

    train_step = made()
    yield lambda: train_step.init(seed=0, extras=EXTRAS)
    state = train_step.live_state
    case.kind = "dead" if state is None else "following"
    try:
        state = train_step.init(seed=0, extras=EXTRAS) if state is None else state
    except fa.errors.OwnershipError as error:
        case.wrong += [] if "sharded already" in str(error) else [str(error)]
        train_step = made()
        state = train_step.init(seed=0, extras=EXTRAS)
    case.see(state, expected[0])
    case.goes_on(train_step, state, expected)
    train_step.close()


def is_averaged(state: Any) -> bool:
    """Whether a state says by name that it holds its averages: the end of the swap never began."""
    try:
        fa.snapshot(state)
    except fa.errors.AveragedError:
        return True
    return False


def beside(call: Callable[[Any, Any, Path], Any]) -> Any:
    """The case of a call that leaves the state as it is."""

    @contextmanager
    def run(case: Case, expected: list[Any]) -> Generator[Callable[[], Any]]:
        train_step, state = begun(case.of)
        state, _ = train_step(state, batch(0))
        before = fa.snapshot(state)
        usual = train_step.look(state, loss_fn, batch(7)).total.item()
        yield lambda: call(train_step, state, case.folder)
        if is_averaged(state):
            case.kind = "dead"
            train_step.close()
            train_step, _ = begun(case.of)
            state = train_step.adopt(before)
        case.wrong += [] if train_step.live_state is state else ["the state is not live"]
        case.see(state, expected[1])
        if train_step.look(state, loss_fn, batch(7)).total.item() != usual:
            case.wrong.append("the next look has another result")
        case.goes_on(train_step, state, expected)
        train_step.close()

    return run


@beside
def evaluate_ema(train_step: Any, state: Any, folder: Path) -> None:
    fa.evaluate(train_step, state, loss_fn, shards(), ema=True)


@beside
def look(train_step: Any, state: Any, folder: Path) -> None:
    train_step.look(state, loss_fn, batch(3))


@beside
def look_whole(train_step: Any, state: Any, folder: Path) -> None:
    train_step.look(state, lambda model: [param.sum() for param in model.parameters()], whole=True)


@beside
def export_ema(train_step: Any, state: Any, folder: Path) -> None:
    fa.interchange.export_hf(folder, state, ema=True)


CALLS = {"init": init, "save": save, "restore": restore, "scan": scan}
SWAPS = {
    "init of a built module": init_built,
    "evaluate(ema=True)": evaluate_ema,
    "look": look,
    "look(whole=True)": look_whole,
    "export_hf(ema=True)": export_ema,
}
"""Calls that change the model for a while. They get real SIGINTs, which the library may hold back."""


def reference(call: str, of: str) -> list[dict[str, Any]]:
    """The states of a run that is not interrupted, from the first on."""
    train_step, state = begun(of)
    seen = [values(state)]
    if call == "scan":
        seen += [values(state) for state, _ in fa.scan(train_step, state, shards(), steps=STEPS)]
    else:
        for number in range(STEPS):
            state, _ = train_step(state, batch(number))
            seen.append(values(state))
    train_step.close()
    return seen


def interrupt(
    call: str, of: str, at: int | None, expected: list[dict[str, Any]], signals: int = 0
) -> tuple[Outcome, int]:
    """Interrupt a call at a line, or None, go on, and compare to the bit. Also returns how many lines it ran."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not saved in ")
        case = Case(of, Path(folder) / "runs")
        interrupter = Interrupter(at, signals)
        generator = torch.random.get_rng_state()
        with (CALLS | SWAPS)[call](case, expected) as run:
            try:
                with interrupter:
                    run()
            except (KeyboardInterrupt, TimeIsUp):
                pass
            except fa.errors.FnaccelError as error:
                if not isinstance(error.__cause__, TimeIsUp):
                    case.wrong.append(f"{type(error).__name__} in the place of the interrupt: {error}")
            if not torch.equal(generator, torch.random.get_rng_state()):
                case.wrong.append("torch's generator")
            if signals > 0 and interrupter.left:
                case.wrong.append("a handler of SIGINT stays")
    return Outcome(case.kind, interrupter.place, case.wrong), interrupter.lines


def interrupt_call(call: str, of: str, first: int, stride: int, signals: int = 0) -> list[Outcome]:
    """`interrupt` at every `stride`-th line of a call, from `first` on, or from that many before its end."""
    expected = reference(call, of)
    interrupt(call, of, None, expected)  # a first call runs more lines
    whole, lines = interrupt(call, of, None, expected)
    assert not whole.wrong, whole
    first = first if first > 0 else lines + first
    return [interrupt(call, of, at, expected, signals)[0] for at in range(first, lines + 1, stride)]
