"""What collectives over trees cost in fnaccel, beside Accelerate, Lightning Fabric and a call per leaf.

    OMP_NUM_THREADS=1 python benchmarks/collectives.py [--only operations,leaves,dispatch] [--quick]

Contestants run on the same two gloo ranks, in turns; they must give the same results first.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tree_calls
import wire
from interleave import Samples, slopes
from options import Options, begin
from report import Row, compare, publish

from fnaccel.testing import RankPool

PARTS = ("operations", "leaves", "dispatch")
OPERATIONS = ("gather", "reduce", "pad")
LEAVES = (1, 4, 16, 64)
SIZES = {"16 leaves of [8, 4], 2 KiB": (8, 4), "16 leaves of [64, 256], 1 MiB": (64, 256)}
BATCHES, BATCH, WIDTH = 20, 64, 256


def operation_rows(pool: RankPool, options: Options) -> list[Row]:
    """gather, reduce and pad of 16 leaves at two sizes."""
    table: list[Row] = []
    blocks, calls = options.pick(21, 7, 1), options.pick(10, 10, 2)
    for operation in OPERATIONS:
        for name, (rows, width) in SIZES.items():
            samples = pool.run(tree_calls.measure, operation, 16, rows, width, blocks, calls)[0]
            table += compare(f"{operation}: {name}", samples, {"Accelerate": 0.2})
    return table


def leaves_rows(pool: RankPool, options: Options) -> list[Row]:
    """How the cost of each grows with the number of leaves."""
    table: list[Row] = []
    blocks, calls = options.pick(10, 3, 1), options.pick(10, 10, 2)
    swept = options.pick(LEAVES, LEAVES, LEAVES[:2])
    for operation in OPERATIONS:
        measured: list[Samples] = []
        for leaves in swept:
            measured.append(pool.run(tree_calls.measure, operation, leaves, 8, 4, blocks, calls)[0])
            table += compare(f"{operation}: {leaves} leaves of [8, 4]", measured[-1])
        table += compare(f"{operation}, slope: each further leaf", slopes(swept, measured))
    return table


def dispatch_rows(ranks: int) -> list[Row]:
    """Bytes that one rank receives while rank 0 reads for all."""
    with RankPool(ranks, timeout=300) as pool:
        answers = pool.run(wire.dispatched, BATCHES, BATCH, WIDTH)
    totals = {name: sum(answer[name][1] for answer in answers) for name in answers[0]}
    if max(totals.values()) - min(totals.values()) > 1e-2:
        raise SystemExit(f"the ranks saw different rows: {totals}")
    received = {name: [bytes_ / BATCHES] for name, (bytes_, _) in answers[-1].items()}
    what = f"dispatch on {ranks} ranks: bytes received per rank and batch of {BATCH * WIDTH * 4:,}"
    return compare(what, received, {"Accelerate": 1 / ranks}, "bytes")


def main() -> None:
    """Run the parts asked for."""
    options = begin("collectives", __doc__, PARTS, ("Accelerate", "Lightning Fabric"))
    table: list[Row] = []
    with RankPool(2, timeout=900) as pool:
        if "operations" in options.parts:
            table += operation_rows(pool, options)
        if "leaves" in options.parts:
            table += leaves_rows(pool, options)
    if "dispatch" in options.parts:
        for ranks in (2, 4):
            table += dispatch_rows(ranks)
    publish(options, table)


if __name__ == "__main__":
    main()
