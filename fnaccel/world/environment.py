"""Environment variables that fnaccel sets for other libraries, and the launcher's values for this process."""

from __future__ import annotations

import os

from fnaccel.world.launched import Ranks, detect
from fnaccel.world.world import find_current


def set_default(name: str, value: str) -> None:
    """Set an environment variable, if it is not set."""
    os.environ.setdefault(name, value)


def find_ranks() -> Ranks:
    """The rank and the number of ranks: of the world of this context, or before `fa.start` of the launcher.

    Raises:
        WorldError: the launcher's variables contradict themselves.
    """
    world = find_current()
    if world is None:
        return detect(os.environ)
    return Ranks(rank=world.rank, size=world.size, local_rank=world.local_rank, local_size=world.local_size)
