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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest

from tests.long_tier import record
from tests.long_tier.order import Chunk, Row, next_chunk

PROCESSES = 2
COMMITS = 60
"""How many commits back a change still counts. A landing has up to 50."""
OVERRUN = 75.0
"""Seconds after the deadline at which a process that takes longer than expected is ended."""
PATIENCE = 20.0
"""Seconds that it then has to end its ranks."""


class Collector:
    """A plugin of pytest that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks and the deliberate bugs."""
        self.rows = [row_of(item) for item in session.items]


def row_of(item: Any) -> Row:
    """What the order has to know about an item of pytest."""
    bug = item.callspec.params.get("mutant") if hasattr(item, "callspec") else None
    mark = item.get_closest_marker("environment")
    return Row(item.nodeid, f"fnaccel/{bug.file}" if bug else None, *(mark.args if mark else ()))


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
    with contextlib.suppress(FileNotFoundError):  # there may be no git
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", *words],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""
    return ""


def changed_files(root: Path) -> set[str]:
    """Files that differ from those of 60 first-parent commits ago. Without history there are none.

    A file that moved, with an import or two rewritten, is not among them.
    """
    commits = git(root, "rev-list", "--first-parent", f"-{COMMITS + 1}", "HEAD").split()
    if len(commits) < 2:
        return set()
    lines = git(root, "diff", "--relative", "--name-status", "-M", commits[-1]).splitlines()
    moved = re.compile(r"R(09\d|100)")
    return {line.split("\t")[-1] for line in lines if not moved.match(line)} | set(
        git(root, "ls-files", "--others", "--exclude-standard").splitlines()
    )


@attrs.define
class Run:
    """Chunks that wait, and the results of those that have ended. `until` is in seconds since 1970.

    Attributes:
        broken: a line for each process that failed by itself, and not because of a row.
    """

    root: Path
    waiting: list[Chunk]
    until: float = float("inf")
    results: list[record.Result] = attrs.field(factory=list)
    broken: list[str] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    @property
    def code(self) -> int:
        """1 if a row or a process failed, else 0."""
        return int(bool(self.broken) or any(result.outcome == "failed" for result in self.results))

    def work(self) -> None:
        """Run chunks in two threads, as long as one fits before the deadline."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as threads:
            try:
                for thread in [threads.submit(self._work, Path(folder)) for _ in range(PROCESSES)]:
                    thread.result()
            except BaseException:  # such as Ctrl-C: the threads take no more chunks
                self.waiting.clear()
                raise

    def _work(self, folder: Path) -> None:
        while chunk := self._take(folder):
            self._run(chunk, Path(tempfile.mkdtemp(dir=folder)))

    def _take(self, folder: Path) -> Chunk | None:
        """The next chunk, whose environment is made."""
        with self.lock:
            while chunk := next_chunk(self.waiting, self.until - time.time()):
                if self._make(chunk.rows[0].target, folder / "make.txt"):
                    self.waiting.remove(chunk)
                    return chunk
            return None

    def _make(self, target: str, output: Path) -> bool:
        """Whether an environment could be made. One that is there costs nothing. If not, its chunks are left out."""
        process = self._start(["make", target], output)
        in_time = self._wait(process)
        if process.returncode == 0:
            return True
        self.waiting[:] = [chunk for chunk in self.waiting if chunk.rows[0].target != target]
        if in_time:
            print(output.read_text(errors="replace"), flush=True)
            self.broken.append(f"make {target} ended with {process.returncode}")
        return False

    def _run(self, chunk: Chunk, folder: Path) -> None:
        rows, path, output = folder / "rows.txt", folder / "record.jsonl", folder / "output.txt"
        rows.write_text("".join(f"{row.id}\n" for row in chunk.rows))
        python = str(self.root / chunk.rows[0].python)
        began = time.time()
        words = [python, "-m", "pytest", "-rs", "-p", "tests.long_tier.record", f"@{rows}"]
        process = self._start(words, output, {record.VARIABLE: str(path)})
        in_time = self._wait(process)
        ended = record.read(path)
        failed = any(result.outcome == "failed" for result in ended)
        broken = in_time and (len(ended) < len(chunk.rows) or process.returncode != int(failed))
        with self.lock:
            self.results += ended
            _report(chunk, ended, time.time() - began)
            text = output.read_text(errors="replace")
            if failed or broken:
                print(text, flush=True)
            else:  # why rows were skipped
                print(*re.findall(r"^SKIPPED .*\n", text, re.MULTILINE), sep="", end="", flush=True)
            if broken:
                said = f"pytest ended with {process.returncode}, after {len(ended)} of {len(chunk.rows)} rows"
                self.broken.append(f"{chunk.rows[0].file}: {said}")

    def _start(
        self, words: list[str], output: Path, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[bytes]:
        environ = {**os.environ, **variables}
        with output.open("w") as file:
            return subprocess.Popen(words, cwd=self.root, env=environ, stdout=file, stderr=subprocess.STDOUT)

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether a process ended by itself. Past the deadline it is ended as by Ctrl-C, and then by force."""
        limit = self.until - time.time() + OVERRUN
        try:
            process.wait(None if limit == float("inf") else max(limit, 0.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        else:
            return True
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False


def _report(chunk: Chunk, ended: list[record.Result], seconds: float) -> None:
    outcomes = Counter(result.outcome for result in ended)
    said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "0 rows"
    cut = f", {len(chunk.rows) - len(ended)} did not end" if len(ended) < len(chunk.rows) else ""
    print(f"{chunk.rows[0].file}: {said}{cut} in {seconds:.0f} s ({chunk.group})", flush=True)
