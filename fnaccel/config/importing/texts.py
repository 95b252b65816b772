"""The text of a strategy from its axes and their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def call(name: str, *arguments: Any, **options: Any) -> str:
    """The text of one axis. Options that are None are left out.

    Example:
        >>> call("fsdp", 2, offload=True, units=None)
        'fsdp(2, offload=True)'
        >>> call("ddp")
        'ddp'
    """
    words = [repr(argument) for argument in arguments]
    words += [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(words)})" if words else name


def sharded(options: Mapping[str, Any], *, copies: int | None = None, degree: int | None = None) -> str:
    """The text of `fsdp` or `hsdp`.

    Args:
        options: of `fa.fsdp`, and `units`, where None has a meaning of its own.
        copies: groups that hold the whole model. None: one.
        degree: over how many ranks a group shards it. None: the ranks that are left.

    Example:
        >>> sharded({"reshard_after_forward": False}, copies=2)
        'hsdp(2, -1, reshard_after_forward=False)'
    """
    words = [f"{key}={value!r}" for key, value in options.items()]
    if copies is not None:
        words = [str(copies), str(-1 if degree is None else degree), *words]
    elif degree is not None:
        words = [str(degree), *words]
    name = "fsdp" if copies is None else "hsdp"
    return f"{name}({', '.join(words)})" if words else name
