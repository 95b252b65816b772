"""`context()`: ranks share each sequence, and attention reaches the tokens of all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import attrs

from fnaccel.errors import CapabilityError, UnknownNameError, nearest
from fnaccel.extend import Axis, Built, Mesh, Spec, Strategy, Traffic, check_degree, maker, runtime_in
from fnaccel.strategies.context.attention import attention_over, check_modules
from fnaccel.strategies.context.huggingface import prepare_models
from fnaccel.strategies.context.leaves import as_dims, cut_leaves
from fnaccel.strategies.context.order import Chunks
from fnaccel.strategies.context.ring import register_ring
from fnaccel.strategies.context.split import Split
from fnaccel.strategies.context.weights import check_weight, weighs_tokens
from fnaccel.strategies.strategy import Pairs
from fnaccel.tree import Tree

Method = Literal["gather", "ring", "heads"]

_COSTS: dict[str, str] = {
    "gather": "1 all-gather of keys and values, and 1 reduce-scatter in the backward",
    "ring": "the keys and values of n - 1 other ranks one by one, in the backward with their gradients",
    "heads": "2 all-to-alls, and 2 in the backward",
}


def _cost(method: Method, ranks: int) -> str:
    """The collectives of one attention over so many ranks."""
    return _COSTS[method].replace("n - 1", str(ranks - 1))


_KINDS = {"gather": "all_gather", "ring": "send", "heads": "all_to_all"}


@attrs.frozen
class Context(Axis):
    """The axis `cp`: see `context`."""

    mesh_axis: ClassVar[str] = "cp"
    maker: ClassVar[str] = "context"

    degree: int = -1
    cut: Pairs | None = None
    method: Method = "gather"
    balance: bool = True

    def check(self, spec: Spec) -> None:
        """Raise CapabilityError beside a runtime that cuts or averages on its own."""
        runtime = runtime_in(spec)
        if runtime:
            raise CapabilityError(
                f"{runtime} runs the step by itself, and knows nothing of parts of a sequence",
                where=f"strategy {spec.strategy}",
                fix="multiply context with ddp, fsdp or hsdp",
            )

    def plan_notes(self, spec: Spec) -> list[str]:
        """The tokens of a rank, and the communication of an attention."""
        ranks = spec.mesh.degrees[self.mesh_axis]
        order = (
            "2 chunks of each sequence, one from each end"
            if self.balance
            else "a contiguous part of each sequence"
        )
        notes = [
            f"context: each of {ranks} ranks has {order}; an attention takes {_cost(self.method, ranks)}"
        ]
        names = list(spec.mesh.degrees)
        # axes after this one are inside of it: the ranks of a group and those between them
        span = math.prod(spec.mesh.degrees[name] for name in names[names.index(self.mesh_axis) :])
        if ranks > 1 and spec.mesh.world.local_size % span:
            notes.append("context: a group crosses machines, and it communicates in every attention")
        if self.method == "ring" and any(t.name == "attention" for t in spec.step.transforms):
            notes.append(
                "context: a ring has its own blocks of attention, whatever fa.transforms.attention names"
            )
        return notes

    def apply(self, built: Built, mesh: Mesh) -> None:
        """Check that attention can be replaced. Modules stay as they are."""
        if mesh.degrees[self.mesh_axis] > 1:
            for module in built.modules.values():
                check_modules(module)
                prepare_models(module)

    def traffic(self, built: Built, size: int) -> list[Traffic]:  # noqa: ARG002
        """The collectives of one attention. Their bytes depend on its keys and values."""
        what = _cost(self.method, size)
        return [Traffic(axis="cp", kind=_KINDS[self.method], count=0, size=0, per="attention", what=what)]

    def part_of(self, spec: Spec) -> SequencePart | None:
        """This rank's part of the loss. None if one rank has all tokens."""
        axis = spec.mesh[self.mesh_axis]
        if axis.group is None:
            return None
        if self.method == "ring":
            register_ring(axis.group)
        split = Split(Chunks(axis.size, axis.rank, self.balance), axis.group, self.method)
        return SequencePart(split, self.cut)


