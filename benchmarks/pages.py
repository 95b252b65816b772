"""Writes every table and picture with figures into the pages, from `benchmarks/results`. It measures nothing.

    python benchmarks/pages.py
    python benchmarks/pages.py benchmarks/results/quick  # prints the table of all scripts, of other results

A table stands between two markers of a page, and the first names one of `tables.BLOCKS`:

    <!-- benchmarks: seeing -->
    <!-- end -->
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from charts import CHARTS
from tables import BLOCKS, Measured, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md")
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def names(text: str) -> list[str]:
    """The tables that a page shows."""
    return [block[2] for block in BLOCK.finditer(text)]


def filled(text: str, measured: Measured) -> str:
    """A page with its tables made again.

    Raises:
        SystemExit: no table has the name of a marker, or a marker is not closed.
    """
    unknown = sorted(set(names(text)) - BLOCKS.keys())
    if unknown or text.count("<!-- benchmarks:") != len(names(text)):
        raise SystemExit(f"markers without a table or an end: {unknown or text.count('<!-- benchmarks:')}")
    return BLOCK.sub(lambda block: f"{block[1]}{BLOCKS[block[2]](measured)}\n{block[3]}", text)


def main() -> None:
    """Write all tables, then all pictures."""
    if sys.argv[1:]:
        print(BLOCKS["choice"](read(Path(sys.argv[1]))))
        return
    measured = read(RESULTS)
    for page in PAGES:
        before = page.read_text()
        after = filled(before, measured)
        if after != before:
            page.write_text(after)
        changed = "" if after == before else " (changed)"
        if names(after):
            print(f"{page.relative_to(ROOT)}: {', '.join(names(after))}{changed}")
    import plots  # only here: matplotlib is not needed to compare

    for name, chart in CHARTS.items():
        path = IMAGES / f"{name}.png"
        plots.draw(chart(measured), path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
