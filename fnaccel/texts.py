"""Numbers and lists in messages: sizes in bytes, ranks, plurals. And sizes as users write them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

from fnaccel.errors import ArgumentError

_SCALES = {"": 1, **{letter: 1000**power for power, letter in enumerate("kmgtp", 1)}}
_BINARY = {"": 1, **{letter: 1024**power for power, letter in enumerate("kmgtp", 1)}}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgtp]?)(i?)(b|flops?)?(/s)?\s*", re.IGNORECASE)
_NAMED = 5


def size_of(count: int) -> str:
    """A number of bytes as people read it.

    Example:
        >>> size_of(3_500_000)
        '3.5 MB'
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # three digits: 999.6 kB is shown as 1 MB
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def bytes_in(size: int | str, where: str, *, least: int = 0) -> int:
    """A number of bytes: `"10GiB"` is 10 times 1024 cubed, `"10GB"` is 10 times 1000 cubed.

    Args:
        size: the number, or a text of a number with a unit.
        where: the argument, for messages.
        least: the smallest number that is allowed.

    Raises:
        ArgumentError: it is none, or less than `least`.

    Example:
        >>> bytes_in("1.5 KiB", "budget=")
        1536
    """
    count = math.nan
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (matched := _AMOUNT.fullmatch(size)):
        number, letter, binary, unit, rate = (part or "" for part in matched.groups())
        if (unit.lower() == "b" and not rate) or not (letter or binary or unit or rate):
            count = float(number) * (_BINARY if binary else _SCALES)[letter.lower()]
    if not (math.isfinite(count) and count >= least):
        raise ArgumentError(
            f"{str(size)[:40]!r} is no number of bytes",
            where=where,
            fix='an int, or a number with a unit: "10GiB", "500MB"',
        )
    return int(count)


def rate_in(text: str, where: str) -> float:
    """A number a second: `"400T"`, `"450GB/s"`, `"1e12"`. The unit is not read.

    Raises:
        ArgumentError: it is none.
    """
    matched = _AMOUNT.fullmatch(text)
    if matched is None or matched[3]:
        raise ArgumentError(f"{text!r} is no rate", where=where, fix="a number with a scale: 400T, 450GB")
    return float(matched[1]) * _SCALES[matched[2].lower()]


def counted(count: int, one: str, several: str = "") -> str:
    """A number of things.

    Example:
        >>> counted(1, "machine"), counted(3, "path differs", "paths differ")
        ('1 machine', '3 paths differ')
    """
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def ranks_of(numbers: Iterable[int]) -> str:
    """Ranks by number.

    Example:
        >>> ranks_of([3]), ranks_of([2, 0])
        ('rank 3', 'ranks 0, 2')
    """
    ranks = sorted(numbers)
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def error_line(error: BaseException | None) -> str:
    """The class of an error and the first line of its message.

    Example:
        >>> error_line(ValueError("a bad row"))
        'ValueError: a bad row'
    """
    lines = str(error).splitlines()
    return type(error).__name__ + (f": {lines[0]}" if lines else "")


def first_of(names: Iterable[str]) -> str:
    """The first names of a list, and how many more there are.

    Example:
        >>> first_of("abcdefg")
        'a, b, c, d, e and 2 more'
    """
    every = list(names)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + more


def unmatched(wanted: Collection[str], given: Collection[str]) -> list[str]:
    """A line for each name that is in one of two collections only.

    Example:
        >>> unmatched(["a", "b"], ["b", "c"])
        ['a is missing', 'c is unknown']
    """
    missing = [f"{name} is missing" for name in wanted if name not in given]
    return missing + [f"{name} is unknown" for name in given if name not in wanted]
