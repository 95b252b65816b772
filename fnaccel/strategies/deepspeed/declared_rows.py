"""`DeclaredRows`: whether each micro-batch of each rank has the rows that DeepSpeed's configuration says."""

from __future__ import annotations

import torch

from fnaccel.collectives import gather_objects
from fnaccel.errors import MicroBatchError
from fnaccel.extend import MicroBatches, rows_of
from fnaccel.world.world import World


class DeclaredRows:
    """A question to all ranks in the all-reduce of a step's totals (`engine.totals.Question`).

    Args:
        declared: rows of a micro-batch, of the configuration.
        micro_batches: those of this rank.
        world: all ranks.
    """

    def __init__(self, declared: int, micro_batches: MicroBatches, world: World) -> None:
        self._declared = declared
        self._world = world
        self._odd = sorted({rows_of(part.data) for part in micro_batches if part.valid} - {declared})
        self.numbers = (float(bool(self._odd)),)
        self._sum: torch.Tensor | None = None

    def hear(self, sums: torch.Tensor | None, device: torch.device) -> None:  # noqa: ARG002 - for others
        """Take how many ranks have other rows."""
        self._sum = sums

    def check(self) -> None:
        """Raise MicroBatchError if any rank has other rows. Reads the device."""
        if not bool(self._odd if self._sum is None else self._sum):
            return
        each = gather_objects(self._odd, world=self._world)
        listed = ", ".join(f"{rows} on rank {rank}" for rank, rows in enumerate(each) if rows)
        raise MicroBatchError(
            f"the configuration of deepspeed says {self._declared} rows in a rank's micro-batch, and it "
            f"has {listed}",
            where="train_step(state, batch)",
            fix='write "auto" for train_batch_size and train_micro_batch_size_per_gpu, or correct the loader',
        )
