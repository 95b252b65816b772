"""DeepSpeed replaces `torch.nn.functional.linear` for stage 3, and leaves it so. Here it is put back.

It keeps no gathered weight for backward, and gives up a fused kernel for that. Sums of other models in the
process would round in another order.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

_open: set[int] = set()
"""The engines of stage 3 that are open, by `id`."""


def enter(engine: object) -> None:
    """Note an engine of stage 3."""
    _open.add(id(engine))


def leave(engine: object) -> None:
    """Put torch's function back when the last engine of stage 3 closes."""
    _open.discard(id(engine))
    if not _open:
        patches: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
        before = getattr(patches.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
        if torch.nn.functional.linear is patches.zero3_linear_wrap and before is not None:
            torch.nn.functional.linear = before
