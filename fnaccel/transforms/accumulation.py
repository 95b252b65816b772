"""`accumulate`: one update from several micro-batches. It changes memory, never meaning."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from fnaccel.errors import UnknownNameError, nearest, require
from fnaccel.step.chain import takes_step
from fnaccel.step.settings import Settings
from fnaccel.step.step import Phase, Transform

Sync = Literal["last", "each"]


@attrs.frozen
class Accumulate:
    """Cut a batch in `n` micro-batches. Average over ranks after the `"last"`, or after `"each"`."""

    n: int
    sync: Sync = "last"

    def configure(self, settings: Settings) -> Settings:
        """Cut batches, and say when to communicate."""
        return attrs.evolve(settings, micro_batches=self.n, sync_each=self.sync == "each")

    def describe(self) -> str:
        """The text in the plan: a window of m batches has n * m micro-batches."""
        return f"n={self.n} of each batch ({self.n} * m with window=m), sync={self.sync!r}"


@takes_step
def accumulate(n: int, *, sync: Sync = "last") -> Transform:
    """Run a batch as `n` micro-batches (dim 0, sizes by divmod) and make one update of them.

    Under `fa.shard(loader, window=m)` each of the m batches is cut, so an update has n * m micro-batches.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        n: how many micro-batches. A batch needs at least that many rows on each rank.
        sync: `"last"` communicates gradients once a step, `"each"` after each micro-batch, which
            under fsdp never holds an unsharded gradient longer than one micro-batch.

    Raises:
        ArgumentError: `n` is below 1.
        UnknownNameError: no such `sync`.

    Example:
        >>> step = fa.accumulate(loss_fn, 4)
    """
    require(
        isinstance(n, int) and n >= 1,
        f"a step can't be accumulated over {n!r} micro-batches",
        "fa.accumulate",
        "n is an int, 1 or more",
    )
    if sync not in get_args(Sync):
        raise UnknownNameError(
            f"no sync is called {sync!r}", where="fa.accumulate", fix=nearest(str(sync), get_args(Sync))
        )
    return Transform("accumulate", Phase.BACKWARD, apply=Accumulate(n, sync))
