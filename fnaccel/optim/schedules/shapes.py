"""Learning-rate schedules: pure functions of the number of updates applied.

A schedule keeps no state, so neither world size nor accumulation can change its rates. Each
takes an int, or a 0-d tensor if updates are counted on the device, and returns the same type.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import attrs
import torch

from fnaccel.errors import ArgumentError, require
from fnaccel.step.callables import plan_text
from fnaccel.step.loss import Scalar

Schedule = Callable[[Any], Any]
"""`schedule(updates) -> learning rate`, for an int or a 0-d tensor."""

Rate = float | Schedule
"""A learning rate: a number, or a schedule."""

_WHERE = "a learning-rate schedule"


def _cos(x: Scalar) -> Any:
    return torch.cos(x) if isinstance(x, torch.Tensor) else math.cos(x)


def _clip(x: Scalar, low: float, high: float) -> Any:
    return torch.clamp(x, low, high) if isinstance(x, torch.Tensor) else min(max(x, low), high)


def _where(condition: bool | torch.Tensor, yes: Any, no: Any) -> Any:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, torch.as_tensor(yes), torch.as_tensor(no))
    return yes if condition else no


def _check(ok: bool, what: str, fix: str) -> None:
    require(ok, what, _WHERE, fix)


@attrs.frozen
class constant:  # noqa: N801 - used as a function, and a class so that it prints, hashes and pickles
    """The same rate always.

    Example:
        >>> fa.schedules.constant(1e-3)(500)
        0.001
    """

    value: float

    def __call__(self, updates: Scalar) -> Any:
        """The rate after `updates` updates."""
        return torch.full_like(updates, self.value) if isinstance(updates, torch.Tensor) else self.value


@attrs.frozen
class linear:  # noqa: N801
    """From `start` to `end` over `total` updates, then `end`.

    Example:
        >>> fa.schedules.linear(1.0, 0.0, 1_000)(250)
        0.75
    """

    start: float
    end: float
    total: int

    def __attrs_post_init__(self) -> None:
        _check(self.total > 0, f"linear over {self.total} updates", "total is 1 or more")

    def __call__(self, updates: Scalar) -> Any:
        """The rate after `updates` updates."""
        return self.start + (self.end - self.start) * _clip(updates / self.total, 0.0, 1.0)


@attrs.frozen
class cosine:  # noqa: N801
    """From `start` to `end` along half a cosine over `total` updates (Loshchilov and Hutter 2017).

    Example:
        >>> round(fa.schedules.cosine(1.0, total=1_000)(500), 3)
        0.5
    """

    start: float
    total: float
    end: float = 0.0

    def __attrs_post_init__(self) -> None:
        _check(self.total > 0, f"cosine over {self.total} updates", "total is 1 or more")

    def __call__(self, updates: Scalar) -> Any:
        """The rate after `updates` updates."""
        share = _clip(updates / self.total, 0.0, 1.0)
        return self.end + (self.start - self.end) * 0.5 * (1.0 + _cos(math.pi * share))


@attrs.frozen
class inverse_sqrt:  # noqa: N801
    """Linear warm-up from 0 to `peak`, then `peak * sqrt(warmup / updates)` (Vaswani et al. 2017).

    Example:
        >>> schedule = fa.schedules.inverse_sqrt(1.0, warmup=100)
        >>> schedule(50), schedule(100), schedule(400)
        (0.5, 1.0, 0.5)
    """

    peak: float
    warmup: int

    def __attrs_post_init__(self) -> None:
        _check(self.warmup > 0, f"a warm-up of {self.warmup} updates", "warmup is 1 or more")

    def __call__(self, updates: Scalar) -> Any:
        """The rate after `updates` updates."""
        late = _clip(updates, self.warmup, math.inf)
        return _where(
            updates < self.warmup,
            self.peak * (updates / self.warmup),
            self.peak * (self.warmup / late) ** 0.5,
        )


@attrs.frozen(repr=False)
class joined:  # noqa: N801
    """Several schedules one after the other, each counting from its own start.

    `boundaries[i]` is the update at which `parts[i + 1]` takes over.

    Example:
        >>> parts = fa.schedules.linear(0.0, 1.0, 100), fa.schedules.cosine(1.0, total=900)
        >>> schedule = fa.schedules.joined(parts, boundaries=(100,))
        >>> schedule(50), schedule(100), schedule(1_000)
        (0.5, 1.0, 0.0)
    """

    parts: tuple[Schedule, ...] = attrs.field(converter=tuple)
    boundaries: tuple[float, ...] = attrs.field(converter=tuple)
    written: str = attrs.field(default="", kw_only=True, eq=False)
    """How the user wrote it, for the plan. Empty for a sequence joined by hand."""

    def __repr__(self) -> str:
        return self.written or f"joined({plan_text(self.parts)}, boundaries={self.boundaries!r})"

    def __attrs_post_init__(self) -> None:
        _check(
            len(self.parts) == len(self.boundaries) + 1,
            f"{len(self.parts)} schedules are joined at {len(self.boundaries)} boundaries",
            "give one boundary fewer than schedules",
        )
        _check(
            all(a < b for a, b in pairwise(self.boundaries)),
            f"the boundaries {self.boundaries} do not rise",
            "list the updates in rising order",
        )

    def __call__(self, updates: Scalar) -> Any:
        """The rate after `updates` updates."""
        if not isinstance(updates, torch.Tensor):
            place = bisect.bisect_right(self.boundaries, updates)
            return self.parts[place](updates - self.boundaries[place - 1] if place else updates)
        rate = self.parts[0](updates)
        for boundary, part in zip(self.boundaries, self.parts[1:], strict=True):
            later = _clip(updates - boundary, 0, math.inf)
            rate = _where(updates >= boundary, part(later), rate)
        return rate


def _warmup(peak: float, warmup: int, start: float, after: Schedule, written: str) -> joined:
    _check(warmup >= 0, f"a warm-up of {warmup} updates", "warmup is 0 or more")
    if not warmup:
        return joined((after,), (), written=written)
    # the first update after the warm-up is the only one at the peak
    return joined((linear(start, peak, warmup), after), (warmup,), written=written)


def warmup_constant(peak: float, *, warmup: int, start: float = 0.0) -> joined:
    """Linear warm-up from `start` to `peak` over `warmup` updates, then `peak`.

    Example:
        >>> fa.schedules.warmup_constant(1.0, warmup=10)(5)
        0.5
    """
    written = f"warmup_constant({peak}, warmup={warmup}{_written_start(start)})"
    return _warmup(peak, warmup, start, constant(peak), written)


def warmup_linear(peak: float, *, warmup: int, total: int, end: float = 0.0, start: float = 0.0) -> joined:
    """Linear warm-up from `start` to `peak`, then linearly to `end` at update `total`.

    The rates of `get_linear_schedule_with_warmup` of transformers.

    Raises:
        ArgumentError: the warm-up is not shorter than `total`.

    Example:
        >>> schedule = fa.schedules.warmup_linear(1.0, warmup=10, total=110)
        >>> schedule(0), schedule(5), schedule(10), schedule(60), schedule(110)
        (0.0, 0.5, 1.0, 0.5, 0.0)
    """
    _check_total(warmup, total)
    written = f"warmup_linear({peak}, warmup={warmup}, total={total}, end={end}{_written_start(start)})"
    return _warmup(peak, warmup, start, linear(peak, end, total - warmup), written)


def warmup_cosine(peak: float, *, warmup: int, total: int, end: float = 0.0, start: float = 0.0) -> joined:
    """Linear warm-up from `start` to `peak`, then along half a cosine to `end` at update `total`.

    The rates of `get_cosine_schedule_with_warmup` of transformers.

    Raises:
        ArgumentError: the warm-up is not shorter than `total`.

    Example:
        >>> optimizer = fa.adamw(lr=fa.warmup_cosine(3e-4, warmup=100, total=1_000))
    """
    _check_total(warmup, total)
    written = f"warmup_cosine({peak}, warmup={warmup}, total={total}, end={end}{_written_start(start)})"
    return _warmup(peak, warmup, start, cosine(peak, total - warmup, end), written)


def warmup_stable_decay(
    peak: float,
    *,
    warmup: int,
    total: int,
    decay: int,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
    end: float = 0.0,
    start: float = 0.0,
) -> joined:
    """Linear warm-up from `start` to `peak`, then `peak`, then down to `end` over the last `decay` updates.

    Source: https://arxiv.org/abs/2404.06395 (WSD). The rates of `get_wsd_schedule` of transformers, whose
    `"1-sqrt"` is `"sqrt"` here.

    Args:
        peak: the rate between warm-up and decay.
        warmup: updates of the warm-up.
        total: the update at which the decay ends.
        decay: updates of the decay.
        shape: along a line, half a cosine, or one minus a square root.
        end: the last rate.
        start: the first rate, if there is a warm-up.

    Raises:
        ArgumentError: warm-up and decay are longer than `total`, or no such shape.

    Example:
        >>> schedule = fa.schedules.warmup_stable_decay(1.0, warmup=10, total=110, decay=20)
        >>> schedule(5), schedule(10), schedule(90), schedule(100), schedule(110)
        (0.5, 1.0, 1.0, 0.5, 0.0)
    """
    _check(
        decay > 0 and warmup + decay <= total,
        f"a warm-up of {warmup} and a decay of {decay} updates do not fit in {total}",
        "all count updates, decay is 1 or more, and warmup + decay <= total",
    )
    parts = {
        "linear": linear(peak, end, decay),
        "cosine": cosine(peak, decay, end),
        "sqrt": _sqrt(peak, end, decay),
    }
    _check(shape in parts, f"shape={shape!r}", f"one of {', '.join(map(repr, parts))}")
    after: Schedule = parts[shape]
    if warmup + decay < total:
        after = joined((constant(peak), after), (total - decay - warmup,))
    options = f"shape={shape!r}, end={end}{_written_start(start)}"
    written = f"warmup_stable_decay({peak}, warmup={warmup}, total={total}, decay={decay}, {options})"
    return _warmup(peak, warmup, start, after, written)


@attrs.frozen
class _sqrt:  # noqa: N801
    start: float
    end: float
    total: int

    def __call__(self, updates: Scalar) -> Any:
        return self.start + (self.end - self.start) * _clip(updates / self.total, 0.0, 1.0) ** 0.5


def _written_start(start: float) -> str:
    return f", start={start}" if start else ""


def one_cycle(
    peak: float, *, total: int, warmup: float = 0.3, start_div: float = 25.0, end_div: float = 1e4
) -> joined:
    """Up along half a cosine for a share `warmup` of `total` updates, then down (Smith and Topin 2018).

    Starts at `peak / start_div` and ends at `peak / start_div / end_div`, at update `total - 1`. The rates of
    `torch.optim.lr_scheduler.OneCycleLR`.

    Raises:
        ArgumentError: the share is no more than one update, or all of them.

    Example:
        >>> schedule = fa.schedules.one_cycle(1.0, total=100)
        >>> round(schedule(0), 3), round(schedule(29), 3)
        (0.04, 1.0)
    """
    up = total * warmup - 1  # where the peak lies, as torch counts: it may lie between two updates
    _check(
        0 < up < total - 1,
        f"a warm-up of {warmup} of {total} updates has no room",
        "warmup is a share between 0 and 1 that is more than one update",
    )
    low = peak / start_div
    parts = (cosine(low, up, peak), cosine(peak, total - 1 - up, low / end_div))
    return joined(parts, (up,), written=f"one_cycle({peak}, total={total}, warmup={warmup})")


@attrs.frozen
class piecewise:  # noqa: N801
    """`start`, multiplied by `factors[i]` from update `boundaries[i]` on.

    Example:
        >>> schedule = fa.schedules.piecewise(1.0, boundaries=(30, 60), factors=(0.5, 0.5))
        >>> schedule(29), schedule(30), schedule(60)
        (1.0, 0.5, 0.25)
    """

    start: float
    boundaries: tuple[int, ...] = attrs.field(converter=tuple)
    factors: tuple[float, ...] = attrs.field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        _check(
            len(self.boundaries) == len(self.factors),
            f"{len(self.boundaries)} boundaries have {len(self.factors)} factors",
            "give one factor for each boundary",
        )

    def __call__(self, updates: Scalar) -> Any:
        """The rate after `updates` updates."""
        rate: Any = constant(self.start)(updates)
        for boundary, factor in zip(self.boundaries, self.factors, strict=True):
            rate = _where(updates >= boundary, rate * factor, rate)
        return rate


@attrs.frozen
class ema_warmup:  # noqa: N801
    """A decay for `fa.with_ema` that rises from 0 to `decay`, so that an average forgets the first weights.

    Let `step` be `updates - after`. The decay is 0 until `step` is positive. Then it is
    `1 - (1 + step / inv_gamma) ** -power`, or `(1 + step) / (10 + step)` if `power` is None, within
    `[least, decay]`. These are the decays of diffusers' `EMAModel`: its `update_after_step` is `after` here,
    its `min_decay` is `least`, and `use_ema_warmup=False` is `power=None`.

    Example:
        >>> decay = fa.schedules.ema_warmup(0.9999, power=1.0)
        >>> decay(0), decay(1), decay(9), decay(100_000)
        (0.0, 0.5, 0.9, 0.9999)
    """

    decay: float = 0.9999
    power: float | None = attrs.field(default=2 / 3, kw_only=True)
    inv_gamma: float = attrs.field(default=1.0, kw_only=True)
    least: float = attrs.field(default=0.0, kw_only=True)
    after: int = attrs.field(default=0, kw_only=True)

    def __call__(self, updates: Scalar) -> Any:
        """The decay after `updates` updates."""
        step = _clip(updates - self.after, 0, math.inf)
        rising = (1 + step) / (10 + step)
        if self.power is not None:
            rising = 1 - (1 + step / self.inv_gamma) ** -self.power
        return _where(step > 0, _clip(rising, self.least, self.decay), 0.0)


def _check_total(warmup: int, total: int) -> None:
    _check(
        0 <= warmup < total,
        f"a warm-up of {warmup} updates does not fit in {total}",
        "both count updates (not batches, not samples), and warmup < total",
    )


def as_schedule(lr: Rate) -> Schedule:
    """A schedule of a number or of a callable.

    Raises:
        ArgumentError: it is neither, or a number that is negative or not finite.
    """
    if callable(lr):
        return lr
    if isinstance(lr, int | float) and not isinstance(lr, bool) and 0 <= lr < math.inf:
        return constant(float(lr))
    raise ArgumentError(
        f"a learning rate is a number or a function of updates, not {lr!r}",
        where="lr=",
        fix="lr=3e-4, or lr=fa.warmup_cosine(3e-4, warmup=100, total=1_000)",
    )
