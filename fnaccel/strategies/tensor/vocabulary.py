"""Embeddings and logits whose vocabulary is cut over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

from fnaccel import _torch
from fnaccel.errors import CapabilityError
from fnaccel.strategies.tensor.collectives import Group, all_reduce


def check_within(tokens: torch.Tensor, vocabulary: int, what: str) -> None:
    """Raise IndexError for a token that no rank has, as torch does. On CUDA it is a device assertion."""
    if torch.compiler.is_compiling() or tokens.device.type not in ("cpu", "cuda"):
        return
    inside = ((tokens >= 0) & (tokens < vocabulary)).all()
    if tokens.device.type == "cuda":
        _torch.assert_on_device(inside)
    elif not inside:
        least, largest = (int(value) for value in tokens.aminmax())
        raise IndexError(f"a {what} is outside of the vocabulary of {vocabulary}: from {least} to {largest}")


def embedded(module: nn.Embedding, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """The rows of tokens that this rank has, and zeros for other tokens.

    Args:
        module: holds this rank's rows.
        tokens: of the whole vocabulary, of any shape.
        start: this rank's first token.
    """
    rows = module.weight.shape[0]
    check_within(tokens, module.num_embeddings, "token")
    local = tokens - start
    elsewhere = (local < 0) | (local >= rows)
    padding = module.padding_idx
    own = None if padding is None or not start <= padding < start + rows else padding - start
    values = F.embedding(
        local.masked_fill(elsewhere, 0), module.weight, own, scale_grad_by_freq=module.scale_grad_by_freq
    )
    return values.masked_fill(elsewhere.unsqueeze(-1), 0)


class VocabularyLogits:
    """The logits of this rank's columns of the vocabulary: `cross_entropy` takes them without a gather.

    Leading dimensions can be reshaped and indexed. Anything else that would read the logits raises.

    Args:
        part: of shape `[..., columns of this rank]`.
        vocabulary: the number of columns of all ranks.
        start: this rank's first column.
        group: the ranks along the tensor axis.
    """

    def __init__(self, part: torch.Tensor, vocabulary: int, start: int, group: Group) -> None:
        self._part, self._vocabulary, self._start, self._group = part, vocabulary, start, group

    def _with(self, part: torch.Tensor) -> VocabularyLogits:
        return VocabularyLogits(part, self._vocabulary, self._start, self._group)

    @property
    def shape(self) -> torch.Size:
        """Of the whole logits."""
        return torch.Size((*self._part.shape[:-1], self._vocabulary))

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self._part.dtype

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self._part.device

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions."""
        return self._part.dim()

    def float(self) -> VocabularyLogits:
        """In fp32."""
        return self._with(self._part.float())

    def to(self, *args: Any, **kwargs: Any) -> VocabularyLogits:
        """With another dtype or device."""
        return self._with(self._part.to(*args, **kwargs))

    def contiguous(self) -> VocabularyLogits:
        """As of a tensor."""
        return self._with(self._part.contiguous())

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> VocabularyLogits:
        """With some of the leading dimensions joined."""
        dims = self.dim()
        if end_dim % dims == dims - 1:
            raise _unable("flatten over the vocabulary")
        return self._with(self._part.flatten(start_dim, end_dim))

    def view(self, *shape: Any) -> VocabularyLogits:
        """With other leading dimensions, and the vocabulary last."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not sizes or sizes[-1] not in (self._vocabulary, -1) or (sizes[-1] == -1 and -1 in sizes[:-1]):
            raise _unable(f"a view as {list(sizes)}")
        return self._with(self._part.reshape(*sizes[:-1], self._part.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> VocabularyLogits:
        indices = index if isinstance(index, tuple) else (index,)
        dims = sum(map(_dims_of, indices))
        ellipsis = any(entry is Ellipsis for entry in indices)
        reaches = dims >= self.dim() or (ellipsis and indices[-1] is not Ellipsis)
        if reaches and not (isinstance(indices[-1], slice) and indices[-1] == slice(None)):
            raise _unable("an index into the vocabulary")
        return self._with(self._part[index])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unable(name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """`cross_entropy` of the whole vocabulary. Other functions raise."""
        if func is not F.cross_entropy:
            raise _unable(getattr(func, "__name__", str(func)))
        return _cross_entropy(*args, **(kwargs or {}))

    def losses(self, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each row."""
        return cast("torch.Tensor", _CutCrossEntropy.apply(self._part, target, self._start, self._group))


def _dims_of(entry: Any) -> int:
    """How many dimensions an entry of an index takes."""
    if isinstance(entry, torch.Tensor) and entry.dtype is torch.bool:
        return entry.dim()
    return entry is not None and entry is not Ellipsis


def _unable(what: str) -> CapabilityError:
    return CapabilityError(
        f"the ranks have different columns of the logits, and {what} needs all of them",
        where='fa.tensor(plan={head: "vocab"})',
        fix='"colwise_gather" in place of "vocab" gathers the logits',
    )


def _cross_entropy(
    logits: VocabularyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not plain or target.is_floating_point() or logits.dim() != 2:
        raise _unable(
            "cross_entropy with weights, label smoothing, probabilities or more than two dimensions"
        )
    counted = target != ignore_index
    target = target.masked_fill(~counted, 0)
    check_within(target, logits.shape[-1], "target")
    losses = logits.losses(target).masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _Context(FunctionCtx):
    """The tensors that the backward of a cut cross entropy needs."""

    saved_tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype


class _CutCrossEntropy(torch.autograd.Function):
    """Cross entropy of rows of logits, of which each rank has some columns. Two sums and a maximum."""

    @staticmethod
    def forward(
        ctx: _Context, part: torch.Tensor, target: torch.Tensor, start: int, group: Group
    ) -> torch.Tensor:
        wide = part if part.dtype is torch.float64 else part.float()
        largest = all_reduce(wide.amax(dim=-1), group, "max")
        exponents = (wide - largest.unsqueeze(-1)).exp()
        local = target - start
        own = (local >= 0) & (local < part.shape[-1])
        place = local.masked_fill(~own, 0).unsqueeze(-1)
        chosen = (wide.gather(-1, place).squeeze(-1) - largest).masked_fill(~own, 0.0)
        total, chosen = all_reduce(torch.stack([exponents.sum(dim=-1), chosen]), group)
        ctx.save_for_backward(exponents / total.unsqueeze(-1), place, own)
        ctx.dtype = part.dtype
        return total.log() - chosen

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore
        probabilities, place, own = ctx.saved_tensors
        slope = probabilities.scatter_add(-1, place, -own.to(probabilities.dtype).unsqueeze(-1))
        return (slope * grad.unsqueeze(-1)).to(ctx.dtype), None, None, None
