"""A pipeline of ranks: fnaccel, and the schedules of `torch.distributed.pipelining` by hand.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--only step,bytes,idle,held,inference] [--quick]

`step` has the time of a step of a GPT on two ranks, and `bytes` what the two stages send each other in it.
`idle` has the share of a step in which ranks wait, on blocks that sleep: more ranks than cores do no harm.
`held` counts the activations that a schedule keeps. All contestants must reach the same losses first.
`inference` has the time of a call of `fa.big.pipeline`, beside Accelerate's `prepare_pippy`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import wire
from interleave import Samples, agree, race, race_steps, turns
from models import GPT, our_loss, rows, tokens
from options import Options, begin
from report import Row, compare, publish
from torch import nn
from torch.distributed import pipelining
from torch.utils.data import DataLoader, Dataset

import fnaccel as fa
from fnaccel.strategies.pipeline.schedules import READY, timed
from fnaccel.testing import RankPool

PARTS = ("step", "bytes", "idle", "held", "inference")
RATE, MICRO, ROWS = 1e-3, 8, 32
HAND = {"1f1b": "Schedule1F1B by hand", "gpipe": "ScheduleGPipe by hand"}
SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
SLEEPS = ((2, 4), (2, 8), (4, 4), (4, 8))
"""Ranks and micro-batches of `idle`."""
FORMULA = "(p - 1) / (m + p - 1)"
ZERO_BUBBLE = "(p - 1) / (6 m + p - 1)"
CHUNKS = 8
ALONE = {"embedding": 0, "head": 0}
BLOCKS_ALONE = fa.pipeline(weights=ALONE)
V_ALONE = fa.pipeline(weights=ALONE, schedule="zero_bubble", virtual=2)


class Stage(nn.Module):
    """The blocks of one rank of a GPT, with the embeddings on the first rank and the head on the last one."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        count = len(model.blocks) // ranks
        self.blocks = model.blocks[rank * count : (rank + 1) * count]
        self.embed, self.position = (model.embed, model.position) if rank == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if rank == ranks - 1 else (None, None)

    def forward(self, x: Any) -> torch.Tensor:
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class _Sleep(torch.autograd.Function):
    """Sleeps in the forward, and in the backward."""

    slept = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        _Sleep.rest(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Sleep.rest(ctx.seconds)
        return grad, None

    @staticmethod
    def rest(seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        _Sleep.slept += time.perf_counter() - began


class _SleepForWeight(torch.autograd.Function):
    """Sleeps where the gradient of a weight is computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Sleep.rest(ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A block with a fixed time for its forward, and as much for each part of its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(16, 16), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _SleepForWeight.apply(self.linear.weight, self.seconds)
        return _Sleep.apply(F.linear(x, weight, self.linear.bias), self.seconds)


class Sleepers(nn.Module):
    """Blocks for each rank."""

    def __init__(self, seconds: float, each: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeper(seconds / each) for _ in range(each * dist.get_world_size()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ours(
    model: Callable[[], nn.Module], strategy: Any, data: Dataset, micro: int = MICRO
) -> Iterator[torch.Tensor]:
    """fnaccel under a strategy."""
    train_step = fa.train_step(
        fa.accumulate(our_loss, micro), model=fa.distribute(model, strategy), optimizer=fa.adamw(RATE)
    )
    state = train_step.init(seed=0)
    shards = fa.shard(DataLoader(data, batch_size=ROWS))
    for state, metrics in fa.scan(train_step, state, shards, epochs=1_000_000):  # noqa: B007, B020
        yield metrics["loss"]


def by_hand(
    model: Callable[[], Any],
    stage_of: Callable[[Any], nn.Module],
    name: str,
    data: Dataset,
    micro: int = MICRO,
) -> Iterator[torch.Tensor]:
    """A schedule of torch, with fused AdamW. All ranks get the mean loss, as scripts do for their log."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    module = stage_of(model())
    stage = pipelining.PipelineStage(module, rank, last + 1, torch.device("cpu"))
    schedule = SCHEDULES[name](
        stage, micro, loss_fn=lambda output, y: F.cross_entropy(output.flatten(0, -2), y.flatten())
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    while True:
        for x, y in DataLoader(data, batch_size=ROWS):
            losses: list[torch.Tensor] = []
            optimizer.zero_grad(set_to_none=True)
            if rank == last:
                schedule.step(target=y, losses=losses, return_outputs=False)
            else:
                schedule.step(*([x] if rank == 0 else []), return_outputs=False)
            optimizer.step()
            loss = torch.stack(losses).mean().detach() if rank == last else torch.zeros(())
            dist.broadcast(loss, last)
            yield loss


def gpt_loops(name: str, width: int, layers: int) -> dict[str, Iterator[torch.Tensor]]:
    """Both libraries on a GPT, by one schedule."""

    def model() -> GPT:
        return GPT(width, layers)

    return {
        "fnaccel": ours(model, fa.pipeline(schedule=name), tokens()),
        HAND[name]: by_hand(model, Stage, name, tokens()),
    }


def measure_step(name: str, width: int, layers: int, blocks: int, calls: int) -> Samples:
    """Seconds per update on this rank."""
    return race_steps(gpt_loops(name, width, layers), check=4, blocks=blocks, calls=calls, tolerance=1e-5)


def measure_bytes(width: int, layers: int) -> dict[str, int]:
    """The bytes that this rank sends to another stage in a step. Shapes were exchanged in a step before."""
    sent: dict[str, int] = {}
    loops = gpt_loops("1f1b", width, layers)
    agree({name: [float(next(loop))] for name, loop in loops.items()}, 1e-5)
    for name, loop in loops.items():
        with wire.counting() as counted:
            next(loop)
        sent[name] = counted.get("isend", 0) + counted.get("send", 0)
    return sent


def measure_idle(seconds: float, micro: int, rounds: int) -> Samples:
    """The share of a step in which this rank does not sleep."""
    data = rows()
    loops = {
        "fnaccel": ours(lambda: Sleepers(seconds), BLOCKS_ALONE, data, micro),
        "fnaccel, zero_bubble": ours(lambda: Sleepers(seconds, 2), V_ALONE, data, micro),
        HAND["1f1b"]: by_hand(
            lambda: Sleepers(seconds), lambda model: model.blocks[dist.get_rank()], "1f1b", data, micro
        ),
    }
    firsts = {name: [float(next(loop))] for name, loop in loops.items()}
    firsts.pop("fnaccel, zero_bubble")  # it has twice as many blocks
    agree(firsts, 1e-5)
    taken: Samples = {name: [] for name in loops}
    for counts, name in turns(list(loops), rounds):
        dist.barrier()
        before, began = _Sleep.slept, time.perf_counter()
        next(loops[name])
        dist.barrier()  # until the last rank is done
        if counts:
            taken[name].append(1 - (_Sleep.slept - before) / (time.perf_counter() - began))
    return taken


def step_rows(pool: RankPool, options: Options) -> list[Row]:
    """The time of a step of each schedule."""
    width, layers = shape(options)
    blocks, calls = options.pick(15, 5, 1), options.pick(3, 3, 1)
    batch = f"{MICRO} micro-batches of {ROWS // MICRO} x 64 tokens"
    table: list[Row] = []
    for name, peer in HAND.items():
        samples = pool.run(measure_step, name, width, layers, blocks, calls)[0]
        table += compare(f"pipeline(2), {name}: step, {layers} layers, {batch}", samples, {peer: 1.03}, "ms")
    return table


def bytes_rows(pool: RankPool, options: Options) -> list[Row]:
    """The activations and gradients of a step."""
    sent = pool.run(measure_bytes, *shape(options))
    totals = {name: [float(sum(rank[name] for rank in sent))] for name in sent[0]}
    what = "pipeline(2), 1f1b: bytes between the stages in a step"
    return compare(what, totals, {HAND["1f1b"]: 1.0}, "bytes")


def idle_rows(options: Options) -> list[Row]:
    """The share of a step in which ranks wait, beside the formula and torch's schedule.

    The sleeps are long, because the formula counts no messages, and each one is between two sleeps.
    """
    table: list[Row] = []
    for ranks, micro in SLEEPS:
        with awake(), RankPool(ranks, timeout=300.0) as pool:
            found = pool.run(measure_idle, options.pick(0.3, 0.02, 0.002), micro, options.pick(3, 3, 1))
        means = {
            name: [sum(shares) / ranks for shares in zip(*(rank[name] for rank in found), strict=True)]
            for name in found[0]
        }
        v = means.pop("fnaccel, zero_bubble")
        formula = [(ranks - 1) / (micro + ranks - 1)] * len(v)
        samples = {"fnaccel": means["fnaccel"], FORMULA: formula, **means}
        what = f"pipeline({ranks}), 1f1b: time in which ranks wait, {micro} micro-batches"
        table += compare(what, samples, {FORMULA: 1.05}, "%")
        if micro >= 2 * ranks - 1:
            samples = {"fnaccel": v, "fnaccel, 1f1b": means["fnaccel"]}
            what = f"pipeline({ranks}), zero_bubble: time in which ranks wait, {micro} micro-batches"
            samples[ZERO_BUBBLE] = [(ranks - 1) / (6 * micro + ranks - 1)] * len(v)
            table += compare(what, samples, {"fnaccel, 1f1b": 1.0}, "%")
    return table


@contextlib.contextmanager
def awake() -> Generator[None]:
    """Keep the cores awake, by processes that yield to all others: waking takes milliseconds."""
    context = multiprocessing.get_context("spawn")
    spinners = [context.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def _spin() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def measure_inference(width: int, layers: int, blocks: int, calls: int) -> Samples:
    """Seconds of a call on this rank. All ranks get the output of the whole batch."""
    from accelerate import PartialState, prepare_pippy

    rank, length = dist.get_rank(), 64
    # prepare_pippy pads 32 rows for 8 chunks to 40, so a row is a chunk
    ids = torch.randint(100, (CHUNKS, length), generator=torch.Generator().manual_seed(0))

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(width, layers).eval()

    own = fa.big.pipeline(model(), chunks=CHUNKS)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    PartialState(cpu=True)  # it takes the process group that is there
    middle = f"blocks.{layers // 2}"
    traced: Any = prepare_pippy(model(), split_points=[middle], example_args=(ids[:1],), num_chunks=CHUNKS)
    stage = pipelining.PipelineStage(Stage(model()), rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, CHUNKS)
    found = own(ids)

    def everywhere(run: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            output = run(*([ids] if rank == 0 else []))
            output = torch.empty_like(found) if output is None else output
            dist.broadcast(output, 1)  # Accelerate's gather_output=True raises on CPUs
            return output

    contestants = {
        "fnaccel": lambda: own(ids),
        "prepare_pippy": lambda: everywhere(traced),
        "ScheduleGPipe by hand": lambda: everywhere(schedule.eval),
    }
    for call in contestants.values():
        torch.testing.assert_close(call(), found, atol=1e-5, rtol=1e-5)
    return race(contestants, blocks=blocks, calls=calls)


def inference_rows(pool: RankPool, options: Options) -> list[Row]:
    """The time of a call."""
    width, layers = shape(options)
    samples = pool.run(measure_inference, width, layers, options.pick(15, 5, 1), options.pick(5, 3, 1))[0]
    what = f"big.pipeline on 2 ranks: a call, {layers} layers, {CHUNKS} chunks of 1 x 64 tokens"
    return compare(what, samples, {"prepare_pippy": 1.03}, "ms")


def held_rows(ranks: int = 4) -> list[Row]:
    """The micro-batches whose activations each rank keeps at most, counted in the schedules."""
    held = {
        name: timed(READY[name](ranks, 1, MICRO), ranks, MICRO, name).most_held for name in ("1f1b", "gpipe")
    }
    return [
        Row(
            f"pipeline({ranks}), 1f1b: activations that rank {rank} keeps, {MICRO} micro-batches",
            "fnaccel, gpipe",
            [held["1f1b"][rank]],
            [held["gpipe"][rank]],
            unit="micro-batches",
        )
        for rank in range(ranks)
    ]


def shape(options: Options) -> tuple[int, int]:
    """Width and layers of the GPT."""
    return options.pick((128, 8), (128, 8), (32, 2))


def main() -> None:
    """Run the parts asked for."""
    options = begin("pipeline", __doc__, PARTS)
    table: list[Row] = []
    with RankPool(2, timeout=600.0) as pool:
        if "step" in options.parts:
            table += step_rows(pool, options)
        if "bytes" in options.parts:
            table += bytes_rows(pool, options)
        if "inference" in options.parts:
            table += inference_rows(pool, options)
    if "idle" in options.parts:
        table += idle_rows(options)
    if "held" in options.parts:
        table += held_rows()
    publish(options, table)


if __name__ == "__main__":
    main()
