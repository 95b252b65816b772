"""Starts an example as a user starts it: by Python, or by the launcher, which is forked from a loaded process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fnaccel import checkpoint
from tests.launch.conftest import Ended, Server, Started, buffered

ROOT = Path(__file__).parents[2]
LIMIT = 240.0


@functools.cache
def preloaded():
    server = Server("sklearn.datasets", "transformers.models.auto.modeling_auto", "datasets")
    atexit.register(_close, server, os.getpid())
    return server


def _close(server, pid):
    if os.getpid() == pid:  # a fork of the tests that ends must not end the process of its parent
        server.close()


def run(name, *args, ranks=None, launch=()):
    """What an example printed, once it has ended well. `ranks` starts it by the launcher, with these flags."""
    script = [str(ROOT / "examples" / f"{name}.py"), *args]
    if ranks is None:
        done = subprocess.run(
            [sys.executable, *script], capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, check=False
        )
        ended = Ended(done.returncode, done.stdout, done.stderr)
    else:
        ended = launched(["launch", "-n", str(ranks), *launch, *script])
    assert ended.code == 0, ended.err[-3000:]
    return ended


def launched(command):
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        order = {"argv": command, "env": buffered(), "cwd": str(ROOT), "out": str(out), "err": str(err)}
        pid = preloaded().ask({**order, "constants": {}})
        return Started(preloaded(), pid, out, err).wait(LIMIT)


def result(path, name, *args, ranks=None, strategy="ddp", launch=()):
    """What an example wrote to `--json`. `ranks` starts it by the launcher, under a strategy and further flags."""
    flags = ("--strategy", strategy, *launch) if ranks else ()
    run(name, "--json", str(path), *args, ranks=ranks, launch=flags)
    return json.loads(path.read_text())


def killed(command, folder):
    """Start an example that saves, end it by SIGKILL a moment after its first checkpoint, and name the newest step."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 120
        while not list(folder.glob("step-*")) and time.monotonic() < end and process.poll() is None:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
    return int(checkpoint.latest(folder).name.removeprefix("step-"))
