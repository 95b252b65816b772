"""A note about a model for the plan of its train step."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from torch import nn


@attrs.frozen
class Note:
    """One sentence. `warns` if what it says often is a mistake."""

    text: str
    warns: bool = False


def count_of(modules: Iterable[nn.Module]) -> str:
    """How many modules there are of each class: "2 Dropout and 1 BatchNorm1d"."""
    counts: dict[str, int] = {}
    for module in modules:
        counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    return " and ".join(f"{count} {name}" for name, count in counts.items())
