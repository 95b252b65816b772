"""The gradient of one step as GRADS transforms see it: local shards, with one deferred multiply.

Division by the weight, unscaling and clipping only change `multiplier`. The optimizer's kernel applies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from fnaccel import _torch, tree
from fnaccel.errors import TreeMismatchError
from fnaccel.models.parameter import Leaf
from fnaccel.step.loss import Scalar
from fnaccel.texts import unmatched
from fnaccel.tree import Tree
from fnaccel.world.mesh import MeshAxis


class Gradients:
    """Local gradients of each leaf (None if it got none) and their multiplier."""

    __slots__ = (
        "_device",
        "_leaves",
        "_over",
        "_raw",
        "lent",
        "multiplier",
        "shards",
        "skip",
        "uncounted",
    )

    def __init__(
        self,
        leaves: Sequence[Any],
        shards: list[torch.Tensor | None],
        multiplier: Scalar | None,
        over: MeshAxis | None,
        device: torch.device,
    ) -> None:
        self._leaves = leaves
        self._over = over
        self._device = device
        self._raw: torch.Tensor | None = None  # the norm without the multiplier
        self.lent = True  # the next backward pass may write to their memory
        self.shards = shards
        self.multiplier = multiplier
        self.skip: torch.Tensor | None = None
        self.uncounted: torch.Tensor | None = None

    def present(self) -> list[torch.Tensor]:
        """The local gradients that exist and have elements."""
        return [g for g in self.shards if g is not None and g.numel()]

    def norm(self) -> torch.Tensor:
        """The Euclidean norm of the whole gradient, a 0-d tensor, equal on all ranks."""
        if self._raw is None:
            self._raw = self._raw_norm()
        return self._raw if self.multiplier is None else self._raw * abs(self.multiplier)

    def _raw_norm(self) -> torch.Tensor:
        if self._over is None:
            return self._local_norm(self.present())
        by_copies: dict[int, list[torch.Tensor]] = {1: []}
        for leaf, grad in zip(self._leaves, self.shards, strict=True):
            if grad is not None and grad.numel():
                by_copies.setdefault(leaf.copies, []).append(grad)
        whole = by_copies.pop(self._over.size, []) if self._over.size > 1 else []
        square: torch.Tensor | None = None
        for copies, grads in by_copies.items():
            # each rank with the same part adds its share of it
            part = self._square(grads) / copies if copies > 1 else self._square(grads)
            square = part if square is None else square + part
        assert square is not None
        if self._over.group is not None:
            square = _torch.summed_over(square, self._over.group)
        if whole:
            square = square + self._square(whole)
        return square.sqrt()

    def _square(self, grads: list[torch.Tensor]) -> torch.Tensor:
        norm = self._local_norm(grads)
        return (norm if norm.dtype is torch.float64 else norm.float()).square().to(self._device)

    def _local_norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        if not grads:
            return torch.zeros((), device=self._device)
        norms = _torch.foreach_norm(grads, 2.0)
        return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]

    def scale_by(self, factor: Scalar) -> None:
        """Multiply the whole gradient, at no cost now."""
        self.multiplier = factor if self.multiplier is None else self.multiplier * factor

    def materialise(self, *, kept: bool = False) -> None:
        """Carry out the deferred multiply, for transforms that need the values.

        Args:
            kept: into memory that no other backward pass writes to.
        """
        if kept and self.lent:
            present = self.present()
            factor = self.multiplier
            if factor is None or not present:  # a rank may hold no element
                made = iter([x.clone() for x in present])
            else:
                made = iter(_torch.foreach_mul(present, factor))
            self.shards = [next(made) if g is not None and g.numel() else g for g in self.shards]
            self.lent = False
        elif self.multiplier is not None:
            present = self.present()
            if present:
                _torch.foreach_mul_(present, self.multiplier)
        if self.multiplier is not None:
            self._raw = None if self._raw is None else self.norm()
            self.multiplier = None

    def clamp(self, most: float) -> None:
        """Clamp each element to at most `most` in size, in place."""
        self.materialise()
        present = self.present()
        if present:  # a rank may hold no element of a small model
            _torch.foreach_clamp_max_(present, most)
            _torch.foreach_clamp_min_(present, -most)
        self._raw = None

    def skip_where_nonfinite(self) -> None:
        """Mark the update as skipped if the norm is NaN or infinite (decided on the device)."""
        self.skip_where(~torch.isfinite(self.norm()))

    def skip_where(self, bad: torch.Tensor) -> None:
        """Mark the update as skipped if `bad` is true (decided on the device)."""
        now = bad.float()
        self.skip = now if self.skip is None else torch.maximum(self.skip, now)

    def skipped(self) -> torch.Tensor | None:
        """1 if the update is left out: a gradient is not finite, or no row counts. None if it never is."""
        if self.skip is None or self.uncounted is None:
            return self.uncounted if self.skip is None else self.skip
        return torch.maximum(self.skip, self.uncounted)

    def by_name(self, *, kept: bool = False) -> dict[str, Any]:
        """The gradients as a user's transform sees them: by name, DTensors if sharded. See `materialise`."""
        self.materialise(kept=kept)
        pairs = zip(self._leaves, self.shards, strict=True)
        return {leaf.name: leaf.like(shard) for leaf, shard in pairs if shard is not None}

    def replace(self, named: Tree, transform: str) -> None:
        """Take the gradients that a user's transform returned, in any layout of the same tensors.

        Raises:
            TreeMismatchError: other names or shapes than it was given. Nothing was taken.
        """
        leaves = {leaf.name: leaf for leaf, g in zip(self._leaves, self.shards, strict=True) if g is not None}
        check_returned(named, {name: leaf.shown for name, leaf in leaves.items()}, transform)
        # strides of the parameters: fused kernels pair elements by their place in memory
        made = {name: torch.empty_like(leaf.shard) for name, leaf in leaves.items()}
        _torch.foreach_copy_(
            list(made.values()), [part_like(named[name], leaf).detach() for name, leaf in leaves.items()]
        )
        self.shards = [made.get(leaf.name) for leaf in self._leaves]
        self.lent = False
        self._raw = None

    @staticmethod
    def with_copies(state: Tree, *shown: Tree) -> Tree:
        """A state with copies of what it keeps of gradients and parameters, whose memory is written again.

        The next backward pass writes to gradients, and the update to parameters.
        """
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(state)):
            return state
        held = {_torch.local_of(tensor).untyped_storage().data_ptr() for tensor in tree.leaves(shown)}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                return leaf
            return leaf.clone() if _torch.local_of(leaf).untyped_storage().data_ptr() in held else leaf

        return tree.map(copied, state)


