"""The optimizer and the schedule that a DeepSpeed configuration names, as descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import attrs

from fnaccel.errors import CapabilityError, require
from fnaccel.extend import Group, Optimizer
from fnaccel.optim.description import options_of
from fnaccel.optim.schedules import Rate
from fnaccel.optim.selection import Groups, pairs_of
from fnaccel.step.loss import Scalar


@attrs.frozen
class DeepspeedRate:
    """A schedule that DeepSpeed carries out: see `deepspeed_lr`."""

    runtime: ClassVar[str] = "deepspeed"
    host_only: ClassVar[bool] = True

    lr: float
    warmup: int | None = None
    total: int | None = None
    low: float | None = None

    def __call__(self, updates: Scalar) -> float:  # noqa: ARG002 - the signature of a schedule
        """The first rate of the optimizer. The schedule itself is DeepSpeed's."""
        return self.lr


@attrs.frozen
class DeepspeedKernel:
    """The optimizer that the configuration names."""

    runtime: ClassVar[str] = "deepspeed"

    def bind(self, groups: Sequence[Group]) -> NoReturn:  # noqa: ARG002 - the signature of a kernel
        """Raise: DeepSpeed makes the optimizer."""
        raise CapabilityError(
            "only DeepSpeed has the optimizer that its configuration names",
            where="fa.optim.from_deepspeed()",
            fix="fa.adamw(...), or fa.distribute(model, fa.deepspeed(config=...))",
        )


def from_deepspeed(lr: Rate, *, groups: Groups = None, **options: Any) -> Optimizer:
    """The optimizer that the DeepSpeed configuration names (`"optimizer": {"type": ..., "params": ...}`).

    Args:
        lr: a number, or `fa.optim.deepspeed_lr(...)` if the configuration names a scheduler. Fills `"auto"`.
        groups: `{selection: options}`, as for `fa.adamw`.
        options: further parameters, which have to agree with the configuration's.

    Example:
        >>> config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
        >>> model = fa.distribute(GPT, fa.deepspeed(config=config))
        >>> train_step = fa.train_step(loss_fn, model=model, optimizer=fa.optim.from_deepspeed(3e-4))
        >>> train_step.plan.deepspeed["optimizer"]["params"]["lr"]
        0.0003
    """
    group_options = dict.fromkeys(name for _, extra in pairs_of(groups) for name in extra if name != "lr")
    _, checked = options_of("from_deepspeed", {**group_options, **options}, groups)
    return Optimizer(
        name="from_deepspeed", lr=lr, options=tuple(options.items()), groups=checked, kernel=DeepspeedKernel()
    )


def deepspeed_lr(
    lr: float, *, warmup: int | None = None, total: int | None = None, low: float | None = None
) -> DeepspeedRate:
    """The schedule that the DeepSpeed configuration names (`"scheduler": {"type": ..., "params": ...}`).

    Args:
        lr: the highest rate: `warmup_max_lr`, OneCycle's `cycle_max_lr`.
        warmup: updates until then: `warmup_num_steps`.
        total: updates in all: `total_num_steps`.
        low: the first rate: `warmup_min_lr`, `cycle_min_lr`, `lr_range_test_min_lr`. Fills an "auto" with 0.

    `fa.train_step` raises if the file says otherwise, or if its schedule has no such argument.

    Raises:
        ArgumentError: a rate that is none.

    Example:
        >>> fa.adamw(lr=fa.optim.deepspeed_lr(3e-4, warmup=100, total=1_000))
    """
    require(lr > 0, f"a rate can't be {lr}", "fa.optim.deepspeed_lr", "a positive number")
    return DeepspeedRate(lr, warmup, total, low)
