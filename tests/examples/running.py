"""Starts an example as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(name, *args, ranks=None, launch=()):
    script = [str(ROOT / "examples" / f"{name}.py"), *args]
    start = (
        [sys.executable]
        if ranks is None
        else [sys.executable, "-m", "fnaccel", "launch", "-n", str(ranks), *launch]
    )
    done = subprocess.run(
        [*start, *script], capture_output=True, text=True, timeout=240, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def result(path, name, *args, ranks=None, strategy="ddp"):
    """What an example wrote to `--json`. `ranks` starts it by the launcher, under a strategy."""
    launch = ("--strategy", strategy) if ranks else ()
    run(name, "--json", str(path), *args, ranks=ranks, launch=launch)
    return json.loads(path.read_text())
