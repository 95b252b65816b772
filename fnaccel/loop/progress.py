"""Progress bars: of `scan` and `evaluate`, and `fa.progress` for a loop of one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar

from fnaccel.world.world import World, current

T = TypeVar("T")


class ProgressBar(Protocol):
    """The parts of tqdm's bar that are used."""

    def update(self) -> object:
        """One more step."""
        ...

    def set_postfix(self, values: dict[str, str], *, refresh: bool) -> None:
        """Show values beside the count."""
        ...


def progress(
    iterable: Iterable[T],
    *,
    total: int | None = None,
    unit: str = "it",
    local: bool = False,
    world: World | None = None,
) -> Iterator[T]:
    """Iterate, with tqdm's progress bar on the main rank only.

    Args:
        iterable: read on every rank.
        total: how many items there are. By default `len(iterable)` if it has a length.
        unit: the name of one item beside the count.
        local: show a bar on the first rank of each machine.
        world: the world, if none was started in this context.

    Example:
        >>> for batch in fa.progress(batches, unit="batch"):
        ...     state, metrics = train_step(state, batch)
    """
    there = current(world)
    if not (there.is_local_main if local else there.is_main):
        yield from iterable
        return
    with open_bar(_length(iterable) if total is None else total, 0, unit=unit) as bar:
        yield from ticking(iterable, bar)


def _length(iterable: object) -> int | None:
    if not isinstance(iterable, Sized):
        return None
    try:
        return len(iterable)
    except TypeError:  # a stream's length is not known
        return None


def open_bar(total: int | None, initial: int, *, unit: str = "step", title: str | None = None) -> Any:
    """A bar of tqdm, a context manager: the notebook's in a notebook, if it has ipywidgets.

    One with a title goes when it is closed: it stands below another.
    """
    # a rank of fa.notebook_launch has no connection to the notebook, and writes text
    if type(sys.stderr).__module__.startswith("ipykernel"):
        from tqdm.auto import tqdm  # noqa: PLC0415 - only if a bar is shown
    else:
        from tqdm import tqdm  # noqa: PLC0415
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    often = 0.1 if watched else 5.0  # a log file keeps every line
    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        desc=title,
        leave=title is None,
        dynamic_ncols=True,
        mininterval=often,
    )


def write_line(text: str) -> None:
    """Write a line above the bars that are shown."""
    from tqdm import tqdm  # noqa: PLC0415 - only if a bar is shown

    tqdm.write(text, file=sys.stderr)


def ticking(items: Iterable[T], bar: ProgressBar) -> Iterator[T]:
    """Items, with one more on the bar after each."""
    for item in items:
        yield item
        bar.update()


def show_metrics(bar: ProgressBar, also: Iterable[str] = ()) -> Callable[[dict[str, float]], None]:
    """A function that shows the usual metrics of a step beside the count, and some others."""
    names, fields = ("loss", "lr", "grad_norm", *also), dict[str, str]()

    def show(values: dict[str, float]) -> None:
        fields.update({name: f"{values[name]:.4g}" for name in names if name in values})
        bar.set_postfix(fields, refresh=False)

    return show
