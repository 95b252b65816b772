"""`Averaged`: for a while the parameters hold their averages."""

from __future__ import annotations

from fnaccel.engine.engine import Engine
from fnaccel.engine.exchange import Exchange
from fnaccel.state import Lease, refuse_averaged


class Averaged(Exchange):
    """A context in whose body parameters hold the averages of `with_ema`, and the lease says so.

    If the parameters can't be put back (memory ran out), the state is dead.

    Args:
        engine: the tensors.
        lease: of the live state.
    """

    def __init__(self, engine: Engine, lease: Lease) -> None:
        pairs = zip(engine.layout.leaves, engine.averages, strict=True)
        super().__init__([(leaf.shard, average) for leaf, average in pairs])
        self._lease = lease

    def change(self) -> None:
        """Exchange parameters and averages."""
        refuse_averaged(self._lease, "train_step.averaged(state)")
        self._lease.averaged = True
        super().change()

    def undo(self) -> None:
        """Exchange them again."""
        lease = self._lease
        try:
            super().undo()
        except BaseException:
            lease.owner.donate_live()
            raise
        finally:
            lease.averaged = False
