"""The parts of `fa.optim.chain`: records beside those of SGD and Adam, and the functions that make parts."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar

import attrs
import torch

from fnaccel.errors import ArgumentError, require
from fnaccel.optim.operations import Operations, Tensors
from fnaccel.optim.rules import (
    AddDecayedWeights,
    Masked,
    Part,
    ScaleByAdam,
    Slots,
    Trace,
    UpdateInfo,
    zeros,
)
from fnaccel.optim.selection import Select


@attrs.frozen(repr=False)
class ScaleByRms(Part):
    """Divide by the root of a decayed mean of squares, as `torch.optim.RMSprop`."""

    decay: float
    eps: float

    def init(self, params: Tensors) -> Slots:
        return {"square_avg": zeros(params)}

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        square = ops.addcmul_(ops.mul_(slots["square_avg"], self.decay), grads, grads, 1 - self.decay)
        # a copy, since the root is taken in place
        root = ops.root_(ops.mul(square, 1.0))
        return ops.div_(grads, ops.add_(root, self.eps)), {"square_avg": square}


@attrs.frozen(repr=False)
class ScaleByLion(Part):
    """The sign of a mixture of the gradient and its decayed mean."""

    betas: tuple[float, float]

    def init(self, params: Tensors) -> Slots:
        return {"exp_avg": zeros(params)}

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        mixed = ops.sign_(ops.lerp(slots["exp_avg"], grads, 1 - self.betas[0]))
        mean = ops.lerp_(slots["exp_avg"], grads, 1 - self.betas[1])
        return mixed, {"exp_avg": mean}


@attrs.frozen(repr=False)
class TrustRatio(Part):
    """Multiply each tensor by the norm of the parameter over its own norm. By 1 if either is 0."""

    coefficient: float
    eps: float

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        weight, move = ops.norms(params, grads)
        absent = (weight == 0) | (move == 0)
        ratio = self.coefficient * weight / (torch.where(absent, 1.0, move) + self.eps)
        return ops.mul_(grads, list(torch.where(absent, 1.0, ratio).unbind())), slots


@attrs.frozen(repr=False)
class ClipNorm(Part):
    """Scale all tensors down to one Euclidean norm."""

    max_norm: float

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        (norms,) = ops.norms(grads)
        norm = torch.linalg.vector_norm(norms)
        return ops.mul_(grads, (self.max_norm / norm).clamp(max=1.0)), slots


@attrs.frozen(repr=False)
class AdaptiveClip(Part):
    """Scale each row down to a share of the norm of the parameter's row. A vector is one row."""

    by_rows: ClassVar[bool] = True
    clipping: float
    eps: float

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        weights, norms = ops.row_norms(params, grads)
        factors = [
            (self.clipping * weight.clamp(min=self.eps) / norm.clamp(min=1e-6)).clamp(max=1.0)
            for weight, norm in zip(weights, norms, strict=True)
        ]
        return ops.mul_(grads, factors), slots


@attrs.frozen(repr=False)
class Centralize(Part):
    """Subtract its mean from each row of a matrix or more."""

    by_rows: ClassVar[bool] = True

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        pairs = zip(grads, ops.row_means(grads), strict=True)
        return [grad if grad.ndim < 2 else grad - mean for grad, mean in pairs], slots


