"""How a strategy lets a whole step be captured as one graph: no hooks, plain operations instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fnaccel.models.parameter import Leaf

Opened = tuple[list[torch.Tensor], Callable[..., Any]]
"""The tensors that gradients are taken of, and `run(fn, *args)`, which calls `fn(model, *args)` with them."""


@attrs.frozen(kw_only=True)
class Capture:
    """The layout's part in a captured step.

    Attributes:
        leaves: the trainable parameters. `shard` is the very tensor that the update changes.
        open: in the graph, before forward. Gathers parameters if ranks hold shards of them.
        blank: zeros laid out as the gradients that `open`'s tensors get, outside of the graph.
        average: in the graph, from these gradients to those of the leaves, averaged over ranks.
        complete: whether a parameter that no rank has a gradient for is an error.
        graph_pass: a change of the graph before inductor lowers it. Other backends run without it.
    """

    leaves: tuple[Leaf, ...]
    open: Callable[[], Opened]
    blank: Callable[[], list[torch.Tensor]]
    average: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    complete: bool = False
    graph_pass: Any = None
