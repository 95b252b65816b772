"""Which strategies fit into the memory of a device, and which of them costs least."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import attrs

from fnaccel import transforms
from fnaccel.errors import FnaccelError, RepeatedTransformError
from fnaccel.estimate.training_memory import TrainingEstimate, training
from fnaccel.extend import rows_of
from fnaccel.optim.several import OptimizerLike
from fnaccel.step.step import StepLike
from fnaccel.strategies.distribute import Model, distribute
from fnaccel.tree import Tree


@attrs.frozen(kw_only=True)
class Choice:
    """A strategy, with or without remat, and its estimate.

    Attributes:
        strategy: its text.
        remat: whether blocks are recomputed.
        estimate: None if the model or the ranks do not allow it.
        obstacle: the reason, or "".
        fits: whether its peak is within the budget.

    Example:
        >>> choices = fa.estimate.choices(loss_fn, GPT, optimizer=fa.sgd(0.1), batch=batch, budget=2**30)
        >>> [(each.strategy, each.remat, each.fits) for each in choices]
        [('local', False, True), ('local', True, True)]
    """

    strategy: str
    remat: bool
    estimate: TrainingEstimate | None
    obstacle: str = ""
    fits: bool = False

    @property
    def cost(self) -> tuple[float, float]:
        """Operations and bytes sent for the rows of a rank without `tp` and `pp`. Less is better.

        Operations count as more by the time in which stages wait.
        """
        if self.estimate is None:
            return float("inf"), float("inf")
        alike = self.estimate.degrees.get("tp", 1) * self.estimate.degrees.get("pp", 1)
        work = self.estimate.work
        return work.flops * alike / (1 - self.estimate.idle), sum(work.sizes.values()) * alike


def strategies_for(ranks: int, per_machine: int) -> list[str]:
    """The texts of the strategies that are compared.

    Example:
        >>> from fnaccel.estimate.fitting import strategies_for
        >>> strategies_for(4, 2)
        ['ddp', 'zero2', 'hsdp(2, 2)', 'fsdp', 'fsdp(2) * tensor(2)', 'pipeline(2) * fsdp(2)']
    """
    if ranks == 1:
        return ["local"]
    machines = ranks // per_machine
    texts = [
        "ddp",
        "zero2",
        *([f"hsdp({machines}, {per_machine})"] if machines > 1 < per_machine else ()),
        "fsdp",
    ]
    size = 2
    while size <= min(per_machine, ranks):
        if ranks % size == 0:
            texts.append(f"tensor({size})" if size == ranks else f"fsdp({ranks // size}) * tensor({size})")
        size *= 2
    size = machines if machines > 1 else 2  # links between machines are slow
    if ranks % size == 0:
        texts.append(f"pipeline({size})" if size == ranks else f"pipeline({size}) * fsdp({ranks // size})")
    return texts


def choices(
    step: StepLike,
    model: Model,
    *,
    optimizer: OptimizerLike | None,
    batch: Tree,
    budget: int,
    ranks: int = 1,
    per_machine: int | None = None,
    only: Sequence[str] = (),
) -> list[Choice]:
    """Estimate strategies with and without remat, for one number of rows on each rank.

    Args:
        step: as for `fa.train_step`, without remat. Under a pipeline a batch is cut into up to 16
            micro-batches, if the step says no number of them.
        model: a factory.
        optimizer: a description such as `fa.adamw(3e-4)`.
        batch: the rows of one rank.
        budget: bytes of a device.
        ranks: how many ranks there would be.
        per_machine: how many of them on one machine. By default all.
        only: texts of the strategies, instead of those of `strategies_for`.

    Example:
        >>> choices = fa.estimate.choices(
        ...     loss_fn, GPT, optimizer=fa.sgd(0.1), batch=batch, budget=2**30, ranks=2, only=["ddp", "fsdp"]
        ... )
        >>> fa.estimate.cheapest(choices).strategy
        'ddp'
    """
    compared: list[Choice] = []
    for text in only or strategies_for(ranks, per_machine or ranks):
        for recomputes in (False, True):
            try:
                own = _in_micro_batches(step, batch) if text.startswith("pipeline") else step
                estimate = training(
                    transforms.remat(own) if recomputes else own,
                    model=distribute(model, text),
                    optimizer=optimizer,
                    batch=batch,
                    ranks=ranks,
                    per_machine=per_machine,
                )
            except FnaccelError as error:
                obstacle = str(error).splitlines()[0]
                compared.append(Choice(strategy=text, remat=recomputes, estimate=None, obstacle=obstacle))
            else:
                fits = estimate.on_device <= budget
                compared.append(Choice(strategy=text, remat=recomputes, estimate=estimate, fits=fits))
    return compared


def _in_micro_batches(step: StepLike, batch: Tree) -> StepLike:
    """A step with a micro-batch for each row, up to 16, unless it says how many there are."""
    with contextlib.suppress(RepeatedTransformError):
        return transforms.accumulate(step, max(1, min(rows_of(batch), 16)))
    return step


def cheapest(compared: Sequence[Choice]) -> Choice | None:
    """The choice that fits and costs least. None if none fits.

    Example:
        >>> fa.estimate.cheapest([]) is None
        True
    """
    return min((choice for choice in compared if choice.fits), key=lambda choice: choice.cost, default=None)
