"""The losses of a head's rows as functions that autograd and `torch.func` can differentiate."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from fnaccel.errors import CapabilityError
from fnaccel.losses.chunks import Columns, Terms, losses_and_gradients, plain_losses

_ROWS_ON_HOST, _ROWS = 128, 1024


@attrs.define(eq=False)
class Targets:
    """Labels, and what their losses consist of: the arguments of `linear_cross_entropy`.

    Attributes:
        scale: times which the logits are, before a soft cap.
    """

    labels: torch.Tensor
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    reduction: str = "sum"
    rows: int | None = None
    scale: float = 1.0

    def losses(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        columns: Columns | None = None,
    ) -> torch.Tensor:
        """The loss of the rows of a head's input, by its parameters."""
        if self.scale != 1.0:
            hidden, bias = hidden * self.scale, None if bias is None else bias * self.scale
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        rows = self.rows or (_ROWS_ON_HOST if device == "cpu" else _ROWS)
        terms = Terms(
            self.ignore_index, self.label_smoothing, self.z_loss, self.soft_cap, compute, rows, columns
        )
        flat, labels = hidden.reshape(-1, hidden.shape[-1]), self.labels.reshape(-1)
        if self.reduction == "none":
            return _Rows.apply(flat, weight, bias, labels, terms).view(self.labels.shape)
        given = torch.is_grad_enabled()
        wants = tuple(given and x is not None and x.requires_grad for x in (flat, weight, bias))
        total = _Sum.apply(flat, weight, bias, labels, wants, terms)[0]
        return total if self.reduction == "sum" else total / (labels != self.ignore_index).sum()


def _selected(info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments for each place along the dims that `vmap` maps."""
    for i in range(info.batch_size):
        yield [
            x.select(dim, i) if isinstance(x, torch.Tensor) and dim is not None else x
            for x, dim in zip(args, in_dims, strict=True)
        ]


class _Rows(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(hidden: Any, weight: Any, bias: Any, labels: torch.Tensor, terms: Terms) -> torch.Tensor:
        return losses_and_gradients(hidden, weight, bias, labels, None, (False,) * 3, terms)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        *tensors, ctx.terms = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wants = tuple(ctx.needs_input_grad[:3])
        found = _Gradients.apply(grad, *ctx.saved_tensors, None, None, None, wants, ctx.terms)
        return *(x if want else None for x, want in zip(found, wants, strict=True)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return torch.stack([_Rows.apply(*each) for each in _selected(info, in_dims, args)]), 0


class _Sum(torch.autograd.Function):
    """The sum of the losses, and its gradients, which the backward takes."""

    @staticmethod
    def forward(
        hidden: Any, weight: Any, bias: Any, labels: torch.Tensor, wants: tuple[bool, ...], terms: Terms
    ) -> Any:
        losses, *grads = losses_and_gradients(hidden, weight, bias, labels, None, wants, terms)
        return losses.sum(), *grads

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.had, ctx.terms = inputs
        _, *grads = output
        ctx.mark_non_differentiable(*grads)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *grads)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * 6
        *tensors, d_hidden, d_weight, d_bias = ctx.saved_tensors
        wants = tuple(ctx.needs_input_grad[:3])
        # inside of vmap a forward does not see who takes a gradient
        known = (d_hidden, d_weight, d_bias) if wants == ctx.had else (None,) * 3
        found = _Gradients.apply(grad, *tensors, *known, wants, ctx.terms)
        return *(x if want else None for x, want in zip(found, wants, strict=True)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        outputs = [_Sum.apply(*each) for each in _selected(info, in_dims, args)]
        return tuple(map(torch.stack, zip(*outputs, strict=True))), (0,) * 4


class _Gradients(torch.autograd.Function):
    """The gradients of losses, times a factor for each row or one for all. It can be differentiated."""

    @staticmethod
    def forward(
        factor: torch.Tensor,
        hidden: Any,
        weight: Any,
        bias: Any,
        labels: torch.Tensor,
        d_hidden: Any,
        d_weight: Any,
        d_bias: Any,
        wants: tuple[bool, ...],
        terms: Terms,
    ) -> Any:
        if d_hidden is not None:
            return tuple(factor.to(x.dtype) * x for x in (d_hidden, d_weight, d_bias))
        factors = factor.expand(len(hidden))
        return losses_and_gradients(hidden, weight, bias, labels, factors, wants, terms)[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        factor, hidden, weight, bias, labels, *_, ctx.wants, ctx.terms = inputs
        ctx.save_for_backward(factor, hidden, weight, bias, labels)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        factor, *inputs, labels = ctx.saved_tensors
        if ctx.terms.columns is not None:
            raise CapabilityError(
                "a second derivative needs all columns of the vocabulary, and ranks have different ones",
                where="fa.losses.linear_cross_entropy",
                fix='F.cross_entropy of the logits that "colwise_gather" gathers in a plan of fa.tensor',
            )
        wanted = [place for place, want in enumerate(ctx.wants) if want]
        vjp: Any = torch.func.vjp  # its types leave out that it takes no `has_aux`
        # also by those without a gradient here: an outer derivative may be by them
        places = [place for place, value in enumerate(inputs) if value is not None]

        def gradients(factor: torch.Tensor, *chosen: torch.Tensor) -> Any:
            def losses(*chosen: torch.Tensor) -> torch.Tensor:
                given: list[Any] = list(inputs)
                for place, value in zip(places, chosen, strict=True):
                    given[place] = value
                return plain_losses(given[0], given[1], given[2], labels, ctx.terms)

            found, pull = vjp(losses, *chosen)
            pulled = dict(zip(places, pull(factor.to(found.dtype).expand_as(found)), strict=True))
            return tuple(pulled[place] for place in wanted)

        _, pull = vjp(gradients, factor, *(inputs[place] for place in places))
        by_factor, *by_inputs = pull(tuple(slopes[place] for place in wanted))
        found = dict(zip(places, by_inputs, strict=True))
        return by_factor, *(found.get(place) for place in range(3)), *(None,) * 6

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        outputs = [_Gradients.apply(*each) for each in _selected(info, in_dims, args)]
        return tuple(map(torch.stack, zip(*outputs, strict=True))), (0,) * 3
