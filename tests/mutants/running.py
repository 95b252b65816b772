"""pytest in a fork of a process that has imported torch. Imports nothing of fnaccel: each fork has a copy of it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "pytest"])  # three seconds each time


def run(where: Path, arguments: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit code of pytest in a folder with a copy of the package, and what it printed. None: it was killed."""
    said = where / "said.txt"
    process = FORKS.Process(target=_run, args=(str(where), arguments, str(said)))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None, said.read_text()
    return process.exitcode, said.read_text()


def _run(where: str, arguments: list[str], said: str) -> None:
    output = os.open(said, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("fnaccel", "tests"):
            del sys.modules[name]
    os.chdir(where)
    os.environ["PYTHONPATH"] = where  # processes that a test starts import the copy, too
    sys.path.insert(0, where)
    import pytest

    sys.exit(pytest.main(arguments))
