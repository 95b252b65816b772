"""The aux of a loss: a pytree whose leaves combine over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.collectives import gather_objects
from fnaccel.engine.rows import Rows, concatenated, rows_of_concat
from fnaccel.errors import LossError
from fnaccel.step.loss import Concat, Extreme, Mean, Scalar, Sum, counted, is_combinable, parts_of, readable
from fnaccel.step.step import RESERVED
from fnaccel.tree import Tree

_WHERE = "the loss function's aux"
Shape = tuple[int, ...]


def plain(value: Tree) -> Any:
    """A value to add up: without its graph, and in fp32 at least (bf16 would stop counting at 256)."""
    if not isinstance(value, torch.Tensor):
        return value
    plain_value = value.detach()
    return plain_value.float() if plain_value.dtype in (torch.bfloat16, torch.float16) else plain_value


def divide(total: torch.Tensor, weight: Scalar, device: torch.device) -> torch.Tensor:
    """A total over its weight, as a tensor: 0 where the weight is 0. Both may have dimensions."""
    if not isinstance(total, torch.Tensor):
        total = torch.tensor(float(total), device=device)
    if not isinstance(weight, torch.Tensor):
        return total / weight if weight else torch.zeros_like(total)
    if not weight.dim() and readable(weight):
        return total / weight if float(weight) else torch.zeros_like(total)
    return torch.where(weight == 0, torch.zeros_like(total), total / weight)


def packed(values: list[Any], device: torch.device) -> torch.Tensor:
    """Numbers and tensors of any shape as one vector that ranks can sum. Nothing waits for the device."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not any(isinstance(v, torch.Tensor) for v in values):
        return torch.tensor([float(v) for v in values], dtype=dtype).to(device, non_blocking=True)
    # filled on the device: a copy of a host value would wait for all work before it
    tensors = [
        v.detach().to(device, dtype)
        if isinstance(v, torch.Tensor)
        else torch.full((), float(v), dtype=dtype, device=device)
        for v in values
    ]
    if any(tensor.dim() for tensor in tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    return torch.stack(tensors)


def unpacked(vector: torch.Tensor, shapes: Sequence[Shape]) -> Sequence[torch.Tensor]:
    """The values that `packed` put into a vector, as views of it."""
    if not any(shapes):
        return vector.unbind()
    parts = vector.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def check_aux(aux: Tree) -> None:
    """Raise LossError if aux can't be reported. torch.compile can trace this function."""
    if isinstance(aux, dict):
        if any(name in RESERVED for name in aux):
            raise _taken([name for name in aux if name in RESERVED])
        for value in aux.values():
            _check_leaf(value)
    else:
        _check_leaf(aux)


def _check_leaf(value: Tree) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _check_leaf(inner)
    elif isinstance(value, (list, tuple)):  # a union is not traceable
        for inner in value:
            _check_leaf(inner)
    elif isinstance(value, (torch.Tensor, str)):
        parts_of(value, 1, _WHERE)
    elif isinstance(value, Concat):
        rows_of_concat(value, _WHERE)


def _taken(names: list[str]) -> LossError:
    return LossError(
        f"aux holds {', '.join(map(repr, sorted(names)))}, which the step itself reports",
        where=_WHERE,
        fix="give it another name",
    )


def structure(aux: AuxValues, weighted: bool | None) -> str:
    """The text on which ranks have to agree: the kind of the loss, and the structure of its aux.

    Args:
        aux: the aux of this rank.
        weighted: whether the loss is an `fa.Mean`. None if the weights come from the batch.
    """
    kind = {True: "fa.Mean", False: "a bare loss", None: "a loss"}[weighted]
    return f"{kind} with {aux.shape or 'no aux'}"


def mixed_kinds(place: str) -> LossError:
    """The error for a bare loss beside an `fa.Mean`, which would weigh 1 beside a count."""
    return LossError(
        f"the loss function returned fa.Mean for one {place} and a bare loss for another",
        where="the loss function",
        fix="return fa.Mean(total, weight=...) on every path",
    )


class Agreement:
    """The structure of the loss on every rank, compared once in a group, since ranks sum values by position.

    Attributes:
        rows: the numbers of rows of the micro-batches of all ranks, that time.
        empty: aux without values, if some rank has no loss.
    """

    __slots__ = ("_groups", "empty", "rows", "seen")

    def __init__(self) -> None:
        self.empty: Any = None
        self.seen: str | None = None
        self._groups: list[dist.ProcessGroup] = []
        self.rows: frozenset[int] = frozenset()

    def check(
        self, shape: str | None, group: dist.ProcessGroup, rows: Iterable[int] = (), empty: Any = None
    ) -> None:
        """Compare with the other ranks of a group the first time, and with that time afterwards.

        Args:
            shape: the structure. None on a rank without a loss, which takes what the others have.
            group: the ranks.
            rows: of the micro-batches of this rank.
            empty: aux without values, for ranks without a loss.

        Raises:
            LossError: ranks or calls differ. If ranks differ, all ranks raise.
        """
        if group not in self._groups:
            shapes, counts, empties = zip(*gather_objects((shape, set(rows), empty), over=group), strict=True)
            self.rows = frozenset[int]().union(*counts)
            self.empty = next((each for each in empties if each is not None), None)
            if len(set(shapes) - {None}) > 1:
                listed = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(shapes) if text)
                raise LossError(
                    f"the losses of ranks differ: {listed}",
                    where="the return value of the loss function",
                    fix="return the same kind of loss and the same keys on every rank, whatever its rows are",
                )
            self._groups.append(group)
            self.seen = shape
        elif shape is not None and self.seen != shape:
            raise LossError(
                f"the loss changed its structure between calls: {shape} after {self.seen}",
                where="the return value of the loss function",
                fix="return the same kind of loss and the same keys in every call",
            )


