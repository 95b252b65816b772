"""The logits of a head, which are not there: `cross_entropy` computes them, for some rows at a time."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fnaccel import tree
from fnaccel.errors import ArgumentError, CapabilityError, require
from fnaccel.losses.chunks import AllReduce, Columns
from fnaccel.losses.targets import Targets

_TRAINS, _ROWS = "_fnaccel_trains_in_chunks", "_fnaccel_rows"
Refuse = Callable[[str], CapabilityError]
"""The error for a use of logits that needs all of them."""


class Logits:
    """What a head returns in the place of logits of shape `[..., vocabulary]`.

    Leading dimensions can be reshaped and indexed, and logits can be scaled by numbers and capped by a tanh.
    `cross_entropy` takes them. Anything else that would read the logits raises.

    Args:
        losses: `losses(hidden, targets)` by the parameters that the head had when it was called.
        hidden: `[..., width]`, its input.
        vocabulary: the number of columns of all ranks.
        refuse: makes the error for other uses.
    """

    def __init__(
        self,
        losses: Callable[[torch.Tensor, Targets], torch.Tensor],
        hidden: torch.Tensor,
        vocabulary: int,
        refuse: Refuse,
    ) -> None:
        self._losses, self._hidden, self._vocabulary, self.refuse = losses, hidden, vocabulary, refuse
        self._dtype = hidden.dtype
        self._scale, self._cap = 1.0, None  # scale * logits, or cap * tanh(scale * logits)

    def _with(self, **changed: Any) -> Logits:
        made = Logits(self._losses, self._hidden, self._vocabulary, self.refuse)
        vars(made).update({**vars(self), **changed})
        return made

    @property
    def shape(self) -> torch.Size:
        """Of the whole logits."""
        return torch.Size((*self._hidden.shape[:-1], self._vocabulary))

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self._hidden.device

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions."""
        return self._hidden.dim()

    def float(self) -> Logits:
        """In fp32. Losses are in any case."""
        return self._with(_dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Logits:
        """With another dtype."""
        like = torch.empty(0, dtype=self._dtype, device=self.device).to(*args, **kwargs)
        if like.device != self.device:
            raise self.refuse("a move to another device")
        return self._with(_dtype=like.dtype)

    def contiguous(self) -> Logits:
        """As of a tensor."""
        return self

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        """With some of the leading dimensions joined."""
        dims = self.dim()
        if end_dim % dims == dims - 1:
            raise self.refuse("flatten over the vocabulary")
        return self._with(_hidden=self._hidden.flatten(start_dim, end_dim))

    def view(self, *shape: Any) -> Logits:
        """With other leading dimensions, and the vocabulary last."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not sizes or sizes[-1] not in (self._vocabulary, -1) or (sizes[-1] == -1 and -1 in sizes[:-1]):
            raise self.refuse(f"a view as {list(sizes)}")
        return self._with(_hidden=self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Logits:
        indices = index if isinstance(index, tuple) else (index,)
        dims = sum(map(_dims_of, indices))
        ellipsis = any(entry is Ellipsis for entry in indices)
        reaches = dims >= self.dim() or (ellipsis and indices[-1] is not Ellipsis)
        if reaches and not (isinstance(indices[-1], slice) and indices[-1] == slice(None)):
            raise self.refuse("an index into the vocabulary")
        return self._with(_hidden=self._hidden[index])

    def __mul__(self, number: Any) -> Logits:
        if not isinstance(number, int | float):
            raise self.refuse("a product with a tensor")
        if self._cap is None:
            return self._with(_scale=self._scale * number)
        return self._with(_cap=self._cap * number)

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> Logits:
        if not isinstance(number, int | float):
            raise self.refuse("a quotient with a tensor")
        return self * (1 / number)

    def tanh(self) -> Logits:
        """Of logits that were divided by a cap, and are multiplied by it."""
        if self._cap is not None:
            raise self.refuse("a tanh of a tanh")
        return self._with(_cap=1.0)

    def __eq__(self, other: object) -> Any:
        raise self.refuse("a comparison")

    __hash__ = object.__hash__

    def __contains__(self, value: object) -> bool:
        raise self.refuse("a comparison")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.refuse(name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """`cross_entropy`, and the tanh of a cap. Other functions raise."""
        if func is torch.tanh:
            return args[0].tanh()
        if func is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        given = next(x for x in tree.leaves((args, kwargs or {})) if isinstance(x, Logits))
        raise given.refuse(getattr(func, "__name__", str(func)))

    def losses(self, targets: Targets) -> torch.Tensor:
        """The loss of labels."""
        targets.scale = self._scale
        if self._cap is not None:
            targets.soft_cap, targets.scale = self._cap, self._scale * self._cap
        return self._losses(self._hidden, targets)


def _dims_of(entry: Any) -> int:
    """How many dimensions an entry of an index takes."""
    if isinstance(entry, torch.Tensor) and entry.dtype is torch.bool:
        return entry.dim()
    return entry is not None and entry is not Ellipsis


def _cross_entropy(
    logits: Logits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    if target.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"the target has the shape {list(target.shape)}, for logits of {list(logits.shape)}",
            where="cross_entropy",
            fix="one target for each row of the logits",
        )
    require(
        reduction in ("sum", "mean", "none"), f"reduction={reduction!r}", "cross_entropy", '"mean" or "sum"'
    )
    plain = weight is None and size_average is None and reduce is None
    if not plain or target.is_floating_point() or logits.dim() != 2:
        raise logits.refuse("cross_entropy with weights, probabilities or more than two dimensions")
    return logits.losses(Targets(target, ignore_index, label_smoothing, reduction=reduction))


def logits_forward(
    head: nn.Module,
    enter: Callable[[torch.Tensor], torch.Tensor] | None = None,
    columns: tuple[int, int, AllReduce] | None = None,
    *,
    transposed: bool = False,
    check: Callable[[Targets], None] | None = None,
    whole: Callable[..., torch.Tensor] | None = None,
    refuse: Refuse | None = None,
) -> Callable[..., Any]:
    """A forward for a head, which returns `Logits` where it is asked to.

    Args:
        head: a module with a weight, and a bias or none.
        enter: what happens to its input.
        columns: the first column of the vocabulary that this rank has, how many all ranks have, and
            `all_reduce(tensor, "sum" | "max")` over them. None: all are here.
        transposed: whether the weight is `[width, vocabulary]`.
        check: looks at targets first.
        whole: the forward by which it returns a tensor, until `train_in_chunks`. None: it never does.
        refuse: makes the error for uses of `Logits` that need all of them.
    """
    here = None if columns is None else Columns(*columns)
    vocabulary: Any = head.out_features if columns is None else columns[1]

    def losses(
        weight: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor, targets: Targets
    ) -> torch.Tensor:
        targets.rows = targets.rows or getattr(head, _ROWS, None)
        if check is not None:
            check(targets)
        return targets.losses(hidden, weight.t() if transposed else weight, bias, here)

    def forward(
        module: Any, hidden: torch.Tensor, *, targets: Targets | None = None, asked: bool = False
    ) -> Any:
        if targets is not None:
            return losses(module.weight, module.bias, hidden, targets)
        if whole is not None and not (asked or (getattr(module, _TRAINS) and torch.is_grad_enabled())):
            return whole(module, hidden)
        by: Any = partial(losses, module.weight, module.bias)
        if hasattr(module, "unshard") and isinstance(module.weight, nn.Parameter):
            # a unit of FSDP2 lets go of its parameters after its call, and gathers them for a second one
            by = partial(_again, module)
        return Logits(by, hidden if enter is None else enter(hidden), vocabulary, refuse or refusal)

    setattr(head, _TRAINS, False)
    return forward


def has_logits(head: nn.Module) -> bool:
    """Whether the forward of a head is one of `logits_forward`."""
    return hasattr(head, _TRAINS)


def train_in_chunks(head: nn.Module, rows: int | None) -> None:
    """Let a head return `Logits` wherever gradients are computed, by so many rows at a time."""
    setattr(head, _ROWS, rows)
    setattr(head, _TRAINS, True)


def losses_of(head: Any, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The losses of a head's input. The head is called, so that hooks on it run.

    Raises:
        CapabilityError: it has a forward of its own.
    """
    if has_logits(head):
        return head(hidden, asked=True).losses(targets)
    check_linear(head, "fa.losses.linear_cross_entropy")
    if torch.compiler.is_compiling():
        return targets.losses(hidden, head.weight, head.bias)
    head.forward = types.MethodType(logits_forward(head), head)
    try:
        return head(hidden).losses(targets)
    finally:
        del head.forward
        delattr(head, _TRAINS)


def _again(module: nn.Module, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    return module(hidden, targets=targets)


def refusal(what: str) -> CapabilityError:
    """The error for a use of logits that are not there."""
    return CapabilityError(
        f"whole logits are never there in this step, and {what} needs them",
        where="fa.transforms.chunked_head",
        fix="fa.losses.linear_cross_entropy(hidden, model.head, labels), or log_probabilities; "
        "or remove chunked_head",
    )


def check_linear(head: Any, where: str) -> None:
    """Raise CapabilityError unless the forward of a head is that of `nn.Linear`."""
    if getattr(head.forward, "__func__", None) is not nn.Linear.forward:
        raise CapabilityError(
            f"the head is a {type(head).__name__} whose forward is not that of nn.Linear",
            where=where,
            fix="an nn.Linear as head, and chunked_head before transforms that replace forwards, such as "
            'cast_layers; "vocab" or "colwise_gather" in a plan of fa.tensor',
        )
