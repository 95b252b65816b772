"""What every benchmark is told on its command line, and how its process is set up."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import torch
from environment import ROOT, environment, is_installed

RESULTS = ROOT / "benchmarks" / "results"
_T = TypeVar("_T")


@attrs.frozen
class Options:
    """The parts to run, how thoroughly, and where the rows go.

    Attributes:
        name: the script, which is also the name of its results.
        level: `"full"` for results, `"quick"` for a look, `"smoke"` for a test that everything runs.
        into: the file for the rows, if there is one.
        absent: peers that are not installed.
        whole: whether all parts run.
    """

    name: str
    parts: tuple[str, ...]
    level: Literal["full", "quick", "smoke"]
    into: Path | None
    absent: tuple[str, ...]
    whole: bool

    def pick(self, full: _T, quick: _T, smoke: _T) -> _T:
        """The value for this level."""
        return {"full": full, "quick": quick, "smoke": smoke}[self.level]


def begin(name: str, doc: str, parts: Sequence[str] = (), peers: Sequence[str] = ()) -> Options:
    """Read the command line. One thread, and no warnings of peers between the rows."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="fewer rounds; rows go to results/quick.json")
    level.add_argument("--smoke", action="store_true", help="one round of small sizes; rows go nowhere")
    parser.add_argument("--into", type=Path, help="write the rows to this file")
    if parts:
        parser.add_argument("--only", default=",".join(parts), help=f"of {','.join(parts)}")
    words = parser.parse_args()
    chosen = tuple(words.only.split(",")) if parts else ()
    for part in chosen:
        if part not in parts:
            parser.error(f"no part is called {part!r}: choose of {','.join(parts)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    into = words.into
    if into is None and not words.smoke:
        into = RESULTS / ("quick.json" if words.quick else f"{name}.json")
    whole = chosen == tuple(parts)
    if not (whole or words.quick or words.smoke) and into.exists():
        before = json.loads(into.read_text())["environment"]
        if not same_code(before, environment()):
            parser.error(f"{into.name} is of another commit or other versions: run all parts, or name a file")
    absent = tuple(peer for peer in peers if not is_installed(peer))
    if absent:
        print(f"not installed, left out: {', '.join(absent)}\n")
    kind = "smoke" if words.smoke else "quick" if words.quick else "full"
    return Options(name, chosen, kind, into, absent, whole)


def same_code(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether rows of two environments may be in one file: all but the date is equal.

    Rows from before can name versions of another environment besides.
    """
    apart = dict.fromkeys(("date", "versions"))
    versions = now["versions"].items() <= before["versions"].items()
    return versions and {**before, **apart} == {**now, **apart}
