"""Tables in HTML: a notebook shows a plan, a train step, a state and a checkpoint with them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(title: str, rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> str:
    """A titled table. All text is escaped.

    Args:
        title: the text above it.
        rows: the cells of each row.
        notes: the lines below it.

    Example:
        >>> table("sizes", [("a", 1)])
        '<div><b>sizes</b><table><tr><td>a</td><td>1</td></tr></table></div>'
    """
    cells = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    below = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table>{below}</div>"


def folded(summary: str, inner: str) -> str:
    """HTML that a click on its summary shows."""
    return f"<details><summary>{html.escape(summary)}</summary>{inner}</details>"
