"""Compare the step overhead of two checkouts of this repository, and list the rows that became slower.

    python benchmarks/between.py OLD NEW [--rounds 5] [--only step,leaves,data,ddp,fsdp] [--full]

OLD and NEW are folders of checkouts, or git revisions of this repository. Each round runs `step_overhead.py`
once in each checkout, in a new process, and leaves the results of the checkout as they are. The exit status
is 1 if a row is slower, 2 if the comparison failed, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
BY_HAND = ("PyTorch by hand", "plain DataLoader", "DDP by hand", "FSDP2 by hand")
"""The contestants of `step_overhead.py` to compare with: each row has at most one of them."""
Ratios = dict[str, list[float]]
"""The ratios fnaccel / by hand of each row, one a round. Rows without a contestant by hand have none."""


def order(number: int) -> tuple[str, str]:
    """The checkout that runs first in a round, and the other."""
    return ("OLD", "NEW") if number % 2 == 0 else ("NEW", "OLD")


def by_hand(rows: Sequence[Mapping[str, Any]]) -> Ratios:
    """The ratios of one round, from the rows that `step_overhead.py` wrote."""
    ratios: Ratios = {row["what"]: [] for row in rows}
    for row in rows:
        if row["against"] in BY_HAND and row["ratio"] is not None:
            ratios[row["what"]].append(row["ratio"])
    return ratios


def verdict(old: Sequence[float], new: Sequence[float]) -> str:
    """Compare the medians of two lists of ratios: "slower", "faster" or "same".

    They are the same unless they differ by more than 2 % of the old median and by more than half of the range
    of the old ratios.
    """
    before, after = statistics.median(old), statistics.median(new)
    # the last term is for rounding: 1.02 - 1.0 is more than 0.02
    limit = max(0.02 * before, (max(old) - min(old)) / 2) + 1e-9
    return "slower" if after - before > limit else "faster" if before - after > limit else "same"


def verdicts(old: Ratios, new: Ratios) -> dict[str, str]:
    """The verdict of each row that both checkouts have and that was measured against code by hand."""
    return {what: verdict(old[what], new[what]) for what in old if old[what] and new.get(what)}


def table(old: Ratios, new: Ratios) -> str:
    """The rows with their verdicts, then the rows that were not compared."""
    outcomes = verdicts(old, new)
    width = max(map(len, ("row", *outcomes)))
    lines = [f"{'row':{width}}    OLD    NEW  NEW / OLD  range of OLD  verdict"]
    for what, outcome in outcomes.items():
        before, after = statistics.median(old[what]), statistics.median(new[what])
        figures = f"{after / before:9.3f}  {max(old[what]) - min(old[what]):12.3f}"
        lines.append(f"{what:{width}}  {before:.3f}  {after:.3f}  {figures}  {outcome}")
    for what in {**old, **new}:
        if what not in outcomes:
            both = "no contestant by hand"
            reason = "only in OLD" if what not in new else "only in NEW" if what not in old else both
            lines.append(f"not compared, {reason}: {what}")
    return "\n".join([*lines, f"{len(outcomes)} rows, {list(outcomes.values()).count('slower')} slower"])


def stop(what: str, where: object, fix: str) -> NoReturn:
    """End the command with an error."""
    print(f"{what}\n  where: {where}\n  fix: {fix}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def checkout(place: str) -> Iterator[Path]:
    """The folder of a checkout. A git revision gets a temporary worktree, which is removed at the end."""
    if Path(place).is_dir():
        yield Path(place).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "checkout"
        try:
            command = [*git, "add", "--quiet", "--detach", str(folder), place]
            added = subprocess.run(command, capture_output=True, text=True)
            if added.returncode:
                what = f"{place!r} is neither a folder nor a git revision: {added.stderr.strip()}"
                stop(what, ROOT, "name the folder of a checkout, or a revision of this repository")
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], capture_output=True)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the `benchmarks` folder of a checkout, with the `fnaccel` of that checkout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, *words]
    # from this folder, `-c` has the import path of the script: its folder, PYTHONPATH, installed packages
    return subprocess.run(command, cwd=folder / "benchmarks", env=environment, capture_output=True, text=True)


def check(folder: Path) -> None:
    """Stop if a folder is not a checkout, or if its benchmarks would import `fnaccel` from somewhere else."""
    package = folder / "fnaccel"
    if not (package.is_dir() and (folder / "benchmarks" / "step_overhead.py").is_file()):
        stop("no fnaccel/ and benchmarks/step_overhead.py", folder, "name the root of a checkout")
    done = run(folder, "-c", "import fnaccel; print(fnaccel.__file__)")
    imported = done.stdout.strip()
    if done.returncode or Path(imported).resolve() != (package / "__init__.py").resolve():
        what = f"the benchmarks import {imported or 'no fnaccel'}, not {package}"
        fix = "remove other copies of fnaccel from the checkout, and look for a missing fnaccel/__init__.py"
        stop(done.stderr + what, folder, fix)


def measure(folder: Path, flags: Sequence[str]) -> Ratios:
    """The ratios of one run of `step_overhead.py`."""
    script = folder / "benchmarks" / "step_overhead.py"
    with tempfile.TemporaryDirectory() as temporary:
        into = Path(temporary) / "rows.json"
        done = run(folder, str(script), *flags, "--into", str(into))
        if done.returncode or not into.exists():
            print(done.stdout + done.stderr, file=sys.stderr)
            stop("a round failed, see above", script, f"make this run: {' '.join([script.name, *flags])}")
        return by_hand(json.loads(into.read_text())["rows"])


def main() -> None:
    """Measure both checkouts in turn, and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("old", metavar="OLD", help="the folder of a checkout, or a git revision")
    parser.add_argument("new", metavar="NEW", help="the folder of a checkout, or a git revision")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each checkout (default: 5)")
    parser.add_argument("--only", help="parts of step_overhead.py, with commas between them")
    parser.add_argument("--full", action="store_true", help="run step_overhead.py without --quick")
    words = parser.parse_args()
    if words.rounds < 1:
        parser.error("--rounds is at least 1")
    flags = [*([] if words.full else ["--quick"]), *(["--only", words.only] if words.only else [])]
    ratios: dict[str, Ratios] = {"OLD": {}, "NEW": {}}
    with contextlib.ExitStack() as stack:
        places = {"OLD": words.old, "NEW": words.new}
        folders = {name: stack.enter_context(checkout(place)) for name, place in places.items()}
        for folder in folders.values():
            check(folder)
        for number in range(words.rounds):
            for name in order(number):
                print(f"round {number + 1} of {words.rounds}: {name}", file=sys.stderr, flush=True)
                for what, measured in measure(folders[name], flags).items():
                    ratios[name].setdefault(what, []).extend(measured)
    print(table(ratios["OLD"], ratios["NEW"]))
    outcomes = verdicts(ratios["OLD"], ratios["NEW"]).values()
    if not outcomes:
        stop("no row was compared", f"{words.old} and {words.new}", "choose parts that both checkouts have")
    raise SystemExit(1 if "slower" in outcomes else 0)


if __name__ == "__main__":
    main()
