"""The text of a finding of the watchdog: the error, a table of all ranks, the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fnaccel.errors import PeerLostError
from fnaccel.world.rank_record import RankRecord
from fnaccel.world.stalls import STATES, Finding

CODE = 76
"""The exit code of a job that the watchdog has ended (EX_PROTOCOL of sysexits.h)."""


def report(
    finding: Finding, records: Sequence[RankRecord], stacks: Mapping[int, str], *, limit: float
) -> str:
    """The whole text.

    Args:
        finding: why the ranks do not go on.
        records: all ranks.
        stacks: the stack of each rank that could write one.
        limit: the limit of the watchdog, in seconds.
    """
    named = [record for record in records if record.rank in finding.ranks] or list(records)
    where = "; ".join(f"rank {record.rank}: {record.place}" for record in named)
    error = PeerLostError(finding.what, where=where, fix=finding.fix)
    end = f"the watchdog (limit {limit:g} s) ended the job with exit code {CODE}"
    return "\n\n".join([f"{type(error).__name__}: {error}", _table(records), *_stacks(records, stacks), end])


def _table(records: Sequence[RankRecord]) -> str:
    several = len({record.host for record in records}) > 1
    rows = [["rank", "process", "state", "step", "phase", "seconds", "newest call of all ranks"]]
    for record in records:
        state = STATES.get(record.state, record.state or "unknown")
        phase = record.phase
        if phase in ("forward", "backward"):
            phase += f" {record.micro_batch}"
        if record.stage >= 0:
            phase += f", stage {record.stage}"
        calls = f"{record.calls} {record.name(record.calls)}{', inside' if record.inside else ''}"
        rows.append([
            str(record.rank),
            f"{record.pid}{' on ' + record.host if several else ''}",
            "silent" if record.silent and record.state != "T" else state,
            str(record.step),
            phase,
            f"{record.age:.0f}",
            calls if record.calls else "none",
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
    names = sorted({record.of for record in records if record.of})
    if len(names) > 1:
        lines += [f"rank {record.rank} runs {record.of}" for record in records]
    return "\n".join(lines)


def _stacks(records: Sequence[RankRecord], stacks: Mapping[int, str]) -> list[str]:
    parts: list[str] = []
    for record in records:
        text = stacks.get(record.rank, "")
        reason = "its process is stopped" if record.state == "T" else "it does not answer"
        head = f"rank {record.rank}, most recent call last:"
        parts.append(f"{head}\n{text}" if text else f"rank {record.rank}: no stack, {reason}")
    return parts
