"""`fnaccel trace summarize`: each rank's share of compute, communication, waiting for data and idle time.

The traces are those of `fa.profile`, or of `fa.Watch(profile=)`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter

import attrs

from fnaccel.cli.options.trace import parser
from fnaccel.cli.terminal import columns
from fnaccel.seeing.timeline import Summary, summarize
from fnaccel.world.progress_marks import PHASES


def run(arguments: Sequence[str]) -> int:
    """Print the summary of a directory of traces.

    Raises:
        ArgumentError: no traces.
    """
    options = parser().parse_args(arguments)
    ranks = summarize(options.directory)
    if options.json:
        print(json.dumps([attrs.asdict(rank) for rank in ranks], indent=2))
    else:
        print(text(ranks))
    return 0


def text(ranks: Sequence[Summary]) -> str:
    """The tables: a line for each rank, and the phases of a step."""
    kinds = ("compute", "communication", "data", "idle")
    lines: list[tuple[str, ...]] = [("rank", "steps", "ms/step", *kinds, "hidden communication")]
    for rank in ranks:
        shares = [f"{getattr(rank, kind) / rank.wall:.1%}" for kind in kinds]
        lines.append(
            (str(rank.rank), str(rank.steps), f"{rank.wall:.2f}", *shares, f"{rank.hidden / rank.wall:.1%}")
        )
    names = [name for name in PHASES if any(name in rank.phases for rank in ranks)]
    phases = [("rank", *names, "")]
    phases += [
        (str(rank.rank), *(f"{rank.phases.get(name, 0.0):.2f}" for name in names), "") for rank in ranks
    ]
    parts = [columns(lines, ">" * 7), "Phases, ms/step:", columns(phases, ">" * (len(names) + 1))]
    stages = sorted((stage, rank.rank, times) for rank in ranks for stage, times in rank.stages.items())
    if stages:
        rows: list[tuple[str, ...]] = [("stage", "rank", "forward", "backward", "")]
        for stage, rank, times in stages:
            spent = [f"{times.get(phase, 0.0):.2f}" for phase in ("forward", "backward")]
            rows.append((str(stage), str(rank), *spent, ""))
        parts += ["Stages, with waits for other stages, ms/step:", columns(rows, ">" * 4)]
    if len(ranks) > 1:
        busy = attrgetter("busy")
        slowest, quickest = max(ranks, key=busy), min(ranks, key=busy)
        parts.append(
            f"Rank {slowest.rank} is the slowest: {slowest.busy:.2f} ms/step without communication, "
            f"rank {quickest.rank} {quickest.busy:.2f}. Other ranks wait for it in their collectives."
        )
    return "\n\n".join(parts)
