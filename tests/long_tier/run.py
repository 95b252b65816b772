"""Collects the long rows, and runs their chunks: two processes of pytest at a time, until a deadline or to the end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

from tests.long_tier import record
from tests.long_tier.order import Chunk, Row, next_chunk

PROCESSES = 2
COMMITS = 60
"""How many commits back a change still counts. A landing has up to 50."""
OVERRUN = 75.0
"""Seconds after the deadline at which a chunk that takes longer than expected is ended."""


class Collector:
    """A plugin of pytest that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks and the deliberate bugs."""
        for item in session.items:
            bug = item.callspec.params.get("mutant") if hasattr(item, "callspec") else None
            mark = item.get_closest_marker("environment")
            self.rows.append(
                Row(item.nodeid, f"fnaccel/{bug.file}" if bug else None, *(mark.args if mark else ()))
            )


def collected() -> list[Row]:
    """All long rows, in the order of pytest."""
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["--collect-only", "-m", "long", "tests"], plugins=[collector])
    if code != 0:
        raise SystemExit(f"the long rows could not be collected:\n{said.getvalue()}")
    return collector.rows


def git(root: Path, *words: str) -> str:
    """What git prints, or nothing outside of a repository."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def changed_files(root: Path) -> set[str]:
    """Files that differ from those of 60 first-parent commits ago. Without history there are none.

    A file that moved, with an import or two rewritten, is not among them.
    """
    commits = git(root, "rev-list", "--first-parent", f"-{COMMITS + 1}", "HEAD").split()
    if len(commits) < 2:
        return set()
    lines = git(root, "diff", "--name-status", "-M", commits[-1]).splitlines()
    return {line.split("\t")[-1] for line in lines if not re.match(r"R(09\d|100)", line)}


def make(root: Path, target: str) -> None:
    """Make an environment. One that is there costs nothing."""
    done = subprocess.run(["make", target], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"make {target} failed:\n{done.stdout}{done.stderr}")


@attrs.define
class Run:
    """Chunks that wait, and the results of those that have ended. `until` is in seconds since 1970."""

    root: Path
    waiting: list[Chunk]
    until: float = float("inf")
    results: list[record.Result] = attrs.field(factory=list)
    broken: list[str] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def work(self) -> None:
        """Run chunks in two threads, as long as one fits before the deadline."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as threads:
            for thread in [threads.submit(self._work, Path(folder)) for _ in range(PROCESSES)]:
                thread.result()

    def _work(self, folder: Path) -> None:
        while chunk := self._take():
            self._run(chunk, Path(tempfile.mkdtemp(dir=folder)))

    def _take(self) -> Chunk | None:
        with self.lock:
            chunk = next_chunk(self.waiting, self.until - time.time())
            if chunk is not None:
                self.waiting.remove(chunk)
                make(self.root, chunk.rows[0].target)
            return chunk

    def _run(self, chunk: Chunk, folder: Path) -> None:
        rows, output = folder / "rows.txt", folder / "output.txt"
        rows.write_text("".join(f"{row.id}\n" for row in chunk.rows))
        python = self.root / chunk.rows[0].python
        words = [str(python), "-m", "pytest", "-p", "tests.long_tier.record", f"@{rows}"]
        environ = {**os.environ, record.VARIABLE: str(folder / "record.jsonl")}
        began = time.time()
        with output.open("w") as file:
            process = subprocess.Popen(
                words, cwd=self.root, env=environ, stdout=file, stderr=subprocess.STDOUT
            )
            in_time = self._wait(process)
        self._report(chunk, record.read(folder / "record.jsonl"), time.time() - began)
        if process.returncode != 0 and in_time:
            print(output.read_text(), flush=True)
            if process.returncode != 1:
                self.broken.append(f"{chunk.rows[0].file}: pytest ended with {process.returncode}")

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether a process ended by itself. Past the deadline it is ended as by Ctrl-C, so that it ends its ranks."""
        limit = self.until - time.time() + OVERRUN
        try:
            process.wait(None if limit == float("inf") else limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        else:
            return True
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False

    def _report(self, chunk: Chunk, ended: list[record.Result], seconds: float) -> None:
        with self.lock:
            self.results += ended
            outcomes = Counter(result.outcome for result in ended)
            said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            cut = f", {len(chunk.rows) - len(ended)} did not end" if len(ended) < len(chunk.rows) else ""
            print(f"{chunk.rows[0].file}: {said}{cut} in {seconds:.0f} s ({chunk.group})", flush=True)
