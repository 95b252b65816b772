"""What saving and restoring cost in fnaccel, beside the bytes alone, Accelerate and torch's DCP.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--quick]

Contestants hold the same model and moments, and take turns; each writes to an empty folder.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import saving
from interleave import slope
from options import begin
from report import Row, compare, publish

import fnaccel as fa
from fnaccel.testing import RankPool

LAYERS = {"48 MiB": 4, "480 MiB": 40}  # parameters and two moments
MIB = 1 << 20


def time_all(contest: saving.Contest, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of seconds: save, stall of a save in the background, restore."""
    taken: dict[str, dict[str, list[float]]] = {"save": {}, "stall": {}, "restore": {}}

    def note(kind: str, number: int, name: str, seconds: float) -> None:
        if number >= 0:
            taken[kind].setdefault(name, []).append(seconds)

    savers, stallers = contest.savers(), contest.stallers()
    for number, name in saving.turns(list(savers), rounds):
        contest.clear(name)
        contest.settle()
        note("save", number, name, saving.timed(savers[name])[0])
    for number, name in saving.turns(list(stallers), rounds):
        contest.clear(name)
        contest.settle()
        seconds, wait = saving.timed(stallers[name])
        wait()
        note("stall", number, name, seconds)
    restorers = contest.restorers()
    for number, name in saving.turns(list(restorers), rounds):
        contest.settle()
        note("restore", number, name, saving.timed(restorers[name])[0])
    return {
        kind: {name: statistics.median(seconds) for name, seconds in found.items()}
        for kind, found in taken.items()
    }


def rows_of(size: str, found: dict[str, dict[str, float]]) -> list[Row]:
    """Rows of one size."""
    made = compare(f"save, {size}", found["save"], {"write + fsync": 1.15}, "ms")
    stall = found["stall"]["fnaccel"]
    made.append(
        Row(
            f"save_async, {size}: the loop is blocked",
            "sync save",
            stall,
            found["save"]["fnaccel"],
            0.10,
            "ms",
        )
    )
    made.append(
        Row(
            f"save_async, {size}: the loop is blocked",
            "DCP async_save",
            stall,
            found["stall"]["DCP async"],
            None,
            "ms",
        )
    )
    return made + compare(f"restore, {size}", found["restore"], {"load_file + copy": 1.15}, "ms")


def memory_rows(folder: Path, ranks: int) -> list[Row]:
    """The most that a rank held besides its shard of the state."""
    layers = LAYERS["480 MiB"]
    with RankPool(ranks, timeout=600) as pool:
        answers = pool.run(saving.memory, layers, folder)
    made = []
    for kind in answers[0]:
        most, held = max(answer[kind] for answer in answers)
        made.append(
            Row(
                f"{kind} on {ranks} ranks (fsdp): extra memory",
                "the rank's shard",
                most / MIB,
                held / MIB,
                None,
                "MiB",
            )
        )
    return made


def main() -> None:
    """Run everything."""
    options = begin(__doc__)
    made: list[Row] = []
    sizes, taken = [], {}
    with tempfile.TemporaryDirectory() as root:
        with fa.start(device="cpu"):
            for size, layers in LAYERS.items():
                contest = saving.Contest(Path(root), layers)
                found = time_all(contest, 3 if options.quick else 9)
                made += rows_of(size, found)
                sizes.append(contest.bytes // MIB)
                for kind in ("save", "restore"):
                    for name, seconds in found[kind].items():
                        taken.setdefault(kind, {}).setdefault(name, []).append(seconds)
        for kind, each in taken.items():
            made += compare(
                f"{kind}, slope: each further MiB", {name: slope(sizes, s) for name, s in each.items()}
            )
        for ranks in (2, 4):
            made += memory_rows(Path(root) / str(ranks), ranks)
    publish("quick" if options.quick else "checkpoint", made)


if __name__ == "__main__":
    main()
