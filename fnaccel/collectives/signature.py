"""The arguments of a collective, compared between ranks before any data moves.

Each call exchanges one block of fixed size: a digest of the operation, its arguments, structure, shapes
and dtypes, one free integer, and room for a little data, so that small trees need no second round.
Only if digests differ do the ranks exchange the full table, and then every rank raises.
Remembering that a call agreed last time would save the exchange and hang on the first ragged batch, so
nothing is remembered.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch, tree
from fnaccel.collectives.flat_buffer import Layout
from fnaccel.collectives.over import Scope, scope
from fnaccel.errors import ArgumentError, FnaccelError, RankMismatchError, listing
from fnaccel.tree import Tree
from fnaccel.world.world import World

Shape = tuple[int | None, ...]
"""A shape: None for a size that may differ between ranks."""

_HEAD = 32  # bytes: three words of digest, and the number
_WORDS = struct.Struct("<3q")
_HEADER = struct.Struct("=4q")


@attrs.frozen
class Call:
    """One call of a collective on one rank.

    Attributes:
        name: the function, as users call it.
        arguments: the arguments that must be equal on all ranks, as text.
        value: the tree that was passed.
        structure: its structure.
        shapes: of its leaves.
        dtypes: of its leaves.
    """

    name: str
    arguments: str = ""
    value: tree.Tree = attrs.field(default=None, repr=False)
    structure: Any = None
    shapes: tuple[Shape, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def place(self) -> str:
        """The call as a `where:` says it."""
        return self.name if "." in self.name else f"fa.{self.name}"


@attrs.frozen
class _Row:
    """The call of one rank in full, exchanged once signatures differ."""

    call: str
    leaves: dict[str, tuple[Shape, str]]
    problem: tuple[str, str] | None


@attrs.frozen
class Agreed:
    """All ranks' numbers and payloads, uint8 `[ranks, bytes]` (None on a single rank)."""

    numbers: list[int]
    payloads: torch.Tensor | None


