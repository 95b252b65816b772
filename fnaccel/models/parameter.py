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
        like: lays a local tensor out over ranks as states show the parameter: over all axes of the mesh.
    """

    name: str
    param: Any
    shard: torch.Tensor
    like: Callable[[torch.Tensor], Any]

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts."""
        return hasattr(self.param, "placements")

    @property
    def shown_otherwise(self) -> bool:
        """Whether states show it over more axes than those over which it is sharded."""
        return self.sharded and self.like(self.shard).device_mesh != self.param.device_mesh

    def own(self, local: torch.Tensor) -> Any:
        """A local tensor laid out as the parameter itself is, such as its gradient."""
        if not self.sharded:
            return local
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import

        return DTensor.from_local(
            local,
            self.param.device_mesh,
            self.param.placements,
            run_check=False,
            shape=self.param.shape,
            stride=self.param.stride(),
        )
