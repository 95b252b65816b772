"""What every benchmark is told on its command line, and how its process is set up."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import attrs
import torch


@attrs.frozen
class Options:
    """Which parts are to run, all by default; and whether a quick look is enough."""

    parts: tuple[str, ...]
    quick: bool
    whole: bool


def begin(doc: str, parts: Sequence[str] = ()) -> Options:
    """Read the command line; one thread, and no warnings of peers between the rows."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes to quick.json")
    if parts:
        parser.add_argument("--only", default=",".join(parts), help=f"of {','.join(parts)}")
    found = parser.parse_args()
    chosen = tuple(found.only.split(",")) if parts else ()
    for part in chosen:
        if part not in parts:
            parser.error(f"no part is called {part!r}: choose of {','.join(parts)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return Options(chosen, found.quick, chosen == tuple(parts))
