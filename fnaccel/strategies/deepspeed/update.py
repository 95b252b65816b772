"""The update that DeepSpeed carries out: average, unscale, clip, skip, step, in one call of its engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.step.loss import Scalar
from fnaccel.strategies.deepspeed.parts import Native, Parts


class BoundDeepspeed:
    """An optimizer inside of a DeepSpeed engine, as the library sees optimizers.

    The factor that gradients still lack (the weights of all ranks, the loss scale) is handed over as
    the loss scale that DeepSpeed divides by: so its clipping and its search for overflow see the true
    gradient, also if a weight is known only after the backward pass.

    Args:
        engine: the DeepSpeed engine.
        parts: its parameters.
        slots: its optimizer's slots, as states show them.
        clip: the norm it clips to, 0 for none.
    """

    reads_host = True

    def __init__(
        self,
        engine: Native,
        parts: Parts,
        slots: Mapping[str, Mapping[str, Any]],
        clip: float,
        *,
        skips: bool,
    ) -> None:
        self.slots: dict[str, dict[str, Any]] = {name: dict(tensors) for name, tensors in slots.items()}
        self.metrics: dict[str, Any] = {}
        self._engine = engine
        self._parts = parts
        self._clip = clip
        self._skips = skips
        self._first = [group["lr"] for group in parts.inner.param_groups]

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],  # noqa: ARG002 - DeepSpeed holds them
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,  # noqa: ARG002 - DeepSpeed finds that out
        updates: torch.Tensor,
    ) -> float:
        """One update. Returns 1.0 if DeepSpeed left it out because the gradient was not finite."""
        before = round(float(updates)) - 1
        self._parts.count(before)
        self._set_rates(rates, before)
        factor = 1.0 if multiplier is None else float(multiplier)
        optimizer: Any = self._engine.optimizer
        if hasattr(optimizer, "loss_scale"):
            optimizer.loss_scale = 1.0 / factor if factor else math.inf
            try:
                self._engine.step()
            finally:
                optimizer.loss_scale = 1.0
            applied = self._engine.was_step_applied()
            norm: Any = self._engine.get_global_grad_norm()
            if self._parts.stage == 0:  # there it is the norm before the division
                norm = norm * factor
        else:
            norm = self._norm(factor)
            applied = not self._skips or math.isfinite(float(norm))
            if applied:
                self._engine.step()
            else:
                self._engine.zero_grad()
        if self._clip:
            self.metrics["grad_norm"] = torch.as_tensor(norm, dtype=torch.float32)
        return 0.0 if applied else 1.0

    def _norm(self, factor: float) -> torch.Tensor:
        """Multiply the gradients of stage 0, which only fp32 has whole. Returns the norm before clipping."""
        present = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        if factor != 1.0 and present:
            _torch.foreach_mul_(present, factor)
        if not self._clip and not self._skips:
            return torch.zeros(())
        return torch.nn.utils.get_total_norm(present)

    def _set_rates(self, rates: Sequence[Any], updates: int) -> None:
        """The rates of this update: ours, or those of DeepSpeed's schedule at the number of updates."""
        schedule: Any = self._engine.lr_scheduler
        groups = self._parts.inner.param_groups
        if schedule is not None and updates > 0:
            schedule.step(updates - 1)
        for group, rate in zip(groups, rates if schedule is None else self._first, strict=True):
            if schedule is None or updates == 0:
                group["lr"] = float(rate)
        if schedule is not None:
            self.metrics["lr"] = groups[0]["lr"]
