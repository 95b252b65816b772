"""`GatherOrder`: ranks see that they gather units in one order. Up to the first update they wait at each."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence

from fnaccel.models.building import Built
from fnaccel.strategies._torch import before_shards_talk
from fnaccel.texts import first_of
from fnaccel.world import progress_marks
from fnaccel.world.mesh import Mesh

FORWARDS = 16
"""The forwards that are compared at most: a model that is not trained has no first backward pass."""

_REMEMBERED = 4_096
"""The newest things that a rank remembers: evaluations gather without end."""

_HOST = "target."
"""What FSDP2 puts before the names of parameters of a single model."""


class GatherOrder:
    """Compares the units of one model between ranks, before each until its first backward passes have ended.

    Afterwards it remembers what this rank has gathered in a step. Ranks compare that in the totals of the
    step (`engine.same_position`): they would join parts of different weights without a word.

    Args:
        built: modules that FSDP2 has sharded.
        mesh: of the train step.

    Attributes:
        open: whether ranks still compare before each unit.
        told: what this rank has done with units in this step.
    """

    def __init__(self, built: Built, mesh: Mesh) -> None:
        self._world = mesh.world
        self._forwards = 0
        self._order = self._world.same_order(mesh.coordinate("pp"), mesh.degrees.get("pp", 1))
        self.open = self._order is not None
        self.told: deque[str] = deque(maxlen=_REMEMBERED)
        self._ends: list[Callable[[], None]] = []
        if not self.open:
            return
        names = {id(built.host): "the parameters of no unit"}
        for key, model in built.modules.items():
            for name, module in model.named_modules():
                names.setdefault(id(module), name if key is None else f"{key}/{name}")
        for module in built.host.modules():
            if hasattr(module, "_get_fsdp_state"):
                tell = functools.partial(self.tell, names[id(module)])
                self._ends.append(before_shards_talk(module, tell))

    def tell(self, unit: str, does: str, lacking: Sequence[str] = ()) -> None:
        """Wait until all ranks are about to do the same with a unit: see `SameOrder.next`.

        Args:
            unit: its name.
            does: the predicate.
            lacking: parameters of it without a gradient.
        """
        text = f"{does} {unit}"
        if lacking:
            text += f" without a gradient of {first_of(n.removeprefix(_HOST) for n in lacking)}"
        self.told.append(text)
        progress_marks.note(text)
        if self._order is not None:
            self._order.next(text)

    def end_forward(self) -> None:
        """Wait until all ranks have ended a forward."""
        self.tell("its forward", "ends")
        self._forwards += 1
        if self._forwards == FORWARDS:
            self.close()

    def close(self) -> None:
        """Compare before no unit any more, once all ranks come here."""
        self.tell("its passes", "ends")
        self._order, self.open = None, False
        while self._ends:
            self._ends.pop()()  # of gradients: ranks that reduce other units have gathered others

    def abandon(self, error: Exception) -> None:
        """Tell ranks that may wait for this one that an error has ended its pass."""
        if self._order is None:
            self._world.abandon(error)
        else:
            self._order.fail(error)
