"""From measurements to a table and a recommended scope. No step runs here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from fnaccel.cli.benching.answer import EAGER, Answer, Failed, Measured
from fnaccel.texts import counted

_WORTH = 1.05
"""The speed-up from which a scope is recommended. A smaller speed-up is noise between two runs."""


@attrs.frozen(kw_only=True)
class Row:
    """One scope or strategy of the table."""

    name: str
    answer: Answer
    gain: float | None = None  # the speed-up against the reference. None if one of the two failed
    differs: bool = False  # whether the losses differ from the reference's
    compared: bool = True  # whether the losses could be compared
    note: str = ""


@attrs.frozen(kw_only=True)
class Verdict:
    """Which scope or strategy to use, and why."""

    name: str | None  # None if none could be measured
    why: str  # printed after the scope's name
    pays_back_after: int | None = None  # steps that save the extra seconds of the first call, if there are


def tolerance_of(precision: str) -> float:
    """The largest allowed difference of two losses, relative to the largest loss of eager."""
    # bf16 keeps 8 bits, and a fused kernel rounds elsewhere
    return 1e-3 if precision in ("fp32", "fp64") else 5e-2


def judge(answers: Mapping[str, Answer], tolerance: float, reference: str = EAGER) -> list[Row]:
    """A row for each scope or strategy, in the order of `answers`, compared with the reference.

    Example:
        >>> eager = Measured(first=1.0, seconds=0.2, peak=100.0, losses=[2.0, 1.5])
        >>> block = Measured(first=9.0, seconds=0.1, peak=80.0, losses=[2.0, 1.1])
        >>> judge({"eager": eager, "block": block}, tolerance=1e-3)[1].note
        "losses differ from eager's by 20.0%"
    """
    return [_row(name, answer, reference, answers, tolerance) for name, answer in answers.items()]


def _row(name: str, answer: Answer, reference: str, answers: Mapping[str, Answer], tolerance: float) -> Row:
    found = answers.get(reference)
    eager = found if isinstance(found, Measured) else None
    if isinstance(answer, Failed):
        return Row(name=name, answer=answer, note=answer.what)
    notes: list[str] = []
    gap = 0.0 if eager is None else _gap(eager.losses, answer.losses)
    differs, compared = gap > tolerance, eager is not None
    if eager is None:
        notes.append(f"losses not compared: {reference} failed")
    elif differs and eager.draws:
        differs = compared = False
        notes.append("losses can't be compared: dropout draws other masks")
    elif differs:
        notes.append(
            f"losses differ from {reference}'s by {gap:.1%}" if math.isfinite(gap) else "losses differ"
        )
    if not all(map(math.isfinite, answer.losses)):
        notes.append("the loss is not finite")
    if answer.cache_hits:
        notes.append("compile cache was partly warm" if answer.cache_misses else "compile cache was warm")
    gain = None if eager is None else eager.seconds / answer.seconds
    return Row(name=name, answer=answer, gain=gain, differs=differs, compared=compared, note="; ".join(notes))


def _gap(eager: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two lists of losses, relative to the largest loss of eager."""
    if len(eager) != len(other):
        return math.inf
    scale = max((abs(loss) for loss in eager if math.isfinite(loss)), default=1.0) or 1.0
    pairs = zip(eager, other, strict=True)
    gaps = [abs(a - b) / scale for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))]
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
    able = {row.name: row.answer for row in rows if isinstance(row.answer, Measured) and not row.differs}
    eager = able.pop(EAGER, None)
    if eager is None:
        if not able:
            return Verdict(name=None, why="none ran")
        fastest = min(able, key=lambda scope: able[scope].seconds)
        return Verdict(name=fastest, why="the fastest, though eager failed and nothing was compared")
    if not able:
        return Verdict(name=EAGER, why="no other scope can be used")
    gains = {scope: eager.seconds / measured.seconds for scope, measured in able.items()}
    fastest = max(gains, key=lambda scope: gains[scope])
    if gains[fastest] < _WORTH:
        speed = f"{fastest} runs at {gains[fastest]:.2f}x"
        return Verdict(name=EAGER, why=f"no scope is faster by {_WORTH - 1:.0%} ({speed})")
    close = [scope for scope, gain in gains.items() if gain >= _WORTH and gain * _WORTH >= gains[fastest]]
    scope = min(close, key=lambda name: able[name].first)
    best, gain, steps = able[scope], gains[scope], pays_back_after(eager, able[scope])
    why = f"{gain:.1f}x eager" if gain >= 1.1 else f"{gain:.2f}x eager"
    if steps is None:
        why += ", from the first call on"
    else:
        warm = " (with a warm compile cache)" if best.cache_hits else ""
        why += f"; its first call of {brief(best.first)} s{warm} is paid back after {counted(steps, 'step')}"
    if not all(row.compared for row in rows if row.name == scope):
        why += "; compare its losses yourself"
    return Verdict(name=scope, why=why, pays_back_after=steps)


