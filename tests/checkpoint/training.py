"""A small run with odd sizes, moments, averages and buffers, under any layout."""

from __future__ import annotations

import torch
import torch.distributed.fsdp  # before the ranks are forked: each would take a second to import it
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fnaccel import tree
from fnaccel.checkpoint import restore
from fnaccel.optim import adamw
from fnaccel.program.train_step import train_step
from fnaccel.step.loss import Mean
from fnaccel.strategies import distribute, strategy
from fnaccel.transforms import with_ema
from fnaccel.world.mesh import Mesh

LAYOUTS = [("local()", 1)]
LAYOUTS += [("ddp()", n) for n in (1, 2, 3, 4)]
LAYOUTS += [("fsdp(reshard_after_forward=False)", n) for n in (1, 2, 3, 4)]
LAYOUTS += [("fsdp()", n) for n in (1, 2, 3, 4)]
LAYOUTS += [("hsdp(1, 2)", 2), ("hsdp(2, 1)", 2), ("hsdp(1, 3)", 3), ("hsdp(2, 2)", 4)]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.line = nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.line(self.norm(x))


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.last = nn.Linear(width, 1)  # fewer rows than ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
    gap = model(batch["x"]) - batch["y"]
    return Mean(gap.square().sum(), weight=gap.numel())


def make(layout: str, *, width: int = 5, transform=lambda step: with_ema(step, 0.9), optimizer=None):
    return train_step(
        transform(squares),
        model=distribute(lambda: Net(width), strategy(layout)),
        optimizer=optimizer or adamw(1e-2),
    )


def batch(mesh: Mesh, number: int) -> dict[str, torch.Tensor]:
    """This rank's rows of one global batch; ragged where there are several ranks."""
    made = torch.Generator().manual_seed(number)
    rows = {"x": torch.randn(13, 7, generator=made), "y": torch.randn(13, 1, generator=made)}
    return tree.map(lambda x: x.tensor_split(mesh.batch_size)[mesh.batch_rank], rows)


def train(step, state, first: int, count: int):
    for number in range(first, first + count):
        state, _ = step(state, batch(step.mesh, number))
    return state


def gathered(value) -> dict[str, object]:
    """Every leaf by path, tensors whole: every rank must call it."""

    def whole(leaf):
        if hasattr(leaf, "full_tensor"):
            leaf = leaf.full_tensor()
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return {path: whole(leaf) for path, leaf in tree.items(value)}


def unequal(first: dict[str, object], second: dict[str, object]) -> list[str]:
    """The paths at which two gathered trees are not the same bits."""
    found = sorted(first.keys() ^ second.keys())
    for path in first.keys() & second.keys():
        a, b = first[path], second[path]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or not torch.equal(a, b):
                found.append(path)
        elif a != b:
            found.append(path)
    return found


def unlike(value, wanted: dict[str, object]) -> list[str]:
    """The paths at which this rank's part is not the same bits as its part of a gathered tree."""
    here, there = dict(tree.items(value)), dict(wanted)
    for path, leaf in here.items():
        if hasattr(leaf, "placements"):  # torch says which part that is; sends nothing
            place = leaf.device_mesh, leaf.placements
            there[path] = distribute_tensor(there[path], *place, src_data_rank=None).to_local()
            here[path] = leaf.to_local()
    return unequal(here, there)


def written_by_all(pools, write, layouts, root):
    """What each layout writes in a run of its own: its folder, and what rank 0's `write` returned."""
    found = {}
    for number, layout in enumerate(layouts):
        directory = root / str(number)
        found[layout] = directory, pools.run(layout[1], write, layout[0], directory)[0]
    return found


def check_restores_any(pools, build, layout, saved):
    """What every layout wrote is restored exactly under this one, and its own run goes on as it did."""
    directories = {source: directory for source, (directory, _) in saved.items()}
    written = {source: before for source, (_, (before, _)) in saved.items()}
    after = saved[layout][1][1]
    for rank, (wrong, later) in enumerate(
        pools.run(layout[1], read, build, layout[0], directories, written, layout, after)
    ):
        assert {source: paths for source, paths in wrong.items() if paths} == {}
        # every rank's buffers go on from rank 0's: afterwards only rank 0's are the undisturbed ones
        assert [path for path in later if rank == 0 or not path.startswith("buffers/")] == []


def read(build, layout, directories, written, own, after):
    """Restore what every layout wrote in one run, then its own, and go on: what differs, by source and by path."""
    step = build(layout)
    state = step.init(seed=4)
    wrong = {}
    for source, directory in directories.items():
        before = state
        state = restore(directory, like=state)
        assert step.adopt(state) is state
        assert before is not state
        wrong[source] = unlike(state, written[source])
    state = restore(directories[own], like=state, verify=True)
    return wrong, unequal(gathered(train(step, state, 2, 2)), after)
