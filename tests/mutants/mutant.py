"""A deliberate bug."""

from __future__ import annotations

import attrs


@attrs.frozen
class Mutant:
    """One bug: replace `old` by `new` in `file`; `tests` (pytest arguments) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
