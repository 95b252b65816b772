"""Run the long tier in the order of `order.py`, two processes at a time.

python -m tests.long_tier --until EPOCH     # .ci/run: chunks start if they should end by then. Writes nothing
python -m tests.long_tier --all             # make test-all: `make test`, then all long rows. Writes seconds.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.long_tier import record
from tests.long_tier.order import GROUPS, Chunk, in_order
from tests.long_tier.run import COMMITS, Run, changed_files, collected, git

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("seconds.json")
LONG = 20.0
"""Seconds from which a row belongs into this tier."""


def short_tier() -> tuple[int, list[record.Result]]:
    """`make test`: its exit code and results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        environ = {**os.environ, record.VARIABLE: str(path), "PYTEST_ADDOPTS": "-p tests.long_tier.record"}
        code = subprocess.run(["make", "test"], cwd=ROOT, env=environ, check=False).returncode
        return code, record.read(path)


def means(results: Iterable[record.Result]) -> dict[str, float]:
    """Mean seconds of a row, by test, in tenths. Rows that did not pass have no time."""
    seconds: dict[str, list[float]] = {}
    for result in results:
        if result.outcome == "passed":
            seconds.setdefault(result.id.partition("[")[0], []).append(result.seconds)
    return {test: round(sum(rows) / len(rows), 1) for test, rows in sorted(seconds.items())}


def say_by_folder(results: list[record.Result]) -> None:
    """Print the rows and seconds of each folder, the dearest first."""
    rows, seconds = Counter(), Counter()
    for result in results:
        folder = result.id.partition("::")[0].rpartition("/")[0]
        rows[folder] += 1
        seconds[folder] += result.seconds
    for folder, spent in seconds.most_common():
        print(f"{spent:8.0f} s {rows[folder]:6} rows  {folder}")


def say_what_ran(chunks: list[Chunk], results: list[record.Result]) -> None:
    """Print how many rows of each group ran, and how many did not."""
    ended = {result.id for result in results}
    for group in GROUPS:
        rows = [row for chunk in chunks if chunk.group == group for row in chunk.rows]
        ran = sum(row.id in ended for row in rows)
        print(f"long tier, {group}: {ran} rows ran, {len(rows) - ran} did not")


def main() -> int:
    """Run what the arguments say. 1 if a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--until", type=float, help="seconds since 1970 by which the last chunk should have ended"
    )
    which.add_argument("--all", action="store_true", help="run all rows, and write their seconds")
    options = parser.parse_args()
    began = time.time()
    code, short = short_tier() if options.all else (0, [])
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    changed = changed_files(ROOT)
    print(
        f"long tier: {len(changed)} files differ from {COMMITS} commits ago, or from as far as the history goes"
    )
    chunks = in_order(collected(), changed, git(ROOT, "rev-parse", "HEAD"), table)
    run = Run(ROOT, list(chunks), float("inf") if options.all else options.until)
    run.work()
    if options.all:
        TABLE.write_text(json.dumps(means(run.results), indent=0) + "\n")
        say_by_folder(short + run.results)
        for result in short:
            if result.seconds > LONG:
                print(f"{result.seconds:.0f} s in `make test`, so it should be marked as long: {result.id}")
    say_what_ran(chunks, run.results)
    for result in run.results:
        if result.outcome == "failed":
            print(f"FAILED {result.id}")
    for line in run.broken:
        print(line)
    counts = Counter(result.outcome for result in short + run.results)
    said = [f"{counts[outcome]} {outcome}" for outcome in ("failed", "passed", "skipped") if counts[outcome]]
    print(f"{', '.join(said) or 'no rows ran'} in {time.time() - began:.2f}s")
    return 1 if code else run.code


if __name__ == "__main__":
    sys.exit(main())