def room(where: Scope) -> int:
    """How many bytes of payload fit in a signature: fewer, the more ranks receive them."""
    return max(512, min(4096, 2**18 // where.size)) // 16 * 16


def fits(where: Scope, carrier: torch.device, plan: Layout) -> bool:
    """Whether data laid out by `plan` can travel with the signature."""
    return where.size > 1 and carrier.type == "cpu" and plan.nbytes <= room(where)


def agree(
    where: Scope,
    call: Call,
    *,
    number: int = 0,
    payload: torch.Tensor | None = None,
    problem: FnaccelError | None = None,
) -> Agreed:
    """Make sure that all ranks make the same call.

    Args:
        where: the scope of the collective.
        call: the call of this rank.
        number: an integer of 63 bits that may differ between ranks.
        payload: uint8 on the CPU, at most `room(where)` bytes, of the same length on every rank.
        problem: why this rank can't take part. The others learn it, instead of waiting for ever.

    Raises:
        FnaccelError: `problem`, if there is one.
        RankMismatchError: the ranks differ. Raised on every rank.
    """
    if where.size == 1:
        if problem is not None:
            raise problem
        return Agreed([number], None)
    words = _digest(call) if problem is None else _PROBLEM
    memory = bytearray(_HEAD + room(where))
    _HEADER.pack_into(memory, 0, *words, number)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    if payload is not None:
        block[_HEAD : _HEAD + payload.numel()] = payload
    local = block.to(where.signature_device())
    everyone = local.new_empty(where.size * local.numel())
    _torch.all_gather_single(everyone, local, group=where.group)
    blocks = everyone.cpu().view(where.size, local.numel())
    heads: list[list[int]] = blocks[:, :_HEAD].view(torch.int64).tolist()
    if any(tuple(head[:3]) != words for head in heads):
        _explain(where, call, problem)
    if problem is not None:
        raise problem
    stop = _HEAD + (0 if payload is None else payload.numel())
    return Agreed([head[3] for head in heads], blocks[:, _HEAD:stop])


def meet(name: str, world: World) -> None:
    """Wait until all ranks have come to the same call, before they send data without a signature.

    Raises:
        RankMismatchError: the ranks make different calls. Raised on every rank.
    """
    agree(scope(None, world, name), Call(name))


def tensor_leaves(
    value: tree.Tree, name: str, *, gradient: bool = False
) -> tuple[list[torch.Tensor], Any, ArgumentError | None]:
    """The leaves of a tree of plain tensors, its structure, and the error to raise (or None).

    With `gradient` they may be part of a graph.
    """
    leaves, structure = tree.flatten(value)
    for at, leaf in enumerate(leaves):
        plain = (
            type(leaf) is torch.Tensor
            and leaf.layout is torch.strided
            and not (leaf.is_nested or leaf.is_meta or (not gradient and _in_graph(leaf)))
        )
        if not plain and tree.learn(value):
            return tensor_leaves(value, name, gradient=gradient)
        if not plain and (problem := _not_plain(value, at, leaf, name)):
            return [], structure, problem
    return leaves, structure, None


def _in_graph(leaf: torch.Tensor) -> bool:
    return leaf.grad_fn is not None and torch.is_grad_enabled()


def bad_source(src: int, size: int, name: str) -> ArgumentError | None:
    """The error of `src=` among `size` ranks (or None)."""
    if 0 <= src < size:
        return None
    return ArgumentError(
        f"there is no rank {src} among {size}",
        where=f"fa.{name}(src={src})",
        fix=f"choose a rank from 0 to {size - 1}, counted within over=",
    )


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor. Before its module is imported, which takes 1 s, no value is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _not_plain(value: tree.Tree, at: int, leaf: Tree, name: str) -> ArgumentError | None:
    if not isinstance(leaf, torch.Tensor):
        what = f"{type(leaf).__name__}, not a tensor"
        other = "collectives.broadcast_objects" if name == "broadcast" else "collectives.gather_objects"
        fix = f"wrap it as torch.tensor(...), or use fa.{other} for Python objects"
    elif is_dtensor(leaf):
        what = "a DTensor: it is spread over ranks already"
        fix = "pass leaf.full_tensor() for the whole, or leaf.to_local() for this rank's part"
    elif leaf.is_meta:
        what, fix = "a tensor on the meta device, which has no values", "load or restore its values first"
    elif leaf.is_nested:
        what, fix = "a nested tensor", "pass torch.nested.to_padded_tensor(leaf, 0.0)"
    elif leaf.layout is not torch.strided or leaf.is_quantized:
        what, fix = f"a {leaf.layout} tensor", "pass leaf.to_dense(), or leaf.dequantize()"
    elif _in_graph(leaf):
        what = "part of a graph, and its gradient would end here"
        other = f"In a loss: fa.{name}(..., gradient=True)" if name in ("gather", "reduce") else ""
        fix = f"pass leaf.detach() for a metric. {other}".rstrip()
    else:
        return None
    path = tree.paths(value)[at] or "(root)"
    return ArgumentError(f"{path} is {what}", where=f"fa.{name}", fix=fix)


def _digest(call: Call) -> tuple[int, int, int]:
    try:
        return _cached_digest(call.name, call.arguments, call.structure, call.shapes, call.dtypes)
    except TypeError:  # a node of the tree carries something unhashable
        return _cached_digest.__wrapped__(call.name, call.arguments, call.structure, call.shapes, call.dtypes)


@functools.lru_cache(maxsize=256)
def _cached_digest(
    name: str, arguments: str, structure: Tree, shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...]
) -> tuple[int, int, int]:
    # objects in a node print their address, which differs between processes
    printed = re.sub(r" at 0x[0-9a-f]+", "", str(structure))
    text = repr((name, arguments, printed, [tuple(shape) for shape in shapes], dtypes))
    first, second, third = _WORDS.unpack(hashlib.blake2b(text.encode(), digest_size=24).digest())
    return first, second, third


_PROBLEM = (0, 0, 0)


def _explain(where: Scope, call: Call, problem: FnaccelError | None) -> None:
    rows = _exchange(where, call, problem)
    if problem is not None:
        raise problem
    troubled = [(rank, row.problem) for rank, row in enumerate(rows) if row.problem is not None]
    if troubled:
        rank, (problem_text, fix) = troubled[0]
        raise RankMismatchError(f"rank {rank} can't take part: {problem_text}", where=call.place, fix=fix)
    calls = [row.call for row in rows]
    if len(set(calls)) > 1:
        raise RankMismatchError(
            f"ranks make different calls: {_who(calls)}",
            where=call.place,
            fix="make the same call, with the same arguments, on every rank",
        )
    raise RankMismatchError(
        f"ranks hold different trees: {_differing([row.leaves for row in rows])}",
        where=call.place,
        fix=_fix(call.name, [row.leaves for row in rows]),
    )


def _exchange(where: Scope, call: Call, problem: FnaccelError | None) -> list[_Row]:
    paths = tree.paths(call.value) if call.shapes else []
    row = _Row(
        f"{call.name}({call.arguments})",
        {
            path or "(root)": (tuple(shape), str(dtype).removeprefix("torch."))
            for path, shape, dtype in zip(paths, call.shapes, call.dtypes, strict=True)
        },
        None if problem is None else (problem.what, problem.fix),
    )
    rows: list[Any] = [None] * where.size
    dist.all_gather_object(rows, row, group=where.group)
    return rows


def _who(texts: Sequence[str]) -> str:
    """`"x on ranks 0, 2; y on rank 1"`."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return ", ".join(
        f"{text} on rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
        for text, ranks in groups.items()
    )


def _differing(leaves: Sequence[dict[str, tuple[Shape, str]]]) -> str:
    lines: list[str] = []
    for path in dict.fromkeys(path for table in leaves for path in table):
        texts = [_leaf_text(table.get(path)) for table in leaves]
        if len(set(texts)) > 1:
            lines.append(f"{path} is {_who(texts)}")
    if not lines:
        return "the leaves agree, the containers around them do not"
    return listing(lines)


def _leaf_text(leaf: tuple[Shape, str] | None) -> str:
    if leaf is None:
        return "missing"
    sizes = ", ".join("*" if size is None else str(size) for size in leaf[0])
    return f"[{sizes}] {leaf[1]}"


def _fix(name: str, leaves: Sequence[dict[str, tuple[Shape, str]]]) -> str:
    kinds = {tuple((path, len(leaf[0]), leaf[1]) for path, leaf in table.items()) for table in leaves}
    if len(kinds) > 1 or name == "broadcast":
        return "pass the same structure, shapes and dtypes on every rank"
    if name == "gather":
        return "pad them first, fa.gather(fa.pad_across_processes(tree)), or say how many rows count: valid="
    return f"pad them first: fa.{name}(fa.pad_across_processes(tree))"
