"""How a strategy lets a whole step be captured as one graph: no hooks, plain operations instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fnaccel.leaf import Leaf


@attrs.frozen(kw_only=True)
class Capture:
    """What a captured step needs of its layout.

    Attributes:
        leaves: the trainable parameters; `shard` is the very tensor that gradients are taken of.
        run: `run(fn, *args)` calls `fn(model, *args)` in the graph.
        average: in the graph, gradients averaged over ranks; None where they are by then.
        graph_pass: a change of the graph before inductor lowers it; other backends run without.
        before: called before the first micro-batch of a step, outside of the graph.
    """

    leaves: tuple[Leaf, ...]
    run: Callable[..., Any]
    average: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    before: Callable[[], None] | None = None
    graph_pass: Any = None
