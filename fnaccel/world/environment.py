"""Environment variables that fnaccel sets for other libraries, and the launcher's values for this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from fnaccel.world.launched import Ranks, detect
from fnaccel.world.world import find_current


def set_default(name: str, value: str) -> None:
    """Set an environment variable, if it is not set."""
    os.environ.setdefault(name, value)


@contextlib.contextmanager
def with_default(name: str, value: str | None) -> Generator[None]:
    """Run the body with an environment variable, if it is not set and `value` is one. It is unset after."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def without_variables(*names: str) -> Generator[None]:
    """Run the body without these environment variables, and set them again after it."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def find_ranks() -> Ranks:
    """The rank and the number of ranks: of the world of this context, or before `fa.start` of the launcher.

    Raises:
        WorldError: the launcher's variables contradict themselves.
    """
    world = find_current()
    if world is None:
        return detect(os.environ)
    return Ranks(rank=world.rank, size=world.size, local_rank=world.local_rank, local_size=world.local_size)
