"""`fa.layout`: how parameters lie over ranks, as a table, and the blocks of one of them. `summary`: by layer.

It reads the DTensors that states show. No value is read, and no rank is asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, overload

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.errors import ArgumentError, CapabilityError, UnknownNameError, nearest
from fnaccel.program.train_step import TrainStep
from fnaccel.state import TrainState
from fnaccel.step.html_table import table
from fnaccel.texts import counted, ranks_of, size_of
from fnaccel.tree import Tree

_WHERE = "fa.layout"
_MOST_RANKS = 5
"""The ranks of a block that are shown."""

Interval = tuple[int, int]


@attrs.frozen(kw_only=True)
class ArrayRow:
    """A line of the table: one parameter, and this rank's part of it.

    Attributes:
        name: its canonical name.
        shape, dtype: of the whole parameter.
        axes: which dimension lies over which mesh axis, or "whole".
        part: the shape of this rank's part.
        size: the bytes of this part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: str
    part: tuple[int, ...]
    size: int

    def cells(self) -> tuple[str, ...]:
        """Its texts, as the table shows them."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (self.name, str(list(self.shape)), dtype, self.axes, str(list(self.part)), size_of(self.size))


_HEAD = ("parameter", "shape", "dtype", "axes", "this rank", "bytes")


@attrs.frozen
class LayoutTable:
    """The layout of parameters on this rank. Print it.

    Attributes:
        rows: a line for each parameter.
        title: the number of parameters, and the bytes of this rank and of all.

    Example:
        >>> print(fa.layout(state))
        13 parameters, 38 kB: this rank holds 38 kB
        ...
    """

    rows: tuple[ArrayRow, ...]
    title: str

    def __str__(self) -> str:
        return "\n".join([self.title, *_aligned([_HEAD, *(row.cells() for row in self.rows)])])

    def _repr_html_(self) -> str:
        return table(self.title, [_HEAD, *(row.cells() for row in self.rows)])


@attrs.frozen
class ArrayBlocks:
    """The blocks of one parameter, with the ranks that hold each. Print it.

    Attributes:
        title: name, dtype, shape, and axes.
        blocks: (interval of each dimension, ranks that hold this block).

    Example:
        >>> fa.layout(state, "lm_head.weight").blocks
        ((((0, 16), (0, 32)), (0,)),)
    """

    title: str
    blocks: tuple[tuple[tuple[Interval, ...], tuple[int, ...]], ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *_aligned(self._lines())])

    def _repr_html_(self) -> str:
        return table(self.title, self._lines())

    def _lines(self) -> list[tuple[str, ...]]:
        spans = ((", ".join(f"{start}:{stop}" for start, stop in box), ranks) for box, ranks in self.blocks)
        return [("block", "held by"), *((span, _holders(ranks)) for span, ranks in spans)]


def _holders(ranks: Sequence[int]) -> str:
    """Ranks by number, the first ones and the last if there are many."""
    if len(ranks) <= _MOST_RANKS:
        return ranks_of(ranks)
    return f"{ranks_of(ranks[: _MOST_RANKS - 1])}, ... {ranks[-1]}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


@attrs.frozen(kw_only=True)
class LayerRow:
    """A line of a summary: one layer, with the layers in it.

    Attributes:
        path: its path in the model.
        kind: its class.
        shapes: of its own parameters, by name.
        parameters: how many it has.
        trained: how many of them are trained.
        held: how many of them this rank holds.
    """

    path: str
    kind: str
    shapes: dict[str, tuple[int, ...]]
    parameters: int
    trained: int
    held: int

    def cells(self) -> tuple[str, ...]:
        """Its texts, as the table shows them."""
        depth, _, own = self.path.rpartition(".")
        name = "  " * (depth.count(".") + bool(depth)) + own
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return (name, self.kind, shapes, *(f"{n:,}" for n in (self.parameters, self.trained, self.held)))


_LAYERS = ("layer", "class", "shapes", "parameters", "trained", "this rank")


@attrs.frozen
class Summary:
    """The layers of a train step's models on this rank. Print it. A notebook shows it as a table.

    Attributes:
        rows: a line for each layer.
        memory: the bytes of this rank, by what they hold. Activations are not counted.
        title: the strategy, and the number of parameters.

    Example:
        >>> train_step.summary().memory["gradients"]
        37952
    """

    rows: tuple[LayerRow, ...]
    memory: dict[str, int]
    title: str

    def __str__(self) -> str:
        return "\n".join([self.title, *_aligned(self._table()), self._held()])

    def _repr_html_(self) -> str:
        return table(self.title, self._table(), [self._held()])

    def _table(self) -> list[tuple[str, ...]]:
        return [_LAYERS, *(row.cells() for row in self.rows)]

    def _held(self) -> str:
        parts = ", ".join(f"{size_of(size)} {name}" for name, size in self.memory.items() if size)
        return f"this rank holds {size_of(sum(self.memory.values()))} without activations: {parts}"


def summary(train_step: TrainStep, depth: int) -> Summary:
    """See `TrainStep.summary`."""
    state, layout = train_step.live_state, train_step.engine.layout
    trained = {leaf.name for leaf in layout.leaves}
    found = {name: _row(name, value) for name, value in layout.parameters.items()}
    rows: list[LayerRow] = []
    models = layout.model if isinstance(layout.model, dict) else {"": layout.model}
    for key, root in models.items():
        for name, module in root.named_modules():
            if name.count(".") + bool(name) > depth:
                continue
            inside = f"{name}." if name else ""
            path = f"{key}/{inside}" if key else inside
            within = {each.removeprefix(path): row for each, row in found.items() if each.startswith(path)}
            if within:
                row = LayerRow(
                    path=path.rstrip("./") or "model",
                    kind=type(module).__name__.removeprefix("FSDP"),
                    shapes={each: row.shape for each, row in within.items() if "." not in each},
                    parameters=sum(math.prod(row.shape) for row in within.values()),
                    trained=sum(math.prod(row.shape) for row in within.values() if row.name in trained),
                    held=sum(math.prod(row.part) for row in within.values()),
                )
                rows.append(row)
    trees = {"slots of the optimizer": state and state.opt, "averages": state and state.ema}
    held = {name: _held_by(values) for name, values in {**trees, "buffers": layout.buffers}.items()}
    gradients = sum(row.size for row in found.values() if row.name in trained)
    memory = {"parameters": sum(row.size for row in found.values()), "gradients": gradients, **held}
    count = counted(sum(math.prod(row.shape) for row in found.values()), "parameter")
    return Summary(tuple(rows), memory, f"{train_step.spec.strategy}: {count}")


def _held_by(values: Tree) -> int:
    tensors = [value for value in tree.leaves(values) if isinstance(value, torch.Tensor)]
    return sum(_row("", value).size for value in tensors)


@overload
def layout(state: TrainState | TrainStep | Tree) -> LayoutTable: ...
@overload
def layout(state: TrainState | TrainStep | Tree, name: str) -> ArrayBlocks: ...
def layout(state: TrainState | TrainStep | Tree, name: str | None = None) -> LayoutTable | ArrayBlocks:
    """How the parameters of a state lie over the ranks. Print the result. A notebook shows it as a table.

    No value is read, and other ranks need not call it. `fa.simulate` shows the layout on any number of ranks.

    Args:
        state: a state, a train step that has one, or any pytree of tensors, such as `state.opt`.
        name: of one parameter, to list its blocks with the ranks that hold them.

    Returns:
        A table with a line for each parameter: its shape and dtype, the axes of the mesh over which its
        dimensions lie, this rank's part and its bytes. Or the blocks of one parameter.

    Raises:
        StaleStateError: the state was donated.
        UnknownNameError: there is no such parameter. Names the nearest.
        ArgumentError: a tree without tensors, or a train step without a state.
        CapabilityError: the blocks of a value that a runtime such as DeepSpeed keeps in its own way.

    Example:
        >>> with fa.simulate(ranks=4):
        ...     train_step = make(loss_fn, strategy="hsdp(2, 2)")
        ...     state = train_step.init()
        ...     print(fa.layout(state, "lm_head.weight"))
        lm_head.weight: float32 [16, 32], dim 0 over dp_shard
        block       held by
        0:8, 0:32   ranks 0, 2
        8:16, 0:32  ranks 1, 3
    """
    named = _tensors_of(state)
    if name is None:
        rows = tuple(_row(path, value) for path, value in named.items())
        own, whole = sum(row.size for row in rows), sum(_bytes(row.shape, row.dtype) for row in rows)
        title = f"{counted(len(rows), 'parameter')}, {size_of(whole)}: this rank holds {size_of(own)}"
        return LayoutTable(rows, title)
    if name not in named:
        raise UnknownNameError(
            f"there is no parameter {name!r}", where=f"{_WHERE}(state, name)", fix=nearest(name, named)
        )
    value = named[name]
    if isinstance(value, Remote):
        raise CapabilityError(
            f"a runtime keeps {name} in its own way, which has no blocks",
            where=f"{_WHERE}(state, name)",
            fix="fa.layout(state) shows its shape",
        )
    row = _row(name, value)
    dtype = str(row.dtype).removeprefix("torch.")
    return ArrayBlocks(f"{name}: {dtype} {list(row.shape)}, {row.axes}", _blocks(value))


def _tensors_of(state: TrainState | TrainStep | Tree) -> dict[str, Any]:
    if isinstance(state, TrainStep):
        live = state.live_state
        if live is None:
            raise ArgumentError(
                "this train step has no live state", where=_WHERE, fix="state = train_step.init(seed=0) first"
            )
        state = live
    values = state.params if isinstance(state, TrainState) else state
    leaves = dict(tree.items(values))
    # in the order of the model, as the dict has it. A tree is walked by sorted key, with block 10 before 2
    order = [name for name in values if name in leaves] if isinstance(values, dict) else []
    named = {name: leaves[name] for name in [*order, *leaves] if isinstance(leaves[name], torch.Tensor)}
    if not named:
        raise ArgumentError(
            f"{type(state).__name__} holds no tensors",
            where=_WHERE,
            fix="give a state: fa.layout(train_step.init()). Under fa.simulate it needs no other ranks",
        )
    return named


def _row(name: str, value: Any) -> ArrayRow:
    local = value if isinstance(value, Remote) else _torch.local_of(value)
    return ArrayRow(
        name=name,
        shape=tuple(value.shape),
        dtype=value.dtype,
        axes=_axes(value),
        part=tuple(local.shape),
        size=_bytes(local.shape, value.dtype),
    )


def _bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _axes(value: Any) -> str:
    if isinstance(value, Remote):
        return "kept by the runtime"
    if value.device.type == "xla":  # one process has all of it, and annotations place it on devices
        return "placed by XLA"
    names = value.device_mesh.mesh_dim_names if hasattr(value, "placements") else ()
    cuts = [
        placement.along(name)  # a tensor of one stage
        if hasattr(placement, "along")
        else f"dim {placement.dim} over {name}"
        + (f" ({_matrices(placement)} matrices)" if _matrices(placement) > 1 else "")
        for placement, name in zip(getattr(value, "placements", ()), names, strict=True)
        if not placement.is_replicate()
    ]
    return ", ".join(cuts) or "whole"


def _matrices(placement: Any) -> int:
    """How many matrices are packed in the dimension, each of which is cut."""
    return int(getattr(placement, "split_factor", 1))


def _blocks(value: Any) -> tuple[tuple[tuple[Interval, ...], tuple[int, ...]], ...]:
    """The blocks of a tensor in order, and the ranks that hold each. Ranks without elements hold none."""
    whole = tuple((0, size) for size in value.shape)
    if not hasattr(value, "placements"):
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return ((whole, tuple(range(world))),)
    holders: dict[tuple[Interval, ...], list[int]] = {}
    ranks = value.device_mesh.mesh
    for coordinate in itertools.product(*map(range, ranks.shape)):
        for box in _boxes(value, coordinate):
            if all(start < stop for start, stop in box):
                holders.setdefault(box, []).append(int(ranks[coordinate]))
    return tuple((box, tuple(sorted(holders[box]))) for box in sorted(holders))


def _boxes(value: Any, coordinate: Sequence[int]) -> list[tuple[Interval, ...]]:
    """The blocks at one place of the mesh: one, or one of each packed matrix."""
    intervals: list[list[Interval]] = [[(0, size)] for size in value.shape]
    for placement, place, size in zip(value.placements, coordinate, value.device_mesh.shape, strict=True):
        if hasattr(placement, "along"):  # one stage has all of it
            if place != placement.rank:
                return []
            continue
        if placement.is_replicate():
            continue
        parts: list[Interval] = []
        for start, stop in intervals[placement.dim]:
            matrices = _matrices(placement)
            length = (stop - start) // matrices
            for number in range(matrices):
                first = start + number * length
                chunk = -(-length // size)
                low, high = (min(first + at * chunk, first + length) for at in (place, place + 1))
                parts.append((low, high))
        intervals[placement.dim] = parts
    return list(itertools.product(*intervals))
