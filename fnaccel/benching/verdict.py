"""From measurements to a recommended scope. Pure arithmetic, no step runs here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from fnaccel.benching.task import EAGER, Answer, Failed, Measured

WORTH = 1.05
"""The speed-up from which a scope is recommended. A smaller speed-up is noise between two runs."""

_TOLERANCES = {"fp32": 1e-3, "fp64": 1e-3}
_HALF = 5e-2  # bf16 keeps 8 bits, and a fused kernel rounds elsewhere


@attrs.frozen(kw_only=True)
class Row:
    """One scope of the table.

    Attributes:
        scope: `"eager"`, or one of `fa.compile`.
        measured: the measurement, or None if the scope failed.
        failed: the failure, or None if the scope was measured.
        differs: whether the losses differ from eager's.
        compared: whether the losses could be compared.
        note: a remark for the table.
    """

    scope: str
    measured: Measured | None = None
    failed: Failed | None = None
    differs: bool = False
    compared: bool = True
    note: str = ""


@attrs.frozen(kw_only=True)
class Verdict:
    """Which scope to use, and why.

    Attributes:
        scope: the recommended scope, or None if no scope could be measured.
        why: the reason, printed after the scope's name.
        pays_back_after: steps that save the extra seconds of the first call. None without extra seconds.
    """

    scope: str | None
    why: str
    pays_back_after: int | None = None


def tolerance_of(precision: str) -> float:
    """The largest allowed difference of two losses, relative to the largest loss of eager."""
    return _TOLERANCES.get(precision, _HALF)


def judge(answers: Mapping[str, Answer], tolerance: float) -> list[Row]:
    """A row for each scope, compared with eager.

    Args:
        answers: the answer of each scope, in the order of the rows.
        tolerance: for the losses, as `tolerance_of` returns it.

    Example:
        >>> eager = Measured(first=1.0, seconds=0.2, peak=100.0, losses=[2.0, 1.5])
        >>> block = Measured(first=9.0, seconds=0.1, peak=80.0, losses=[2.0, 1.1])
        >>> judge({"eager": eager, "block": block}, tolerance=1e-3)[1].note
        "losses differ from eager's by 20.0%"
    """
    eager = answers.get(EAGER)
    reference = eager if isinstance(eager, Measured) else None
    return [_row(scope, answer, reference, tolerance) for scope, answer in answers.items()]


def _row(scope: str, answer: Answer, eager: Measured | None, tolerance: float) -> Row:
    if isinstance(answer, Failed):
        return Row(scope=scope, failed=answer, note=answer.what)
    notes: list[str] = []
    gap = 0.0 if eager is None else _gap(eager.losses, answer.losses)
    differs, compared = gap > tolerance, eager is not None
    if differs and eager is not None and eager.draws:
        differs = compared = False
        notes.append("losses can't be compared: dropout draws other masks")
    elif differs:
        notes.append(f"losses differ from eager's by {gap:.1%}" if math.isfinite(gap) else "losses differ")
    elif eager is None:
        notes.append("losses not compared: eager failed")
    if not all(map(math.isfinite, answer.losses)):
        notes.append("the loss is not finite")
    if answer.cache_hits:
        notes.append("compile cache was partly warm" if answer.cache_misses else "compile cache was warm")
    return Row(scope=scope, measured=answer, differs=differs, compared=compared, note="; ".join(notes))


def _gap(eager: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two lists of losses, relative to the largest loss of eager."""
    if len(eager) != len(other):
        return math.inf
    scale = max((abs(loss) for loss in eager if math.isfinite(loss)), default=1.0) or 1.0
    gaps = [
        0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / scale
        for a, b in zip(eager, other, strict=True)
    ]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def recommend(rows: Sequence[Row]) -> Verdict:
    """The scope to use: the fastest. If several are about as fast, the one that compiles soonest.

    Scopes that failed or whose losses differ are never recommended. Eager is recommended if none of the
    other scopes is worth it.

    Example:
        >>> eager = Measured(first=1.0, seconds=0.2, peak=100.0, losses=[2.0, 1.5])
        >>> block = Measured(first=9.0, seconds=0.1, peak=80.0, losses=[2.0, 1.5])
        >>> recommend(judge({"eager": eager, "block": block}, tolerance=1e-3)).why
        '2.0x eager; its first call of 9.0 s is paid back after 80 steps'
    """
    able = {row.scope: row for row in rows if row.measured is not None and not row.differs}
    eager = able.pop(EAGER).measured if EAGER in able else None
    compiled = {scope: row.measured for scope, row in able.items() if row.measured is not None}
    if not compiled:
        return Verdict(
            scope=EAGER if eager else None, why="no other scope can be used" if eager else "none ran"
        )
    fastest = min(compiled, key=lambda scope: compiled[scope].seconds)
    if eager is None:
        return Verdict(scope=fastest, why="the fastest, though eager failed and nothing was compared")
    gains = {scope: eager.seconds / measured.seconds for scope, measured in compiled.items()}
    if gains[fastest] < WORTH:
        speed = f"{fastest} runs at {gains[fastest]:.2f}x"
        return Verdict(scope=EAGER, why=f"no scope is faster by {WORTH - 1:.0%} ({speed})")
    close = [scope for scope, gain in gains.items() if gain >= WORTH and gain * WORTH >= gains[fastest]]
    scope = min(close, key=lambda name: compiled[name].first)
    best, gain = compiled[scope], gains[scope]
    times = f"{gain:.1f}x" if gain >= 1.1 else f"{gain:.2f}x"
    unsure = "" if able[scope].compared else "; compare its losses yourself"
    steps = pays_back_after(eager, best)
    if steps is None:
        return Verdict(scope=scope, why=f"{times} eager, from the first call on{unsure}")
    warm = " (with a warm compile cache)" if best.cache_hits else ""
    why = f"{times} eager; its first call of {brief(best.first)} s{warm} is paid back after {_count(steps)}"
    return Verdict(scope=scope, why=why + unsure, pays_back_after=steps)


def _count(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps:,} steps"


def pays_back_after(eager: Measured, other: Measured) -> int | None:
    """Steps after which a faster scope has made up for its longer first call, to two digits.

    None if its first call takes no longer.

    Example:
        >>> eager = Measured(first=1.0, seconds=0.100, peak=100.0, losses=[])
        >>> block = Measured(first=15.0, seconds=0.099, peak=80.0, losses=[])
        >>> pays_back_after(eager, block)
        14000
    """
    extra = other.first - eager.first
    if extra <= 0:
        return None
    steps = math.ceil(extra / (eager.seconds - other.seconds))
    # two digits: more would be noise
    return max(1, round(steps, 1 - math.floor(math.log10(steps))))


def brief(seconds: float) -> str:
    """Seconds, rounded for reading.

    Example:
        >>> brief(14.3), brief(0.031)
        ('14', '0.03')
    """
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"