class SequencePart:
    """This rank's part of a loss: some tokens of each sequence.

    Args:
        split: the ranks that share the sequences.
        dims: the dimension of tokens by pattern of a leaf's path.
    """

    def __init__(self, split: Split, dims: Pairs | None) -> None:
        self._split = split
        self._dims = dims

    def cut(self, batches: Sequence[Tree]) -> tuple[list[Any], contextlib.AbstractContextManager[Any]]:
        """This rank's tokens of each batch, and a context in which attention reaches those of all ranks."""
        cuts = [cut_leaves(batch, self._dims, self._split.chunks) for batch in batches]
        lengths = frozenset[int]().union(*(cut.lengths for cut in cuts))
        uncut = frozenset[int]().union(*(cut.uncut for cut in cuts))
        split = attrs.evolve(self._split, lengths=tuple(sorted(lengths)), uncut=tuple(sorted(uncut)))
        return [cut.data for cut in cuts], attention_over(split)

    def checked(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A loss or metric function that raises if it counts rows."""
        return weighs_tokens(fn, self._split.chunks.ranks)

    def checked_weight(self, weight_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of `fa.with_weight` that raises if it counts rows."""

        def weigh(batch: Tree) -> Any:
            weight = weight_fn(batch)
            check_weight(weight, batch, self._split.chunks.ranks)
            return weight

        return weigh


@maker
def context(
    degree: int = -1,
    cut: Mapping[Any, int | None] | None = None,
    method: Method = "gather",
    balance: bool = True,
) -> Strategy:
    """Cut each sequence over ranks. Every rank has some tokens of each row, and attention reaches all.

    For sequences whose activations do not fit on one device. Ranks along this axis read the same rows, hold
    the same parameters (or share their shards, under `fsdp`), and average gradients as replicas do. The loss
    is written for a whole batch and gets this rank's tokens, so **positions must be a leaf of the batch**: a
    model that counts tokens from 0 would be wrong. Weigh the loss by tokens, and shift labels before the cut.

    Every call of `F.scaled_dot_product_attention` in the loss reaches the tokens of all ranks, with
    `is_causal`, masks over keys, masks of rows by the keys of the whole sequence, grouped queries and
    dropout. `fa.evaluate` cuts its batches, too. `train_step.look` does not: `train_step.as_loss(fn)` does.

    Args:
        degree: how many ranks share a sequence. -1 takes the ranks that are left.
        cut: the dimension of tokens for leaves of the batch, by pattern of their path: `{"tokens": 1,
            "labels": 1}`. The path of a leaf of a tuple is its index, and "" is a batch that is a tensor.
            None as dimension: every rank needs the leaf whole. The names of transformers' batches
            (`input_ids`, `labels`, `shift_labels`, `position_ids`, `token_type_ids`, `attention_mask`) are
            known. Lengths must divide by twice the degree.
        method: `"gather"`: each rank gathers the keys and values of all ranks, layer by layer. `"ring"`:
            keys and values go from rank to rank, so that no rank ever has all of them (without dropout).
            `"heads"`: each rank has all tokens of some heads. Their number must divide by the degree.
        balance: each rank has one chunk from each end of a sequence, so that causal attention costs all ranks
            the same. False: contiguous parts, whose lengths must divide by the degree only.

    Raises:
        ArgumentError: a degree or `cut=` that can't be.
        UnknownNameError: no such method.

    Example:
        >>> strategy = fa.fsdp(2) * fa.context(2, cut={"tokens": 1, "labels": 1, "positions": 1})
        >>> print(strategy)
        fsdp(2) * context(2, cut={'tokens': 1, 'labels': 1, 'positions': 1})
    """
    where = "fa.context"
    check_degree(degree, where)
    if method not in get_args(Method):
        raise UnknownNameError(
            f"no method is called {method!r}", where=where, fix=nearest(str(method), get_args(Method))
        )
    return Strategy((Context(degree, as_dims(cut), method, bool(balance)),))
