"""A lower bound of a step's time, from stated rates of compute and of the links between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from fnaccel.errors import require
from fnaccel.estimate.training_memory import TrainingEstimate
from fnaccel.world.mesh import AXES, DERIVED

_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@attrs.frozen(kw_only=True)
class Rates:
    """The rates of a machine.

    Attributes:
        flops: floating-point operations of a rank in a second.
        link: bytes in a second that a rank sends to ranks of its machine.
        network: bytes in a second that a rank sends to ranks of other machines.
        per_machine: ranks on a machine.

    Raises:
        ArgumentError: a rate that is not positive.

    Example:
        >>> rates = fa.estimate.Rates(flops=400e12, link=450e9, network=50e9, per_machine=8)
    """

    flops: float
    link: float
    network: float
    per_machine: int = 8

    def __attrs_post_init__(self) -> None:
        for name in ("flops", "link", "network", "per_machine"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value!r} is no rate", "fa.estimate.Rates", "a positive number")


@attrs.frozen(kw_only=True)
class LeastTime:
    """Seconds below which a step can't be.

    Attributes:
        compute: the floating-point operations at the rate of a rank, and the time in which stages wait.
        links: the bytes of each link's collectives at its rate.

    Example:
        >>> estimate = fa.estimate.training(
        ...     loss_fn, model=fa.distribute(GPT, "ddp"), optimizer=fa.sgd(0.1), batch=batch, ranks=16
        ... )
        >>> least = fa.estimate.least_time(estimate, fa.estimate.Rates(flops=1e12, link=1e9, network=1e8))
        >>> least.total == max(least.compute, *least.links.values())
        True
    """

    compute: float
    links: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the slowest of them: all others may overlap with it."""
        return max(self.compute, *self.links.values(), 0.0)

    def __str__(self) -> str:
        parts = [
            f"compute {self.compute:.3g} s",
            *(f"{name} {time:.3g} s" for name, time in self.links.items()),
        ]
        return f"at least {self.total:.3g} s: {', '.join(parts)}"


def least_time(estimate: TrainingEstimate, rates: Rates) -> LeastTime:
    """A lower bound of the time of a step.

    A ring passes (n - 1) / n of the bytes of a gather or a reduce-scatter over each link, and twice as much
    for an all-reduce (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). No schedule
    passes less. Collectives within a machine overlap with those between machines.

    Args:
        estimate: of the step.
        rates: of the machine.

    Example:
        >>> estimate = fa.estimate.training(
        ...     loss_fn, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1), batch=batch
        ... )
        >>> rates = fa.estimate.Rates(flops=1e12, link=1e9, network=1e8)
        >>> fa.estimate.least_time(estimate, rates).links
        {}
    """
    work, degrees = estimate.work, estimate.degrees
    links = {"link": 0.0, "network": 0.0}
    for (axis, kind), size in work.sizes.items():
        ranks, crosses = _span(axis, degrees, rates.per_machine)
        if ranks > 1:
            name = "network" if crosses else "link"
            rate = rates.network if crosses else rates.link
            share = 1.0 if kind == "send" else _PASSES.get(kind, 1.0) * (ranks - 1) / ranks
            links[name] += share * size / rate
    return LeastTime(
        compute=work.flops / rates.flops / (1 - estimate.idle),
        links={name: time for name, time in links.items() if time},
    )


def _span(axis: str, degrees: Mapping[str, int], per_machine: int) -> tuple[int, bool]:
    """How many ranks a collective joins, and whether they are on several machines."""
    members = DERIVED.get(axis, (axis,))
    names = sorted(degrees, key=lambda name: AXES.index(name) if name in AXES else 0)
    ranks = math.prod(degrees[name] for name in names if name in members)
    outermost = next((index for index, name in enumerate(names) if name in members), len(names))
    return ranks, math.prod(degrees[name] for name in names[outermost:]) > per_machine
