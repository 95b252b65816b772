"""`with_ema`: an exponential moving average of the parameters, and of buffers if asked for: `state.ema`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import attrs
import torch

from fnaccel import _torch
from fnaccel.errors import UnknownNameError, nearest, require
from fnaccel.step.chain import takes_step
from fnaccel.step.settings import Settings
from fnaccel.step.step import Capability, Info, Phase, Transform
from fnaccel.tree import Tree

if TYPE_CHECKING:
    from fnaccel.engine.engine import Engine

Buffers = Literal["now", "average"]
"""The buffers that go with averaged parameters: those of the model at that time, or averages."""


@attrs.frozen
class Ema:
    """`ema = decay * ema + (1 - decay) * params` after each applied update."""

    pure: ClassVar[bool] = True
    decay: Any
    buffers: Buffers = "now"

    def configure(self, settings: Settings) -> Settings:
        """Keep averages."""
        return attrs.evolve(settings, ema_decay=self.decay, ema_buffers=self.buffers == "average")

    def on_update(self, engine: Engine, state: Tree, info: Info) -> Any:
        """Move the averages, sharded as the parameters are. No change if the update was skipped."""
        averages = engine.averages
        pairs = zip(engine.layout.leaves, averages, strict=True)
        # averages of 16-bit parameters are fp32
        shards = [
            leaf.shard if leaf.shard.dtype is average.dtype else leaf.shard.to(average.dtype)
            for leaf, average in pairs
        ]
        weight = 1.0 - (info.metrics["ema_decay"] if callable(self.decay) else self.decay)
        if info.skip is not None:
            weight = weight * (1.0 - info.skip)
        _torch.foreach_lerp_(averages, shards, weight)
        return state

    def next_averages(self, averages: list[torch.Tensor], params: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same as a function: the next averages of an update that is not left out."""
        pairs = zip(averages, params, strict=True)
        return [
            average + (1.0 - self.decay) * (param.to(average.dtype) - average) for average, param in pairs
        ]


@takes_step
def with_ema(decay: float | Callable[[Any], Any] = 0.999, buffers: Buffers = "now") -> Transform:
    """Keep an average of the parameters (Polyak and Juditsky 1992) in `state.ema`, in fp32 at least.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        decay: the share of the old average kept at each update, in [0, 1): a number, or a schedule
            `updates -> decay`, such as `fa.schedules.ema_warmup()`. Its value is `metrics["ema_decay"]`.
        buffers: `"now"` uses averaged parameters with the buffers that the model has at that time.
            `"average"` averages saved floating-point buffers too, such as running statistics, as
            `torch.optim.swa_utils.AveragedModel(use_buffers=True)` does. Other buffers, and one that begins
            with an infinity (a mask), are those of the model.

    Raises:
        ArgumentError: `decay` is outside [0, 1).
        UnknownNameError: `buffers` is none of these.

    Example:
        >>> step = fa.with_ema(loss_fn, 0.999)
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), batch)
        >>> loss = fa.evaluate(train_step, state, loss_fn, fa.shard(loader), ema=True)
        >>> step = fa.with_ema(loss_fn, fa.schedules.ema_warmup(0.9999))
    """
    first = decay(0) if callable(decay) else decay
    require(0 <= first < 1, f"an average can't decay by {first}", "fa.with_ema", "decay is in [0, 1)")
    if buffers not in get_args(Buffers):
        fix = nearest(str(buffers), get_args(Buffers))
        raise UnknownNameError(f"there are no buffers {buffers!r}", where="fa.with_ema(buffers=)", fix=fix)
    return Transform(
        "with_ema",
        Phase.UPDATE,
        apply=Ema(decay if callable(decay) else float(decay), buffers),
        needs=frozenset({Capability.PARAMETERS}),
    )