def check_returned(named: Tree, given: Mapping[str, Any], transform: str) -> None:
    """Raise TreeMismatchError if a user's transform returned other names or shapes than it was given."""
    problems = differences(named, given, "gradients")
    if problems:
        raise TreeMismatchError(
            f"transform {transform!r} returned {'; '.join(problems)}",
            where=f"transform {transform} (GRADS)",
            fix="return one gradient for each name given, shaped as it came",
        )


def differences(named: Tree, like: Mapping[str, Any], what: str) -> list[str]:
    """How tensors by name differ from others in kind: empty if they do not.

    Args:
        named: the tensors.
        like: the others by name, which all have to be there.
        what: the name of the tensors, for messages.
    """
    if not isinstance(named, Mapping):
        return [f"{type(named).__name__} instead of a dict of {what}"]
    texts = {name: _unlike(named[name], other) for name, other in like.items() if name in named}
    return unmatched(like, named) + [f"{name} {text}" for name, text in texts.items() if text]


def _unlike(value: Tree, other: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__}, not a tensor"
    if value.shape != other.shape:
        return f"has shape {list(value.shape)}, not {list(other.shape)}"
    sharded = hasattr(value, "placements") and not hasattr(other, "placements")
    return "is a DTensor, not a plain tensor" if sharded else ""


def part_like(value: Any, leaf: Leaf) -> torch.Tensor:
    """This rank's part of a tensor, in the layout of a parameter. Ranks communicate if its own is another."""
    layout = getattr(leaf.shown, "placements", None) if leaf.sharded else None
    # the mean of a sharded gradient over a sharded dimension is a sum that is still to be made
    if layout is not None and not hasattr(value, "placements"):
        value = tree.laid_out(value, leaf.shown)
    elif layout is not None and value.placements != layout:
        value = value.redistribute(leaf.shown.device_mesh, layout)
    return _torch.local_of(value)


@contextlib.contextmanager
def zeroed(total: torch.Tensor) -> Generator[None]:
    """In the body a backward pass of `total` gives zeros to the leaves of its graph, also in place of NaN.

    Ranks that average gradients as they come average them as ever.
    """
    handles: list[Any] = []
    seen: set[Any] = set()
    nodes: list[Any] = [total.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            nodes += [following for following, _ in node.next_functions]
        else:  # it adds to the gradient of a leaf
            handles.append(node.register_prehook(_zeros))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


def apart(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of which no two share memory, since the update changes them in place."""
    seen: set[int] = set()
    separate: list[torch.Tensor | None] = []
    for grad in grads:
        shared = grad is not None and grad.untyped_storage().data_ptr() in seen
        separate.append(grad.clone() if grad is not None and shared else grad)
        if grad is not None:
            seen.add(grad.untyped_storage().data_ptr())
    return separate


def laid_out(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A gradient with the parameter's strides: fused kernels pair elements by their place in memory."""
    pairs = zip(grad.stride(), param.stride(), grad.shape, strict=True)
    if all(stride == target or length < 2 for stride, target, length in pairs):
        return grad
    return torch.empty_like(param).copy_(grad)


def added(carried: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, of which either may be missing."""
    if carried is None or grad is None:
        return grad if carried is None else carried
    return carried + grad