@attrs.frozen(repr=False)
class Lookahead(Part):
    """Slow weights, to which the parameters go back after some updates."""

    every: int
    step_size: float

    def init(self, params: Tensors) -> Slots:
        return {"slow": [param.clone() for param in params]}

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        """Begin at the parameters of the first update: weights may have been adopted after `init`."""
        return grads, {"slow": ops.choose_(slots["slow"], info.updates == 1, params)}

    def after(
        self, ops: Operations, params: Tensors, slots: Slots, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        due = info.updates % self.every == 0
        if due is False:  # known on the host
            return params, slots
        moved = ops.lerp(slots["slow"], params, self.step_size)
        return ops.choose_(params, due, moved), {"slow": ops.choose_(slots["slow"], due, moved)}


def add_decayed_weights(decay: float, *, mask: Select | None = None) -> Part:
    """Add `decay` times the parameters: weight decay.

    After `scale_by_adam` it is that of AdamW, apart from the gradient. Before it, that of Adam.

    Args:
        decay: the factor, 0 or more.
        mask: the parameters that decay: a pattern of names, as a shell matches them, or a function
            `(name, parameter) -> bool`. None: all.

    Raises:
        ArgumentError: a negative factor. At `init`: a mask that selects no parameter.

    Source: https://arxiv.org/abs/1711.05101

    Example:
        >>> fa.optim.add_decayed_weights(0.1, mask="*weight")
        masked(part=add_decayed_weights(decay=0.1), mask='*weight')
    """
    _check("add_decayed_weights", decay=decay)
    return AddDecayedWeights(decay) if mask is None else masked(AddDecayedWeights(decay), mask)


def scale_by_adam(*, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Part:
    """Adam's direction: the decayed mean of gradients over the root of that of their squares.

    Slots `exp_avg` and `exp_avg_sq`, as those of torch's optimizers.

    Args:
        betas: the decay of both means, in [0, 1).
        eps: added to the root.

    Raises:
        ArgumentError: a beta outside of [0, 1), or a negative `eps`.

    Source: https://arxiv.org/abs/1412.6980

    Example:
        >>> fa.optim.chain(fa.optim.scale_by_adam(), lr=1e-3)
    """
    _check("scale_by_adam", eps=eps)
    return ScaleByAdam(_betas("scale_by_adam", betas), eps)


def scale_by_rms(*, decay: float = 0.99, eps: float = 1e-8) -> Part:
    """Divide by the root of the decayed mean of squares, as `torch.optim.RMSprop`. Slot `square_avg`.

    Args:
        decay: of the mean, in [0, 1).
        eps: added to the root.

    Raises:
        ArgumentError: a decay outside of [0, 1), or a negative `eps`.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html

    Example:
        >>> fa.optim.chain(fa.optim.scale_by_rms(), fa.optim.trace(0.9), lr=1e-3)
    """
    _check("scale_by_rms", below=("decay",), decay=decay, eps=eps)
    return ScaleByRms(decay, eps)


def trace(decay: float, *, nesterov: bool = False) -> Part:
    """Momentum: the sum of gradients, of which the earlier ones decay. Slot `momentum_buffer`.

    Args:
        decay: the factor of the earlier sum, in [0, 1).
        nesterov: whether the next gradient is looked at ahead, as in `torch.optim.SGD`.

    Raises:
        ArgumentError: a decay outside of [0, 1).

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html

    Example:
        >>> fa.optim.chain(fa.optim.trace(0.9, nesterov=True), lr=0.1)
    """
    _check("trace", below=("decay",), decay=decay)
    return Trace(decay, nesterov)


def scale_by_lion(*, betas: tuple[float, float] = (0.9, 0.99)) -> Part:
    """Lion's direction: the sign of a mixture of the gradient and its decayed mean. Slot `exp_avg`.

    Args:
        betas: the share of the mean in the mixture, and the decay of the mean, in [0, 1).

    Raises:
        ArgumentError: a beta outside of [0, 1).

    Source: https://arxiv.org/abs/2302.06675

    Example:
        >>> fa.optim.chain(fa.optim.scale_by_lion(), fa.optim.add_decayed_weights(0.1), lr=1e-4)
    """
    return ScaleByLion(_betas("scale_by_lion", betas))


def trust_ratio(*, coefficient: float = 1.0, eps: float = 0.0) -> Part:
    """Multiply each tensor by `coefficient * norm of the parameter / (its own norm + eps)`: LARS and LAMB.

    Norms are those of whole tensors, also if ranks hold parts. A tensor passes unchanged if either norm is 0.

    Args:
        coefficient: a factor of the ratio.
        eps: added to the norm.

    Raises:
        ArgumentError: a negative number.

    Source: https://arxiv.org/abs/1904.00962

    Example:
        >>> lamb = fa.optim.chain(
        ...     fa.optim.scale_by_adam(), fa.optim.add_decayed_weights(0.01), fa.optim.trust_ratio(), lr=1e-3
        ... )
    """
    _check("trust_ratio", coefficient=coefficient, eps=eps)
    return TrustRatio(coefficient, eps)


def clip_norm(max_norm: float) -> Part:
    """Scale all tensors down to a Euclidean norm of at most `max_norm`, all of the optimizer's together.

    `fa.clip_norm` is the transform of a step: it clips the gradient of the whole model and reports its norm.
    This part clips at its place in the chain, and the parameters of this optimizer only.

    Args:
        max_norm: the largest norm allowed.

    Raises:
        ArgumentError: a norm that is not positive.

    Source: https://arxiv.org/abs/1211.5063

    Example:
        >>> fa.optim.chain(fa.optim.clip_norm(1.0), fa.optim.trace(0.9), lr=0.1)
    """
    positive = isinstance(max_norm, Real) and max_norm > 0
    require(positive, f"a norm can't be clipped to {max_norm}", "fa.optim.clip_norm", "max_norm is positive")
    return ClipNorm(max_norm)


def adaptive_clip(clipping: float, *, eps: float = 1e-3) -> Part:
    """Scale each row of a gradient down to `clipping` times the norm of the parameter's row (AGC).

    A row is the gradient of one output: all dimensions but the first. A vector is one row.

    Args:
        clipping: the largest ratio of both norms.
        eps: the least norm of a row that counts.

    Raises:
        ArgumentError: a number that is not positive.
        CapabilityError: at `init`, a complex parameter.

    Source: https://arxiv.org/abs/2102.06171

    Example:
        >>> fa.optim.chain(fa.optim.adaptive_clip(0.01), fa.optim.trace(0.9), lr=0.1)
    """
    _check("adaptive_clip", clipping=clipping, eps=eps)
    require(clipping > 0, f"clipping={clipping} stops all rows", "fa.optim.adaptive_clip", "clipping=0.01")
    return AdaptiveClip(clipping, eps)


def centralize() -> Part:
    """Subtract its mean from each row of a gradient. Vectors pass unchanged.

    Raises:
        CapabilityError: at `init`, a complex parameter.

    Source: https://arxiv.org/abs/2004.01461

    Example:
        >>> fa.optim.chain(fa.optim.centralize(), fa.optim.scale_by_adam(), lr=1e-3)
    """
    return Centralize()


def lookahead(*, every: int = 5, step_size: float = 0.5) -> Part:
    """Slow weights, which move to the parameters after each `every` updates. Then parameters go back to them.

    Slot `slow`. It acts after the move, wherever it stands in the chain.

    Args:
        every: the number of updates between two moves, 1 or more.
        step_size: the share of the way that slow weights move.

    Raises:
        ArgumentError: no such number.

    Source: https://arxiv.org/abs/1907.08610

    Example:
        >>> fa.optim.chain(fa.optim.scale_by_adam(), fa.optim.lookahead(every=6), lr=1e-3)
    """
    whole = isinstance(every, int) and not isinstance(every, bool) and every > 0
    require(whole, f"every={every!r} is no number of updates", "fa.optim.lookahead", "lookahead(every=5)")
    _check("lookahead", step_size=step_size)
    return Lookahead(every, step_size)


def masked(part: Part, mask: Select) -> Part:
    """A part for some parameters. The others pass it unchanged, and have no slots of it.

    Args:
        part: any part.
        mask: a pattern of names, as a shell matches them, or a function `(name, parameter) -> bool`. The
            parameter has its whole shape.

    Raises:
        ArgumentError: no part, or no selection. At `init`: a mask that selects no parameter.

    Example:
        >>> fa.optim.masked(fa.optim.trust_ratio(), lambda name, parameter: parameter.ndim > 1)
    """
    check_part(part, "fa.optim.masked")
    require(
        isinstance(mask, str) or callable(mask),
        f"{mask!r} selects no parameters",
        "fa.optim.masked",
        'give a pattern such as "*weight", or a function (name, parameter) -> bool',
    )
    return Masked(part, mask)


def check_part(part: Any, where: str) -> None:
    """Raise ArgumentError if a value is no part of an optimizer. Transforms of a step are named."""
    if isinstance(part, Part):
        return
    name = getattr(part, "__name__", "") or getattr(part, "name", "")
    if getattr(part, "is_transform", False) or getattr(type(part), "is_transform", False):
        problem = f"fa.{name or 'chain'} is a transform of a step, and no part of an optimizer"
        fix = f"fa.chain({name}, ...)(loss_fn) takes transforms"
        if name == "clip_norm":
            fix = f"fa.optim.{name}(...) is the part. {fix}"
    elif isinstance(part, type) or callable(part):
        problem = f"{name or type(part).__name__} is a function or a class, and no part of an optimizer"
        fix = f"call it: {name or 'part'}(...)"
    else:
        problem = f"{type(part).__name__} is no part of an optimizer"
        fix = "fa.optim.scale_by_adam(), fa.optim.trust_ratio(), or a record of fa.extend.Part"
    raise ArgumentError(problem, where=where, fix=fix)


def _check(name: str, below: Sequence[str] = (), **numbers: Any) -> None:
    """Raise ArgumentError for a negative number, and for one of `below` that is 1 or more."""
    for option, number in numbers.items():
        real = isinstance(number, int | float) and number >= 0
        require(real, f"{option}={number!r} is no number from 0 on", f"fa.optim.{name}", f"{option}=0.01")
        if option in below:
            require(number < 1, f"{option}={number} is not below 1", f"fa.optim.{name}", f"{option}=0.9")


def _betas(name: str, betas: Any) -> tuple[float, float]:
    good = isinstance(betas, tuple | list) and len(betas) == 2 and not any(map(callable, betas))
    good = good and all(0 <= beta < 1 for beta in betas)
    require(good, f"betas={betas} are not two numbers in [0, 1)", f"fa.optim.{name}", "betas=(0.9, 0.999)")
    return betas[0], betas[1]
