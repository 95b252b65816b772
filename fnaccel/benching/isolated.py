"""Runs a task in processes of its own, by way of the launcher, and reads their answer."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fnaccel.benching.task import Answer, Failed, Task, read


def run_isolated(task: Task, *, ranks: int, cpu: bool, environ: Mapping[str, str]) -> Answer:
    """Measure one scope in fresh processes; what they print is kept to themselves.

    Args:
        task: what to measure.
        ranks: how many processes.
        cpu: keep them from taking an accelerator.
        environ: their environment.
    """
    with tempfile.TemporaryDirectory(prefix="fnaccel-bench-") as name:
        folder = Path(name)
        task.write(folder)
        command = [sys.executable, "-m", "fnaccel", "launch", "-n", str(ranks), "--timeout-grace", "5"]
        command += [*(["--cpu"] if cpu else []), "-m", "fnaccel.benching.child", name]
        log = folder / "said.txt"
        with log.open("wb") as said:
            code = _wait_for(subprocess.Popen(command, stdout=said, stderr=said, env={**environ}))
        answer = read(folder)
        # a rank that was killed leaves nothing, or only what its peers said of it
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


def _ended(code: int, said: str) -> Failed:
    """The failure of processes that could not say anything themselves."""
    if code > 128 and code - 128 in signal.valid_signals():
        name = signal.Signals(code - 128).name
        memory = " (memory ran out, if nobody sent it)" if name == "SIGKILL" else ""
        what = f"ended by {name}{memory}"
    else:
        what = f"ended with exit code {code}"
    return Failed(kind="", what=what, text=said.strip() or what)
