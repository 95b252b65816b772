"""`per_example`: clip the gradient of each row, and add noise (DP-SGD). `row_norms` reads the norms."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.collectives.objects import broadcast_objects
from fnaccel.errors import ArgumentError, require
from fnaccel.models.parameter_values import params
from fnaccel.step.chain import Chain, chain, takes_step
from fnaccel.step.given_gradient import with_gradient
from fnaccel.step.loss import Concat, Mean, readable
from fnaccel.step.loss_info import Informed, takes_info
from fnaccel.step.step import Capability, Info, Phase, StepLike, Transform, as_step
from fnaccel.transforms.row_gradients import Rows, check_rows, rows_of
from fnaccel.tree import Tree
from fnaccel.world.random_streams import fold
from fnaccel.world.world import current

_WHERE = "fa.per_example"


@attrs.frozen
class PerExample:
    """Each row's gradient has at most the norm `clip`, and the total has the sum of them as its gradient."""

    clip: float
    chunk: int | None = None

    def __call__(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss of a batch whose gradient is that of clipped rows."""

        def clipped(model: Any, batch: Tree, *given: Any) -> Mean:
            sums: dict[str, torch.Tensor] = {}
            total: Any = 0.0
            weight: Any = 0
            aux: list[Any] = []
            for rows in rows_of(loss_fn, model, batch, given, self.chunk, _WHERE):
                factors = (self.clip / rows.norms).clamp(max=1.0)  # a norm of 0 gives infinity, so 1
                finite = rows.norms.isfinite()
                factors = torch.where(finite, factors, 0.0)
                all_are = readable(finite) and bool(finite.all())
                for name, grad in rows.grads.items():
                    # 0 times infinity would be NaN, and show that the row is there
                    mask = finite.view(-1, *[1] * (grad.dim() - 1))
                    bounded = grad if all_are else torch.where(mask, grad, 0.0)
                    part = torch.tensordot(factors.to(grad.dtype), bounded, 1)
                    sums[name] = sums[name] + part if name in sums else part
                total, weight = total + rows.totals.sum(), weight + rows.weight
                aux.append(rows.aux)
            return Mean(with_gradient(total, params(model), sums), weight, _joined(aux))

        return clipped


def _joined(aux: list[Any]) -> Any:
    """aux of all chunks: of one chunk as it is."""
    if len(aux) == 1 or aux[0] is None:
        return aux[0]
    raise ArgumentError(
        "aux of several chunks of rows", where=f"{_WHERE}(chunk=)", fix="leave aux or chunk= out"
    )


@dataclass(frozen=True)  # no attrs record, which would be part of a captured step
class Noise:
    """Gaussian noise on the gradient of a step, that of one whole tensor on every layout.

    The seed is that of the first rank, and in no checkpoint: who knows the noise can take it away again.

    Attributes:
        multiplier, clip: the noise on the sum of rows has their product as its deviation.
        seed: of the noise, or None for a secret one.
        rows: divides the sum. None: the weight does.
    """

    multiplier: float
    clip: float
    seed: int | None
    rows: int | None = None

    @property
    def hides(self) -> bool:
        """Whether nobody is to see the gradient before it."""
        return self.multiplier > 0

    def describe(self) -> str:
        """The text in the plan."""
        return f"deviation={self.multiplier * self.clip:g} / {'weight' if self.rows is None else self.rows}"

    @functools.cached_property
    def root(self) -> int:
        """The seed of all noise of this process."""
        if self.seed is not None:
            return self.seed
        return broadcast_objects(int.from_bytes(os.urandom(8), "little") >> 1, world=current(None))

    def __call__(self, grads: dict[str, Any], own: Tree, info: Info) -> tuple[dict[str, Any], Tree]:
        """The gradients with noise."""
        own = {**own, "updates": own["updates"] + 1}
        weight = info.metrics["weight"]
        if self.rows is not None:
            grads = {name: grad * (weight / self.rows) for name, grad in grads.items()}
        if not self.multiplier:
            return grads, own
        deviation = self.multiplier * self.clip / (weight if self.rows is None else self.rows)
        return {
            name: grad + self._like(grad, fold(self.root, int(info.step), number), deviation)
            for number, (name, grad) in enumerate(grads.items())
        }, own

    def made_all(self, own: Tree, updates: int) -> bool:
        """Whether that many updates, all of a state, had this noise."""
        same = all(float(own[name]) == value for name, value in self.numbers().items())
        return same and int(own["updates"]) == updates

    def numbers(self) -> dict[str, float]:
        """Which noise it is, as a state keeps it."""
        return {"multiplier": self.multiplier, "clip": self.clip, "rows": float(self.rows or 0)}

    def _like(self, grad: Any, seed: int, deviation: float | torch.Tensor) -> Any:
        generator = torch.Generator(grad.device).manual_seed(seed)
        whole = torch.randn(grad.shape, generator=generator, device=grad.device, dtype=grad.dtype) * deviation
        return tree.laid_out(whole, grad)


@dataclass(frozen=True)  # compared by its fields, as a bound method is not
class Begun:
    """The state of noise before the first update: how many updates had it, and which noise it is."""

    noise: Noise

    def __call__(self, params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A state that others have trained has made more updates than these."""
        device = next(iter(params.values())).device
        kinds = self.noise.numbers().items()
        begun = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in kinds}
        return {**begun, "updates": torch.zeros((), dtype=torch.int64, device=device)}


