"""Whether collectives give the right values, and how fast an all-reduce is."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import fnaccel as fa
from fnaccel.cli.selftest.results import CheckFailedError, NotAvailableError
from fnaccel.cli.selftest.running import Ranks, on_ranks

ELEMENTS = 4_000_000
"""Elements of the timed all-reduce: 16 MB in fp32."""


def check_collectives(ranks: Ranks) -> str:
    """Compare the collectives of fnaccel with known values. The detail has the speed of an all-reduce.

    Raises:
        NotAvailableError: there is one rank.
        CheckFailedError: values are wrong, or ranks failed.
    """
    if ranks.size == 1:
        raise NotAvailableError("one rank has nobody to talk to: -n 2")
    answers = on_ranks(ranks, _talk)
    wrong = sorted({name for names, _, _ in answers for name in names})
    if wrong:
        raise CheckFailedError(f"wrong values from {', '.join(wrong)}")
    _, seconds, backend = answers[0]
    return f"{backend}: {ELEMENTS * 4 / 1e6:.0f} MB all-reduced in {seconds * 1e3:.1f} ms"


def _talk() -> tuple[list[str], float, str]:
    """In a rank: the collectives with wrong values, the seconds of an all-reduce, and the backend."""
    with fa.start() as world:
        rank, size = world.rank, world.size
        values = torch.arange(3.0, device=world.device) + rank
        every = [torch.arange(3.0) + other for other in range(size)]
        total = torch.stack(every).sum(0)
        results = {
            "reduce": (fa.reduce(values, "sum"), total),
            "reduce of bf16": (fa.reduce(values.bfloat16(), "sum").float(), total),
            "reduce of int64": (fa.reduce(values.long(), "sum"), total.long()),
            "gather": (fa.gather(values), torch.cat(every)),
            "broadcast": (fa.broadcast(values), every[0]),
            "pad_across_processes": (
                fa.pad_across_processes(torch.ones(rank + 1, device=world.device)),
                torch.tensor([1.0] * (rank + 1) + [0.0] * (size - rank - 1)),
            ),
        }
        wrong = [name for name, (got, expected) in results.items() if not torch.equal(got.cpu(), expected)]
        if fa.collectives.gather_objects({"rank": rank}) != [{"rank": other} for other in range(size)]:
            wrong.append("gather_objects")
        return wrong, _time(world), world.backend


def _time(world: fa.World) -> float:
    """The shortest of five all-reduces, in seconds."""
    values = torch.ones(ELEMENTS, device=world.device)
    times: list[float] = []
    for _ in range(5):
        world.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)
