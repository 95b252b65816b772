"""Runs a task in fresh processes through the launcher, and reads their answer."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fnaccel.benching.task import Answer, Failed, Task, read


def run_isolated(task: Task, *, ranks: int, cpu: bool, environ: Mapping[str, str]) -> Answer:
    """Measure one scope in fresh processes. Their output is not printed.

    Args:
        task: the scope to measure, and its references.
        ranks: the number of processes.
        cpu: run the processes on the CPU even if there is an accelerator.
        environ: the environment of the processes.
    """
    with tempfile.TemporaryDirectory(prefix="fnaccel-bench-") as name:
        folder = Path(name)
        task.write(folder)
        command = [sys.executable, "-m", "fnaccel", "launch", "-n", str(ranks), "--timeout-grace", "5"]
        command += [*(["--cpu"] if cpu else []), "-m", "fnaccel.benching.child", name]
        log = folder / "said.txt"
        with log.open("wb") as output:
            code = _wait_for(subprocess.Popen(command, stdout=output, stderr=output, env={**environ}))
        answer = read(folder)
        # a killed rank writes no answer, and its peers only report that it has gone
        if answer is None or (isinstance(answer, Failed) and answer.follows and code > 128):
            return _ended(code, log.read_text(errors="replace"))
        return answer


def _wait_for(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except BaseException:  # Ctrl-C, mostly: the launcher ends its ranks
        process.terminate()
        process.wait()
        raise


def _ended(code: int, output: str) -> Failed:
    """The failure of processes that ended without an answer."""
    if code > 128 and code - 128 in signal.valid_signals():
        name = signal.Signals(code - 128).name
        memory = " (memory ran out, if nobody sent it)" if name == "SIGKILL" else ""
        summary = f"ended by {name}{memory}"
    else:
        summary = f"ended with exit code {code}"
    return Failed(kind="", what=summary, text=output.strip() or summary)