class Accumulation:
    """The leaves of a pytree, added up over batches: a total and a weight each, or the rows of a `Concat`.

    Args:
        partial_rows: whether each rank has a part of each row, so that no rank can return whole rows.
    """

    __slots__ = ("_concats", "_pairs", "_partial_rows", "_shapes", "_structure")
    name: str
    per: str
    where: str

    def __init__(self, *, partial_rows: bool = False) -> None:
        self._partial_rows = partial_rows
        self._pairs: list[tuple[Any, Any]] = []
        self._concats: list[list[Rows]] = []
        self._structure: Any = None
        self._shapes: list[tuple[Shape, Shape]] = []

    def pair(self, leaf: Tree, rows: int) -> tuple[Any, Any]:
        """The total and the weight of a leaf, as they are added up."""
        raise NotImplementedError

    def rows(self, leaf: Concat) -> Rows:
        """The rows of a leaf, as they are kept."""
        return rows_of_concat(leaf, self.where)

    def add(self, values: Tree, rows: int) -> None:
        """Add the values of one batch. Those of a filler (0 rows) only give the structure.

        Raises:
            LossError: the structure changed, a leaf can't be added up, or rows of which ranks have parts.
        """
        leaves, structure = tree.flatten(values, is_leaf=is_combinable)
        if self._partial_rows and any(isinstance(leaf, Concat) for leaf in leaves):
            raise LossError(
                f"{self.name} holds fa.Concat, and each row is split over ranks beyond the batch axis",
                where=self.where,
                fix="return fa.Sum or fa.Mean, which all ranks add up; or gather the parts of a row by hand, "
                "with fa.gather(x, over=train_step.mesh[axis]), and keep them yourself",
            )
        first = self._structure is None
        if first:
            self._structure = [leaf if isinstance(leaf, Concat) else type(leaf) for leaf in leaves], structure
            self._shapes = [_shapes_of(leaf) for leaf in leaves]
            for index, (total, weight) in enumerate(self._shapes):
                if weight:
                    self._check_weight(index, total, weight)
            self._pairs = [(0.0, 0.0)] * len(leaves)
            self._concats = [[] for _ in leaves]
        elif structure != self._structure[1]:
            raise LossError(
                f"{self.name} changed structure between {self.per}: {structure} after {self._structure[1]}",
                where=self.where,
                fix=f"return the same keys for all {self.per}",
            )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Concat):
                # no rows of a filler, but of their shape: ranks without rows send it
                batch = self.rows(leaf)
                self._concats[index].append(batch if rows else batch[:0])
            elif isinstance(leaf, Extreme):
                value = plain(torch.as_tensor(leaf.value))[None]
                before: Any = self._concats[index]
                seen = torch.cat([*before, value if rows else value[:0]])
                self._concats[index] = [leaf.fold(seen)[None] if len(seen) else seen]
            elif rows:
                if not first:
                    self._check_shape(index, leaf)
                old_total, old_weight = self._pairs[index]
                try:
                    total, weight = self.pair(leaf, rows)
                    self._pairs[index] = (old_total + total, old_weight + weight)
                except TypeError as error:
                    value = getattr(leaf, "value", getattr(leaf, "total", leaf))  # of a Sum, of a Mean, bare
                    raise LossError(
                        f"{self.name}: {type(value).__name__} can't be added up over {self.per} and ranks",
                        where=self.where,
                        fix="return numbers, tensors, fa.Mean, fa.Sum or fa.Concat; print or log the rest",
                    ) from error

    def _check_weight(self, index: int, total: Shape, weight: Shape) -> None:
        """Raise LossError unless a weight fits its total: one weight, or one for each element."""
        fits = len(weight) <= len(total) and all(
            w in (1, t) for w, t in zip(reversed(weight), reversed(total), strict=False)
        )
        if not fits:
            raise LossError(
                f"{self.name}: {self._named(index)} has a total of shape {list(total)} and a weight of shape "
                f"{list(weight)}",
                where=self.where,
                fix="give one weight, or a weight for each element of the total",
            )

    def _check_shape(self, index: int, leaf: Tree) -> None:
        """Raise LossError if a leaf changed its shape: torch would broadcast one to the other, or fail."""
        shapes = _shapes_of(leaf)
        if shapes != self._shapes[index]:
            raise LossError(
                f"{self.name}: {self._named(index)} changed its shape between {self.per}: "
                f"{_text(shapes)} after {_text(self._shapes[index])}",
                where=self.where,
                fix="return the same shape for all "
                f"{self.per}; or fa.Concat(rows), which puts rows together instead of adding them",
            )

    def _named(self, index: int) -> str:
        kind, path = self._structure[0][index], self._paths()[index]
        return f"fa.{kind.__name__} {path!r}" if path else f"fa.{kind.__name__}"

    def _paths(self) -> list[str]:
        kinds, structure = self._structure
        return tree.paths(tree.unflatten(structure, range(len(kinds))))

    @property
    def kinds(self) -> str:
        """The kinds of its leaves. Those with dimensions by name and shape."""
        names = ["Concat" if isinstance(kind, Concat) else kind.__name__ for kind in self._structure[0]]
        if any(map(any, self._shapes)):
            names = [
                f"{name} {path!r} of shape {_text(shapes)}" if any(shapes) else name
                for name, path, shapes in zip(names, self._paths(), self._shapes, strict=True)
            ]
        return ", ".join(names)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of `values`."""
        return [shape for pair in self._shapes for shape in pair]

    @property
    def values(self) -> list[Any]:
        """Totals and weights by turns, to be summed over ranks."""
        values = [value for pair in self._pairs for value in pair]
        if not any(map(any, self._shapes)):
            return values
        # a rank whose batches are all fillers has no sums, and sends zeros of their shape
        return [
            torch.zeros(shape) if shape and not isinstance(value, torch.Tensor) else value
            for value, shape in zip(values, self.shapes, strict=True)
        ]

    def put(self, values: Sequence[Any]) -> None:
        """Take the sums of `values` over all ranks."""
        self._pairs = [(values[2 * i], values[2 * i + 1]) for i in range(len(self._pairs))]

    def combined(self, mean: Callable[..., Any], group: dist.ProcessGroup | None, **order: bool) -> Any:
        """The pytree that totals, weights and rows make. Rows are put together by `concatenated`."""
        kinds, structure = self._structure
        values: list[Any] = []
        for kind, (total, weight), rows in zip(kinds, self._pairs, self._concats, strict=True):
            if isinstance(kind, Concat):
                values.append(concatenated(rows, kind.pad, group, where=self.where, **order))
            elif issubclass(kind, Extreme):
                found: Any = concatenated(rows, None, group, where=self.where, **order)
                values.append(kind.fold(found))
            else:
                values.append(total if kind is Sum else mean(total, weight))
        return tree.unflatten(structure, values)


class AuxValues(Accumulation):
    """The aux of one step: added up over micro-batches, then over ranks."""

    __slots__ = ()
    name = "aux"
    per = "micro-batches"
    where = _WHERE

    def take(self, aux: Tree, *, valid: bool) -> None:
        """Add the aux of one micro-batch. A filler's counts for nothing but gives its structure."""
        if aux is not None:
            self.add(aux, int(valid))

    def pair(self, leaf: Tree, rows: int) -> tuple[Any, Any]:
        """Totals and weights without their graphs."""
        total, weight = parts_of(leaf, rows, self.where)
        return plain(total), plain(weight)

    def rows(self, leaf: Concat) -> Rows:
        """Rows without their graphs."""
        rows: Any = super().rows(leaf)
        return [plain(row) for row in rows] if isinstance(rows, list) else plain(rows)

    def emptied(self) -> AuxValues:
        """The same leaves without values: what a rank without a loss adds to those of others."""
        empty = AuxValues(partial_rows=self._partial_rows)
        if self._structure is not None:
            kinds = [
                replace(k, value=k.value[:0]) if isinstance(k, Concat) else k for k in self._structure[0]
            ]
            empty._structure, empty._shapes = (kinds, self._structure[1]), self._shapes
            empty._pairs = [(0.0, 0.0)] * len(self._pairs)
            empty._concats = [[rows[:0] for rows in each[:1]] for each in self._concats]
        return empty

    @property
    def shape(self) -> str:
        """The structure that has to be equal on all ranks."""
        if self._structure is None:
            return ""
        return f"{self.kinds} in {self._structure[1]}"

    def finish(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
        """The metrics they make, as device tensors."""
        if self._structure is None:
            return {}

        def mean(total: Any, weight: Any) -> torch.Tensor:
            return divide(total, weight, device).float()

        aux = self.combined(mean, group, by_batch=False, compared=False)
        if not isinstance(aux, dict):
            return {"aux": aux}
        taken = RESERVED & aux.keys()
        if taken:
            raise _taken([*taken])
        return aux


def _shapes_of(leaf: Tree) -> tuple[Shape, Shape]:
    """The shapes of the total and the weight of a leaf. Those of rows and of bare numbers are ()."""
    if isinstance(leaf, Sum):
        return getattr(leaf.value, "shape", ()), ()
    if isinstance(leaf, Mean):
        return getattr(leaf.total, "shape", ()), getattr(leaf.weight, "shape", ())
    return (), ()


def _text(shapes: tuple[Shape, Shape]) -> str:
    total, weight = map(list, shapes)
    return f"{total} with weights of shape {weight}" if weight else f"{total}"


def mapped(fn: Callable[[Any], Any], aux: Tree) -> Any:
    """Aux with `fn(value)` in the place of each value, in new containers. torch.compile can trace it."""
    if isinstance(aux, Mean):
        return Mean(fn(aux.total), fn(aux.weight), mapped(fn, aux.aux))
    if isinstance(aux, (Sum, Extreme)):
        return type(aux)(fn(aux.value))
    if isinstance(aux, Concat):
        return Concat(mapped(fn, aux.value), aux.pad)
    if isinstance(aux, dict):
        return {key: mapped(fn, value) for key, value in aux.items()}
    if type(aux) in (list, tuple):
        return type(aux)([mapped(fn, value) for value in aux])
    return fn(aux)


def detached(aux: Tree) -> Any:
    """Aux without its graph."""
    return mapped(plain, aux)


class _Place:
    """The place of a tensor in a list. A plain class, since compiled code makes it."""

    def __init__(self, index: int) -> None:
        self.index = index


def pick(value: Tree, tensors: list[torch.Tensor]) -> Any:
    """Move the tensors of aux to a list: functions of torch.func return tensors only. `unpick` undoes it."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Place(len(tensors) - 1)

    return mapped(moved, value)


def unpick(value: Tree, tensors: Sequence[torch.Tensor]) -> Any:
    """Aux whose tensors were moved to a list."""

    def put_back(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, _Place) else leaf

    return mapped(put_back, value)


def combined(values: Sequence[Any]) -> Any:
    """Aux of several micro-batches as the metrics that they make, with its graph. torch.compile can trace it.

    `AuxValues` does the same without graphs, and over ranks.
    """
    first = values[0]
    if isinstance(first, dict):
        return {key: combined([value[key] for value in values]) for key in first}
    if type(first) in (list, tuple):
        return type(first)([combined([value[place] for value in values]) for place in range(len(first))])
    if isinstance(first, Mean):
        weights = [value.weight for value in values]
        return ratio(_added([counted(value.total, value.weight) for value in values]), _added(weights))
    if isinstance(first, Sum):
        return _added([value.value for value in values])
    if isinstance(first, Extreme):
        return first.fold(torch.stack([torch.as_tensor(value.value) for value in values]))
    if isinstance(first, Concat):
        rows = [value.value for value in values]
        return torch.cat(rows) if isinstance(rows[0], torch.Tensor) else [row for own in rows for row in own]
    return ratio(_added(list(values)), len(values))


def _added(values: list[Any]) -> Any:
    return sum(values[1:], start=values[0])


def ratio(total: Any, weight: Scalar) -> torch.Tensor:
    """A total over its weight, 0 where the weight is 0, without a read on the host. Both may have dimensions.

    Its derivative is that of 0 there: the division is by 1.
    """
    if not isinstance(weight, torch.Tensor):
        value = total / weight if weight else counted(total, weight)
        return value if isinstance(value, torch.Tensor) else torch.full((), value)
    counts = weight != 0
    value = total / torch.where(counts, weight, torch.ones_like(weight))
    return torch.where(counts, value, torch.zeros_like(value))
