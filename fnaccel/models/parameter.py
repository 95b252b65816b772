"""A trainable parameter as engines hand it to optimizers and transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch


@attrs.frozen
class Leaf:
    """A trainable parameter.

    Attributes:
        name: its canonical name.
        param: the parameter itself (a DTensor if it is sharded).
        shard: this rank's part of it, the tensor that updates are written to.
        like: lays a local tensor out over ranks as the parameter is.
    """

    name: str
    param: Any
    shard: torch.Tensor
    like: Callable[[torch.Tensor], Any]

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts."""
        return hasattr(self.param, "placements")
