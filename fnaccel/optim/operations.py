"""Arithmetic on lists of tensors, for rules of optimizers: `Fast` in place, `Pure` as a function.

`mul_(xs, y)` may write to `xs`, and `mul(xs, y)` never does. `Fast` calls one list kernel of torch for each
operation. `Pure` calls one plain operation for each tensor and writes to nothing, so that `torch.func.grad`,
`torch.func.vmap` (which knows no list kernels) and a compiled graph take it. A rule that is equal under both
reads no list after it was written to.

These are no arithmetic of a class of lists: torch.compile can't trace `leaves / tensor` of an object, and
takes a subclass of list for a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch

from fnaccel import _torch, tree
from fnaccel.models.parameter import Leaf
from fnaccel.world.mesh import MeshAxis

Tensors = Sequence[torch.Tensor]
Other = Any
"""The second operand: a number, a 0-d tensor, or one tensor for each of the first list."""


class Operations(Protocol):
    """The operations that a rule calls. `xs`, `ys` and `zs` are lists of tensors, one for each parameter."""

    def norms(self, *lists: Tensors) -> list[torch.Tensor]:
        """The Euclidean norm of each whole tensor: for each list a tensor of shape [length of the list].

        Ranks that hold parts add up the squares of all lists in one all-reduce, so each rank has to ask for
        the same norms.
        """
        ...

    def row_norms(self, *lists: Tensors) -> list[list[torch.Tensor]]:
        """The norm of each whole row (all dimensions but the first), in a shape that broadcasts.

        A vector is one row. Ranks add up the rows of which they hold parts, as `norms` does.
        """
        ...

    def row_means(self, xs: Tensors) -> list[torch.Tensor]:
        """The mean of each whole row, as `row_norms`."""
        ...

    def of(self, places: Sequence[int]) -> Self:
        """The same operations on some tensors of each list, for their norms and rows."""
        ...

    def add(self, xs: Tensors, ys: Other) -> list[torch.Tensor]:
        """`x + y`."""
        ...

    def mul(self, xs: Tensors, ys: Other) -> list[torch.Tensor]:
        """`x * y`."""
        ...

    def div(self, xs: Tensors, ys: Other) -> list[torch.Tensor]:
        """`x / y`."""
        ...

    def lerp(self, xs: Tensors, ys: Tensors, weight: Any) -> list[torch.Tensor]:
        """`x + weight * (y - x)`."""
        ...

    def add_(self, xs: Tensors, ys: Other, factor: Any = 1) -> Tensors:
        """`x + factor * y`. May write to `xs`, as all that follow."""
        ...

    def mul_(self, xs: Tensors, ys: Other) -> Tensors:
        """`x * y`."""
        ...

    def div_(self, xs: Tensors, ys: Other) -> Tensors:
        """`x / y`."""
        ...

    def addcmul_(self, xs: Tensors, ys: Tensors, zs: Tensors, factor: Any) -> Tensors:
        """`x + factor * y * z`."""
        ...

    def lerp_(self, xs: Tensors, ys: Tensors, weight: Any) -> Tensors:
        """`x + weight * (y - x)`."""
        ...

    def root_(self, xs: Tensors) -> Tensors:
        """The square root, whose derivative at 0 is 0."""
        ...

    def sign_(self, xs: Tensors) -> Tensors:
        """-1, 0 or 1."""
        ...

    def copy_(self, xs: Tensors, ys: Tensors) -> Tensors:
        """The values of `ys`, in memory that is not theirs where memory is written."""
        ...

    def choose_(self, xs: Tensors, condition: Any, ys: Tensors) -> Tensors:
        """`y` if a condition holds, a bool or a 0-d tensor, else `x`."""
        ...


class CutRows(NamedTuple):
    """How the rows of a tensor lie over ranks.

    Attributes:
        start: the whole tensor's number of the first row of which this rank holds a part.
        total: the rows of the whole tensor.
        size: the elements of a whole row.
    """

    start: int
    total: int
    size: int


class _Whole:
    """Norms of whole tensors, of which this rank has parts. No attrs record: a graph makes one.

    Args:
        over: the ranks that together hold the tensors. None if each rank holds all of them.
        copies: for each tensor how many of these ranks hold the same part: see `Leaf`.
        rows: for each tensor None if this rank holds whole rows of it.
        leaves: the parameter of each tensor, for `gathered`.
    """

    def __init__(
        self,
        over: MeshAxis | None = None,
        copies: tuple[int, ...] = (),
        rows: tuple[CutRows | None, ...] = (),
        leaves: tuple[Leaf, ...] = (),
    ) -> None:
        self.over = over
        self.copies = copies
        self.rows = rows
        self.leaves = leaves

    def of(self, places: Sequence[int]) -> Self:
        """See `Operations`."""
        if self.over is None:
            return self
        copies = tuple(self.copies[place] for place in places)
        leaves = tuple(self.leaves[place] for place in places)
        return type(self)(self.over, copies, tuple(self.rows[place] for place in places), leaves)

    def gathered(self, place: int, value: torch.Tensor) -> torch.Tensor:
        """The whole tensor at a place, of this rank's part."""
        return tree.whole(self.leaves[place].like(value)) if self.leaves else value

    def part_at(self, place: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor at a place."""
        sharded = self.leaves and self.leaves[place].sharded
        return tree.laid_out(whole, self.leaves[place].shown).to_local() if sharded else whole

    def whole(self, norms: list[torch.Tensor]) -> list[torch.Tensor]:
        """The norms of whole tensors, of the norms of their parts."""
        if self.over is None or self.over.group is None:
            return norms
        squares = torch.cat(norms).square()
        if any(copies > 1 for copies in self.copies):  # each rank with the same part adds its share of it
            squares = squares / squares.new_tensor([*self.copies] * len(norms))
        squares = _torch.summed_over(squares, self.over.group)
        return list(squares.sqrt().split([len(each) for each in norms]))

    def row_norms(self, *lists: Tensors) -> list[list[torch.Tensor]]:
        """See `Operations`."""
        sums = self._row_sums([[_matrix(x).square().sum(1) for x in xs] for xs in lists])
        return [
            [_beside(x, row.sqrt()) for x, row in zip(xs, own, strict=True)]
            for xs, own in zip(lists, sums, strict=True)
        ]

    def row_means(self, xs: Tensors) -> list[torch.Tensor]:
        """See `Operations`."""
        (sums,) = self._row_sums([[_matrix(x).sum(1) for x in xs]])
        none: list[CutRows | None] = [None] * len(xs)
        pairs = zip(xs, self.rows or none, strict=True)
        sizes = [_matrix(x).shape[1] if rows is None else rows.size for x, rows in pairs]
        return [_beside(x, own / size) for x, own, size in zip(xs, sums, sizes, strict=True)]

    def _row_sums(self, lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The sums of whole rows, of those of this rank's parts. In one all-reduce if any row is cut."""
        cut = [(place, rows) for place, rows in enumerate(self.rows) if rows is not None]
        if not cut or self.over is None or self.over.group is None:
            return lists
        flat: list[torch.Tensor] = []
        for sums in lists:
            for (
                place,
                rows,
            ) in cut:  # a place for each row of the whole tensor, of which this rank fills its own
                own = sums[place] / self.copies[place]
                flat.append(torch.nn.functional.pad(own, (rows.start, rows.total - rows.start - len(own))))
        parts = iter(_torch.summed_over(torch.cat(flat), self.over.group).split([len(each) for each in flat]))
        whole = [list(sums) for sums in lists]
        for sums in whole:
            for place, rows in cut:
                sums[place] = next(parts)[rows.start : rows.start + len(sums[place])].to(sums[place].dtype)
        return whole


class Fast(_Whole):
    """In place, by torch's list kernels."""

    add = staticmethod(_torch.foreach_add)
    mul = staticmethod(_torch.foreach_mul)
    div = staticmethod(_torch.foreach_div)
    lerp = staticmethod(_torch.foreach_lerp)

    def norms(self, *lists: Tensors) -> list[torch.Tensor]:
        """See `Operations`."""
        return self.whole([_stacked(_torch.foreach_norm(xs)) for xs in lists])

    def add_(self, xs: Tensors, ys: Other, factor: Any = 1) -> Tensors:
        """See `Operations`."""
        if isinstance(factor, torch.Tensor):
            ys, factor = _torch.foreach_mul(ys, factor), 1
        if isinstance(ys, list | tuple):
            _torch.foreach_add_(xs, ys, alpha=factor)
        else:
            _torch.foreach_add_(xs, ys * factor)
        return xs

    def mul_(self, xs: Tensors, ys: Other) -> Tensors:
        """See `Operations`."""
        _torch.foreach_mul_(xs, ys)
        return xs

    def div_(self, xs: Tensors, ys: Other) -> Tensors:
        """See `Operations`."""
        _torch.foreach_div_(xs, ys)
        return xs

    def addcmul_(self, xs: Tensors, ys: Tensors, zs: Tensors, factor: Any) -> Tensors:
        """See `Operations`."""
        if isinstance(factor, torch.Tensor):  # it would be read on the host
            ys, factor = _torch.foreach_mul(ys, factor), 1
        _torch.foreach_addcmul_(xs, ys, zs, value=factor)
        return xs

    def lerp_(self, xs: Tensors, ys: Tensors, weight: Any) -> Tensors:
        """See `Operations`."""
        _torch.foreach_lerp_(xs, ys, weight)
        return xs

    def root_(self, xs: Tensors) -> Tensors:
        """See `Operations`."""
        _torch.foreach_sqrt_(xs)
        return xs

    def sign_(self, xs: Tensors) -> Tensors:
        """See `Operations`."""
        _torch.foreach_sign_(xs)
        return xs

    def copy_(self, xs: Tensors, ys: Tensors) -> Tensors:
        """See `Operations`."""
        _torch.foreach_copy_(xs, ys)
        return xs

    def choose_(self, xs: Tensors, condition: Any, ys: Tensors) -> Tensors:
        """See `Operations`."""
        if isinstance(condition, torch.Tensor):
            ys = [torch.where(condition, y, x) for x, y in zip(xs, ys, strict=True)]
        elif not condition:
            return xs
        return self.copy_(xs, ys)


class Pure(_Whole):
    """As a function of tensors: differentiable, vmappable, and traced without mutation."""

    def norms(self, *lists: Tensors) -> list[torch.Tensor]:
        """See `Operations`."""
        return self.whole([_stacked([torch.linalg.vector_norm(x) for x in xs]) for xs in lists])

    def add(self, xs: Tensors, ys: Other, factor: Any = 1) -> list[torch.Tensor]:
        """See `Operations`."""
        plain = isinstance(factor, int) and factor == 1
        return [x + (y if plain else factor * y) for x, y in _pairs(xs, ys)]

    def mul(self, xs: Tensors, ys: Other) -> list[torch.Tensor]:
        """See `Operations`."""
        return [x * y for x, y in _pairs(xs, ys)]

    def div(self, xs: Tensors, ys: Other) -> list[torch.Tensor]:
        """See `Operations`."""
        return [x / y for x, y in _pairs(xs, ys)]

    def lerp(self, xs: Tensors, ys: Tensors, weight: Any) -> list[torch.Tensor]:
        """See `Operations`."""
        return [x + weight * (y - x) for x, y in _pairs(xs, ys)]

    def addcmul_(self, xs: Tensors, ys: Tensors, zs: Tensors, factor: Any) -> list[torch.Tensor]:
        """See `Operations`."""
        return [x + factor * y * z for x, y, z in zip(xs, ys, zs, strict=True)]

    def root_(self, xs: Tensors) -> list[torch.Tensor]:
        """See `Operations`. Adam's second moment is 0 where a gradient is: sqrt has no derivative there."""
        return [torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0) for x in xs]

    def sign_(self, xs: Tensors) -> list[torch.Tensor]:
        """See `Operations`."""
        return [x.sign() for x in xs]

    def copy_(self, xs: Tensors, ys: Tensors) -> Tensors:  # noqa: ARG002 - nothing is written
        """See `Operations`."""
        return ys

    def choose_(self, xs: Tensors, condition: Any, ys: Tensors) -> Tensors:
        """See `Operations`."""
        if isinstance(condition, torch.Tensor):
            return [torch.where(condition, y, x) for x, y in _pairs(xs, ys)]
        return ys if condition else xs

    add_, mul_, div_, lerp_ = add, mul, div, lerp


FAST, PURE = Fast(), Pure()
"""The operations of tensors that this rank has whole."""


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """A tensor with its rows flattened. A vector or a number is one row."""
    return x.reshape(1, -1) if x.ndim < 2 else x.flatten(1)


def _beside(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A number for each row, in a shape that broadcasts with a tensor."""
    return rows.reshape(()) if x.ndim < 2 else rows.reshape(-1, *[1] * (x.ndim - 1))


def _pairs(xs: Tensors, ys: Other) -> Any:
    several = isinstance(ys, list) or isinstance(ys, tuple)  # noqa: SIM101 - a graph takes no union
    return zip(xs, ys if several else [ys] * len(xs), strict=True)


def _stacked(norms: Tensors) -> torch.Tensor:
    """0-d tensors as one. Those of several dtypes in the widest."""
    if any(norm.dtype != norms[0].dtype for norm in norms):
        norms = [norm.double() for norm in norms]
    return torch.stack(list(norms))
