"""What collectives over trees cost in fnaccel, beside Accelerate, Lightning Fabric and a call per leaf.

    OMP_NUM_THREADS=1 python benchmarks/collectives.py [--quick]

Contestants run on the same two gloo ranks, in turns; they must give the same results first.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tree_calls
import wire
from interleave import slope
from options import begin
from report import Row, compare, publish

from fnaccel.testing import RankPool

LEAVES = (1, 4, 16, 64)
SIZES = {"16 leaves of [8, 4], 2 KiB": (8, 4), "16 leaves of [64, 256], 1 MiB": (64, 256)}
BATCHES, BATCH, WIDTH = 20, 64, 256


def operation_rows(pool: RankPool, blocks: int) -> list[Row]:
    """gather, reduce and pad of 16 leaves at two sizes."""
    made: list[Row] = []
    for operation in ("gather", "reduce", "pad"):
        for name, (rows, width) in SIZES.items():
            found = pool.run(tree_calls.measure, operation, 16, rows, width, blocks, 10)[0]
            made += compare(f"{operation}: {name}", found, {"Accelerate": 0.2})
    return made


def sweep_rows(pool: RankPool, blocks: int) -> list[Row]:
    """How each grows with the number of leaves."""
    made: list[Row] = []
    for operation in ("gather", "reduce", "pad"):
        taken: dict[str, list[float]] = {}
        for leaves in LEAVES:
            found = pool.run(tree_calls.measure, operation, leaves, 8, 4, blocks, 10)[0]
            made += compare(f"{operation}: {leaves} leaves of [8, 4]", found)
            for name, seconds in found.items():
                taken.setdefault(name, []).append(seconds)
        slopes = {name: slope(list(LEAVES), seconds) for name, seconds in taken.items()}
        made += compare(f"{operation}, slope: each further leaf", slopes)
    return made


def dispatch_rows(ranks: int) -> list[Row]:
    """Bytes that one rank receives while rank 0 reads for all."""
    with RankPool(ranks, timeout=300) as pool:
        answers = pool.run(wire.dispatched, BATCHES, BATCH, WIDTH)
    totals = {name: sum(answer[name][1] for answer in answers) for name in answers[0]}
    if abs(totals["fnaccel"] - totals["Accelerate"]) > 1e-2:
        raise SystemExit(f"the ranks saw different rows: {totals}")
    ours, theirs = (answers[-1][name][0] / BATCHES for name in ("fnaccel", "Accelerate"))
    what = f"dispatch on {ranks} ranks: bytes received per rank and batch of {BATCH * WIDTH * 4:,}"
    return [Row(what, "Accelerate", ours, theirs, 1 / ranks, "bytes")]


def main() -> None:
    """Run everything."""
    options = begin(__doc__)
    blocks = 7 if options.quick else 21
    with RankPool(2, timeout=900) as pool:
        made = operation_rows(pool, blocks) + sweep_rows(pool, blocks // 2)
    for ranks in (2, 4):
        made += dispatch_rows(ranks)
    publish("quick" if options.quick else "collectives", made)


if __name__ == "__main__":
    main()
