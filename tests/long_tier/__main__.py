"""Run the long tier in the order of `order.py`, two processes at a time.

python -m tests.long_tier --until EPOCH     # .ci/run: chunks start if they should end by then. Writes nothing
python -m tests.long_tier --all             # make test-all: `make test`, then all long rows. Writes seconds.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

from tests.long_tier import record
from tests.long_tier.order import GROUPS, Chunk, Row, in_order, next_chunk

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("seconds.json")
COMMITS = 60
"""How far back a change counts as new. A landing has up to 50 commits."""
PROCESSES = 2
OVERRUN = 75.0
"""Seconds after the deadline at which a process that takes longer than its table says is ended."""
LONG = 20.0
"""Seconds from which a row belongs into this tier."""


class Collector:
    """A plugin of pytest that keeps the long rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks and the deliberate bugs of all rows."""
        for item in session.items:
            bug = item.callspec.params.get("mutant") if hasattr(item, "callspec") else None
            environment = item.get_closest_marker("environment")
            made = environment.args if environment else ()
            self.rows.append(Row(item.nodeid, f"fnaccel/{bug.file}" if bug else None, *made))


def collected() -> list[Row]:
    """All long rows, in the order of pytest."""
    collector = Collector()
    words = ["--collect-only", "-m", "long", "tests"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(words, plugins=[collector])
    if code != 0:
        raise SystemExit(f"the long rows could not be collected:\n{said.getvalue()}")
    return collector.rows


def git(*words: str) -> str:
    """What git prints, or nothing outside of a repository."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def changed_files() -> set[str]:
    """Files that differ from those of 60 first-parent commits ago. Without history: none. A file that only moved: no."""
    commits = git("rev-list", "--first-parent", f"-{COMMITS + 1}", "HEAD").split()
    if len(commits) < 2:
        return set()
    lines = git("diff", "--name-status", "-M", commits[-1]).splitlines()
    return {line.split("\t")[-1] for line in lines if not line.startswith("R100")}


@attrs.define
class Run:
    """The chunks that wait, and what has ended. Threads take chunks in turn."""

    waiting: list[Chunk]
    until: float | None
    folder: Path
    results: list[record.Result] = attrs.field(factory=list)
    broken: list[str] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def work(self) -> None:
        """Run chunks as long as one fits."""
        while chunk := self._take():
            self._run(chunk)

    def _take(self) -> Chunk | None:
        with self.lock:
            left = float("inf") if self.until is None else self.until - time.time()
            chunk = next_chunk(self.waiting, left)
            if chunk is not None:
                self.waiting.remove(chunk)
                make(chunk.rows[0].target)
            return chunk

    def _run(self, chunk: Chunk) -> None:
        path = Path(tempfile.mkdtemp(dir=self.folder))
        rows, output = path / "rows.txt", path / "output.txt"
        rows.write_text("".join(f"{row.id}\n" for row in chunk.rows))
        words = [str(ROOT / chunk.rows[0].python), "-m", "pytest", "-p", "tests.long_tier.record", f"@{rows}"]
        environ = {**os.environ, record.VARIABLE: str(path / "record.jsonl")}
        limit = None if self.until is None else max(self.until - time.time(), 0) + OVERRUN
        began = time.time()
        with output.open("w") as file:
            process = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = _ended(process)
        ended = record.read(path / "record.jsonl")
        with self.lock:
            self.results += ended
            outcomes = Counter(result.outcome for result in ended)
            said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "none ended"
            print(f"{chunk.rows[0].file}: {said} in {time.time() - began:.0f} s ({chunk.group})", flush=True)
            cut = self.until is not None and time.time() > self.until + OVERRUN
            if code != 0 and not cut:
                print(output.read_text(), flush=True)
            if code not in (0, 1) and not cut:
                self.broken.append(f"{chunk.rows[0].file}: pytest ended with {code}")


def _ended(process: subprocess.Popen[bytes]) -> int:
    """End pytest as Ctrl-C does, so that it ends its ranks, or by force if it does not go on. Returns its exit code."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def make(target: str) -> None:
    """Make an environment that rows need. Those that are there cost nothing."""
    subprocess.run(["make", target], cwd=ROOT, check=True)


def short_tier(folder: Path) -> tuple[int, list[record.Result]]:
    """`make test`, with its seconds."""
    path = folder / "short.jsonl"
    words = [
        "-m",
        "pytest",
        "-m",
        "not long",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "tests.long_tier.record",
    ]
    environ = {**os.environ, record.VARIABLE: str(path)}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, check=False
    ).returncode, record.read(path)


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
        folder = "/".join(result.id.partition("::")[0].split("/")[:2])
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
        "--until", type=float, help="seconds since 1970 at which the last chunk should have ended"
    )
    which.add_argument("--all", action="store_true", help="run all rows, and write their seconds")
    options = parser.parse_args()
    began = time.time()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    chunks = in_order(collected(), changed_files(), git("rev-parse", "HEAD").strip(), table)
    with tempfile.TemporaryDirectory() as folder:
        code, short = short_tier(Path(folder)) if options.all else (0, [])
        run = Run(list(chunks), options.until, Path(folder))
        with ThreadPoolExecutor(PROCESSES) as threads:
            for worker in [threads.submit(run.work) for _ in range(PROCESSES)]:
                worker.result()
    if options.all:
        TABLE.write_text(json.dumps(means(run.results), indent=0) + "\n")
        say_by_folder(short + run.results)
        for result in short:
            if result.seconds > LONG:
                print(f"{result.seconds:.0f} s in `make test`, mark it as long: {result.id}")
    say_what_ran(chunks, run.results)
    for result in run.results:
        if result.outcome == "failed":
            print(f"FAILED {result.id}")
    print(*run.broken, sep="\n")
    counts = Counter(result.outcome for result in short + run.results)
    said = ", ".join(
        f"{counts[outcome]} {outcome}" for outcome in ("failed", "passed", "skipped") if counts[outcome]
    )
    print(f"{said} in {time.time() - began:.2f}s")
    return 1 if code or run.broken or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
