"""Text from a file that need not be trusted, as a terminal may show it."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""`text` with control characters written out, such as `\x1b[31m`.

    Args:
        text: anything.
        keep: characters that stay, such as `"\n"`.

    Example:
        >>> printable("a\x1b[2J")
        'a\\x1b[2J'
    """
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii")
        for one in text
    )
