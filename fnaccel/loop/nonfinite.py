"""`NonfiniteLoss`: one line in the log at the first loss that is NaN or infinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

_logger = logging.getLogger("fnaccel")


class NonfiniteLoss:
    """Looks at the losses of a loop, and speaks once.

    Args:
        speaks: whether this rank logs.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._silent = not speaks

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a step. A loss on an accelerator is left alone: reading it would wait."""
        loss = metrics.get("loss")
        if self._silent or (isinstance(loss, torch.Tensor) and loss.device.type != "cpu"):
            return
        if loss is None or math.isfinite(loss) or "spike" in metrics or metrics.get("skipped"):
            return
        self._silent = True
        _logger.warning(
            "the loss of step %d is %.4g, and training goes on: fa.skip_nonfinite(step) leaves out an update "
            'whose gradient is not finite, fa.transforms.on_spike(step, do="stop") ends the run',
            step,
            float(loss),
        )
