"""The text of a finding of the watchdog: the error, a table of all ranks, the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fnaccel.errors import PeerLostError
from fnaccel.world.stalls import STATES, Finding, RankView

CODE = 76
"""The exit code of a job that the watchdog has ended (EX_PROTOCOL of sysexits.h)."""


def report(finding: Finding, views: Sequence[RankView], stacks: Mapping[int, str], *, limit: float) -> str:
    """The whole text.

    Args:
        finding: why the ranks do not go on.
        views: all ranks.
        stacks: the stack of each rank that could write one.
        limit: the limit of the watchdog, in seconds.
    """
    named = [view for view in views if view.rank in finding.ranks] or list(views)
    where = "; ".join(f"rank {view.rank}: {view.place}" for view in named)
    error = PeerLostError(finding.what, where=where, fix=finding.fix)
    end = f"the watchdog (limit {limit:g} s) ended the job with exit code {CODE}"
    return "\n\n".join([f"{type(error).__name__}: {error}", _table(views), *_stacks(views, stacks), end])


def _table(views: Sequence[RankView]) -> str:
    several = len({view.host for view in views}) > 1
    rows = [["rank", "process", "state", "step", "phase", "seconds", "newest call of all ranks"]]
    for view in views:
        position = view.position
        state = STATES.get(view.state, view.state or "unknown")
        phase = position.phase
        if phase in ("forward", "backward"):
            phase += f" {position.micro_batch}"
        call = f"{position.calls} {position.call}{', inside' if position.inside else ''}"
        rows.append([
            str(view.rank),
            f"{view.pid}{' on ' + view.host if several else ''}",
            "silent" if view.silent and view.state != "T" else state,
            str(position.step),
            phase,
            f"{view.age:.0f}",
            call if position.calls else "none",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = (0, 1, 3, 5)
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    names = sorted({view.position.of for view in views if view.position.of})
    if len(names) > 1:
        lines += [f"rank {view.rank} runs {view.position.of}" for view in views]
    return "\n".join(lines)


def _stacks(views: Sequence[RankView], stacks: Mapping[int, str]) -> list[str]:
    parts: list[str] = []
    for view in views:
        text = stacks.get(view.rank, "")
        reason = "its process is stopped" if view.state == "T" else "it does not answer"
        head = f"rank {view.rank}, most recent call last:"
        parts.append(f"{head}\n{text}" if text else f"rank {view.rank}: no stack, {reason}")
    return parts