@takes_step
def per_example(
    *,
    clip: float,
    noise: float = 0.0,
    rows: int | None = None,
    chunk: int | None = None,
    seed: int | None = None,
) -> Transform | Chain:
    """Clip the gradient of each row of a batch, and add noise to their sum: DP-SGD (Abadi et al. 2016).

    The loss function stays as it is: a row's loss is its total for a batch of that row alone. The gradient of
    a step is the sum of clipped rows over the global weight, at any split into micro-batches and ranks, plus
    noise of the deviation `noise * clip / weight` for each element: https://arxiv.org/abs/1607.00133

    This bounds what one row can change. `fa.epsilon` says how much that tells about a row, if batches come
    from `fa.shard(loader, sampling="poisson")` and the sum is divided by a fixed number: `rows`.

    A row whose gradient is not finite counts as one of zeros. Dropout draws other numbers for each row.
    `torch.func.vmap` computes all rows at once.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        clip: the largest norm of a row's gradient, over all trained parameters.
        noise: the deviation of the noise, as a multiple of `clip`.
        rows: divide the sum by this number in place of the weight: the expected rows of a global batch.
        chunk: how many rows have their gradients in memory at a time. By default all rows of a micro-batch.
        seed: of the noise. By default secret, drawn by the first rank, and in no checkpoint.

    Raises:
        ArgumentError: `clip` or `rows` is not positive, or `noise` is negative, or a multiple of no `clip`.
        CapabilityError: in a call, if a batch norm is in training mode. Or as `fa.params`.
        MicroBatchError: in a call, if the tensors of a batch differ in their length.

    Example:
        >>> step = fa.per_example(loss_fn, clip=1.0, noise=1.1)
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), batch)
    """
    positive = isinstance(clip, Real) and clip > 0
    require(positive, f"rows can't be clipped to {clip}", _WHERE, "clip is positive")
    least = isinstance(noise, Real) and noise >= 0
    require(least, f"the noise has the deviation {noise}", _WHERE, "noise is 0 or more")
    bounded = math.isfinite(clip) or not noise
    require(bounded, f"noise of {noise} times clip={clip}", _WHERE, "a finite clip, such as 1.0")
    check_rows(rows, f"{_WHERE}(rows=)")
    check_rows(chunk, f"{_WHERE}(chunk=)")
    clips = Transform("per_example", Phase.FORWARD, apply=PerExample(float(clip), chunk))
    if not noise and rows is None:
        return clips
    adds = Noise(float(noise), float(clip), seed, rows)
    needs = frozenset({Capability.GRADIENTS})
    return chain(
        clips, Transform("per_example.noise", Phase.GRADS, apply=adds, init=Begun(adds), needs=needs)
    )


def row_norms(loss_fn: StepLike, *, chunk: int | None = None) -> Callable[..., dict[str, Any]]:
    """A metric function that reads the norm of each row's gradient. It changes nothing.

    Args:
        loss_fn: a loss function or a step.
        chunk: how many rows have their gradients in memory at a time.

    Returns:
        `fn(model, batch)`, for `train_step.look` and `fa.evaluate`: `{"norm": fa.Concat([rows]), "square":
        fa.Mean}`. The mean square, less the square of the norm of the mean gradient, is the variance.

    Raises:
        As `fa.per_example`.

    Example:
        >>> train_step = make(loss_fn)
        >>> state = train_step.init()
        >>> found = fa.evaluate(train_step, state, fa.row_norms(loss_fn), fa.shard(loader))
        >>> found["norm"].shape, found["norm"].topk(3).indices.shape  # the rows with the largest norms
        (torch.Size([12]), torch.Size([3]))
    """
    plain = as_step(loss_fn, "fa.row_norms").forward()
    informed = Informed(plain) if takes_info(plain) else None
    forward = plain if informed is None else informed
    check_rows(chunk, "fa.row_norms(chunk=)")

    def norms(model: Any, batch: Tree, *given: Any) -> dict[str, Any]:
        chunks: list[Rows] = list(rows_of(forward, model, batch, given, chunk, "fa.row_norms"))
        every = torch.cat([rows.norms for rows in chunks])
        return {"norm": Concat(every), "square": Mean(every.square().sum(), weight=len(every))}

    if informed is None:
        return norms

    def with_info(model: Any, batch: Tree, *given: Any, info: Any) -> dict[str, Any]:
        informed.info = info
        return norms(model, batch, *given)

    return with_info
