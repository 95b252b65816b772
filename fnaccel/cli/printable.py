"""Makes text from an untrusted file safe for a terminal."""

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
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