def recommend_strategy(rows: Sequence[Row]) -> Verdict:
    """The strategy to use: the fastest, and the one with the least memory if that is another one.

    Strategies that failed or whose losses differ are never recommended.

    Example:
        >>> ddp = Measured(first=1.0, seconds=0.1, peak=100.0, losses=[2.0, 1.5])
        >>> fsdp = Measured(first=1.0, seconds=0.2, peak=60.0, losses=[2.0, 1.5])
        >>> rows = judge({"ddp": ddp, "fsdp": fsdp}, tolerance=1e-3, reference="ddp")
        >>> recommend_strategy(rows).why
        'the fastest. If memory is short: fsdp, 0.60x the memory of a rank at 2.0x the time'
    """
    able = {row.name: row.answer for row in rows if isinstance(row.answer, Measured) and not row.differs}
    if not able:
        return Verdict(name=None, why="none ran")
    fastest = min(able, key=lambda name: able[name].seconds)
    leanest = min(able, key=lambda name: able[name].peak)
    share = able[leanest].peak / able[fastest].peak if able[fastest].peak else 1.0
    if share >= 1 / _WORTH:
        return Verdict(name=fastest, why="the fastest, and no other needs less memory")
    slower = able[leanest].seconds / able[fastest].seconds
    other = f"{leanest}, {share:.2f}x the memory of a rank at {slower:.1f}x the time"
    return Verdict(name=fastest, why=f"the fastest. If memory is short: {other}")


def pays_back_after(eager: Measured, other: Measured) -> int | None:
    """Steps after which a faster scope has made up for its longer first call, to two digits.

    None if its first call takes no longer.
    """
    extra = other.first - eager.first
    if extra <= 0:
        return None
    steps = math.ceil(extra / (eager.seconds - other.seconds))
    # two digits: more would be noise
    return max(1, round(steps, 1 - math.floor(math.log10(steps))))


def brief(seconds: float) -> str:
    """Seconds, rounded for reading."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"


def document(rows: Sequence[Row], verdict: Verdict) -> dict[str, Any]:
    """Rows and verdict as plain values: seconds, MiB, the first losses."""
    return {
        "rows": [_plain(row) for row in rows],
        "recommended": verdict.name,
        "why": verdict.why,
        "pays_back_after": verdict.pays_back_after,
    }


def _plain(row: Row) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": row.name, "note": row.note, "differs": row.differs}
    answer = row.answer
    if isinstance(answer, Failed):
        return plain | {"error": {"kind": answer.kind, "text": answer.text}}
    return plain | {
        "first_step_seconds": answer.first, "step_seconds": answer.seconds,
        "steps_per_second": 1 / answer.seconds, "against_reference": row.gain, "peak_mib": answer.peak,
        "losses": list(answer.losses), "cache_hits": answer.cache_hits,
        "cache_misses": answer.cache_misses,
    }  # fmt: skip
