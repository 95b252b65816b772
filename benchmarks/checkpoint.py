"""What saving and restoring cost in fnaccel, beside the bytes alone, Accelerate and torch's DCP.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--only time,memory] [--quick]

Contestants hold the same model and moments, and take turns; each writes to an empty folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import saving
from interleave import Samples, slopes, turns
from options import Options, begin
from report import Row, compare, publish

import fnaccel as fa
from fnaccel.testing import RankPool

PARTS = ("time", "memory")
LAYERS = {"48 MiB": 4, "480 MiB": 40}  # parameters and two moments
SMALL = {"12 MiB": 1, "24 MiB": 2}
MIB = 1 << 20


def time_all(contest: saving.Contest, rounds: int) -> dict[str, Samples]:
    """Seconds of each round: save, stall of a save in the background, restore."""
    savers, stallers = contest.savers(), contest.stallers()
    taken: dict[str, Samples] = {"save": {}, "stall": {}, "restore": {}}
    for counts, name in turns(list(savers), rounds):
        contest.clear(name)
        contest.settle()
        seconds, _ = saving.timed(savers[name])
        if counts:
            taken["save"].setdefault(name, []).append(seconds)
    for counts, name in turns(list(stallers), rounds):
        contest.clear(name)
        contest.settle()
        seconds, wait = saving.timed(stallers[name])
        wait()
        if counts:
            taken["stall"].setdefault(name, []).append(seconds)
    restorers = contest.restorers()
    for counts, name in turns(list(restorers), rounds):
        contest.settle()
        seconds, _ = saving.timed(restorers[name])
        if counts:
            taken["restore"].setdefault(name, []).append(seconds)
    return taken


def rows_of(size: str, taken: dict[str, Samples]) -> list[Row]:
    """Rows of one size."""
    stall = {
        "fnaccel": taken["stall"]["fnaccel"],
        "sync save": taken["save"]["fnaccel"],
        "DCP async_save": taken["stall"]["DCP async"],
    }
    return [
        *compare(f"save, {size}", taken["save"], {"write + fsync": 1.15}, "ms"),
        *compare(f"save_async, {size}: the loop is blocked", stall, {"sync save": 0.10}, "ms"),
        *compare(f"restore, {size}", taken["restore"], {"load_file + copy": 1.15}, "ms"),
    ]


def time_rows(options: Options, folder: Path) -> list[Row]:
    """Each size, and the cost of each further MiB."""
    table: list[Row] = []
    sizes: list[int] = []
    measured: dict[str, list[Samples]] = {"save": [], "restore": []}
    with fa.start(device="cpu"):
        for size, layers in options.pick(LAYERS, LAYERS, SMALL).items():
            contest = saving.Contest(folder, layers)
            taken = time_all(contest, options.pick(9, 3, 1))
            table += rows_of(size, taken)
            sizes.append(contest.bytes // MIB)
            for kind, samples in measured.items():
                samples.append(taken[kind])
    for kind, samples in measured.items():
        table += compare(f"{kind}, slope: each further MiB", slopes(sizes, samples))
    return table


def memory_rows(options: Options, folder: Path) -> list[Row]:
    """The most that a rank held besides its shard of the state."""
    table: list[Row] = []
    size = options.pick("480 MiB", "480 MiB", "24 MiB")
    for ranks in options.pick((2, 4), (2, 4), (2,)):
        with RankPool(ranks, timeout=600) as pool:
            answers = pool.run(saving.memory, {**LAYERS, **SMALL}[size], folder / str(ranks))
        for kind in answers[0]:
            most, held = max(answer[kind] for answer in answers)
            samples = {"fnaccel": [most / MIB], "the rank's shard": [held / MIB]}
            what = f"{kind} on {ranks} ranks (fsdp), {size}: extra memory"
            table += compare(what, samples, unit="MiB")
    return table


def main() -> None:
    """Run the parts asked for."""
    options = begin("checkpoint", __doc__, PARTS, ("Accelerate",))
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if "time" in options.parts:
            table += time_rows(options, Path(folder))
        if "memory" in options.parts:
            table += memory_rows(options, Path(folder))
    publish(options, table)


if __name__ == "__main__":
    main()
