"""`on_spike`: a loss far above the usual one, or not finite, is reported, skipped, or ends the run."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import attrs
import torch

from fnaccel.errors import LossError, require
from fnaccel.step.chain import Chain, chain, takes_step
from fnaccel.step.choices import Action
from fnaccel.step.settings import Settings
from fnaccel.step.step import Capability, Info, Phase, Transform
from fnaccel.tree import Tree
from fnaccel.world.host_copy import HostCopy
from fnaccel.world.world import find_current

if TYPE_CHECKING:
    from fnaccel.engine.gradients import Gradients

_logger = logging.getLogger("fnaccel")
_LAG = 8  # on an accelerator, steps until a flag is read: the same on every rank, so that all raise together


@attrs.frozen(kw_only=True)
class OnSpike:
    """Compare each loss with the mean and the deviation of those before, on the device."""

    do: Action
    deviations: float
    window: int
    warmup: int

    def configure(self, settings: Settings) -> Settings:
        """Say that updates may be left out: those whose gradient is not finite as well."""
        return attrs.evolve(settings, leaves_out_nonfinite=True) if self.do == "skip" else settings

    def on_gradients(self, grads: Gradients, state: Tree, info: Info) -> Any:
        """Decide by the loss of all ranks whether this step is a spike, and move the mean."""
        loss = torch.as_tensor(info.metrics["loss"]).detach().to(state["mean"])
        mean, square, count = state["mean"], state["square"], state["count"]
        deviation = (square - mean * mean).clamp_min(0.0).sqrt()
        known = count >= max(self.warmup, 1)  # without a loss before there is no usual one
        # a loss that never moves has no deviation, so a part of the mean counts as well
        usual = torch.maximum(deviation, 0.01 * mean.abs())
        limit = mean + self.deviations * usual
        finite = torch.isfinite(loss)
        weight = torch.as_tensor(info.metrics["weight"])  # from the host without a wait
        counts = weight.to(mean.device, non_blocking=weight.device.type == "cpu") > 0
        spike = counts & (~finite | (known & (loss > limit)))
        if self.do == "skip":
            grads.skip_where(spike)
        info.record("spike", spike.float())
        info.record("usual_loss", mean.clone())
        # a spike counts as the limit, so that a loss that stays high becomes the usual one
        seen = torch.where(finite, torch.where(spike, limit, loss), mean)
        share = (1.0 / (count + 1.0)).clamp_min(1.0 / self.window) * (finite & counts)
        return {
            "mean": mean + share * (seen - mean),
            "square": square + share * (seen * seen - square),
            "count": count + (finite & counts),
        }


class _Reader:
    """Reads the flags of steps on the host, late on accelerators, and acts on them.

    A call in which a spike is found to have happened before raises before it changes anything.
    """

    def __init__(self, call: Callable[..., Any], do: Action) -> None:
        self._call = call
        self._do = do
        self._waiting: deque[tuple[int, HostCopy]] = deque()
        self._found: list[str] = []

    def settle(self) -> None:
        """Read the flags of the last steps, and raise LossError if one was a spike and is to stop the run."""
        while self._waiting:
            self._read(*self._waiting.popleft())
        self._stop()

    def _stop(self) -> None:
        if self._found:
            texts, self._found = self._found, []
            raise LossError(
                texts[0],
                where="train_step(state, batch)",
                fix="look at the batch of that step, go back to a checkpoint, or lower the rate (the state "
                'stays live); fa.transforms.on_spike(step, do="skip") leaves such updates out',
            )

    def __call__(self, state: Tree, batch: Tree, **given: Tree) -> Any:
        self._stop()
        following, metrics = self._call(state, batch, **given)
        if "spike" not in metrics:  # a step of weight 0
            return following, metrics
        facts = [torch.as_tensor(metrics[name]).float() for name in ("spike", "loss", "usual_loss")]
        self._waiting.append((following.step, HostCopy(torch.stack(facts))))
        while len(self._waiting) > (0 if facts[0].device.type == "cpu" else _LAG):
            self._read(*self._waiting.popleft())
        return following, metrics

    def _read(self, step: int, facts: HostCopy) -> None:
        spike, loss, usual = facts.read().tolist()
        if not spike:
            return
        far = f", far above the usual {usual:.4g}" if math.isfinite(loss) else ""
        left_out = ": its update is left out" if self._do == "skip" else ""
        text = f"the loss of step {step} is {loss:.4g}{far}{left_out}"
        if self._do == "stop":
            self._found.append(text)
        world = find_current()
        if world is None or world.is_main:
            _logger.warning("%s", text)


@takes_step
def on_spike(*, do: Action = "warn", deviations: float = 6.0, window: int = 100, warmup: int = 20) -> Chain:
    """Warn, skip the update, or stop if a loss is far above those before it, or is not finite.

    A spike is a loss that is more than `deviations` standard deviations above the mean of the last steps. It
    is decided on the device, from the loss of all ranks, and takes part in the mean only up to that limit.
    The mean is part of the state, so a run that is started again goes on with it. `metrics["spike"]` is 1.0
    for such a step, and the log names the step: at once on the CPU, some steps later on an accelerator. Under
    `fa.compile` the update then runs beside the captured step, as with transforms of your own.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        do: `"warn"` logs it, `"skip"` leaves the update out too (and, as `fa.skip_nonfinite`, those whose
            gradient is not finite), `"stop"` raises LossError in the next call, before it changes anything,
            or at the end of `fa.scan`.
        deviations: how far above the mean, in standard deviations (of 1 % of the mean at least).
        window: about how many steps the mean is of.
        warmup: steps before the first comparison, 1 at least. A loss that is not finite is a spike from the
            first step.

    Raises:
        ArgumentError: another word for `do`, or a number out of range.

    Example:
        >>> step = fa.transforms.on_spike(loss_fn, do="skip")
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), batch)
        >>> float(metrics["spike"])
        0.0
    """
    require(do in get_args(Action), f"do={do!r}", "fa.transforms.on_spike", '"warn", "skip" or "stop"')
    require(deviations > 0, f"deviations={deviations}", "fa.transforms.on_spike", "a number above 0")
    counts = window >= 2 and warmup >= 0
    require(counts, f"{window=}, {warmup=}", "fa.transforms.on_spike", "window from 2, warmup from 0")
    record = OnSpike(do=do, deviations=deviations, window=window, warmup=warmup)
    needs = frozenset({Capability.GRADIENTS})
    return chain(
        Transform("on_spike", Phase.GRADS, apply=record, init=_nothing_known, needs=needs),
        Transform("on_spike_read", Phase.CALL, apply=_Reading(do)),
    )


@attrs.frozen
class _Reading:
    """Reads the flags of steps on the host."""

    do: Action

    def __call__(self, call: Callable[..., Any]) -> _Reader:
        return _Reader(call, self.do)


def _nothing_known(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = next(iter(params.values()))
    local: torch.Tensor = getattr(first, "_local_tensor", first)
    return {name: torch.zeros((), device=local.device) for name in ("mean", "square", "count")}
