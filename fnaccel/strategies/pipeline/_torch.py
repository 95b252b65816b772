"""The private names of torch and of transformers that pipelines read."""

# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""Operations that give a number or a truth value, and no tensor. (2.13)"""


def listeners_of(block: nn.Module, *, itself: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of those in a block that have a forward hook which is at work.

    Args:
        block: the block.
        itself: look at the block itself, and not at modules inside of it.
    """
    for path, module in [("", block)] if itself else block.named_modules():
        if (path or itself) and any(_listens(hook) for hook in module._forward_hooks.values()):
            yield path, module


def _listens(hook: Any) -> bool:
    """Whether a hook is the user's, and at work: not torch's or ours, and not idle in transformers."""
    inner = getattr(hook, "func", hook)
    source = str(getattr(inner, "__module__", ""))
    if source.split(".")[0] in ("torch", "fnaccel"):
        return False
    if source != "transformers.utils.output_capturing":
        return True
    # its hooks stay in a model after the first forward that asked for outputs
    capturing: Any = sys.modules[source]
    return capturing._active_collector.get() is not None  # (5.23)
