"""`launcher`: runs `fnaccel launch ...` in processes of its own, from one that has fnaccel loaded."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import attrs
import pytest

LIMIT = 120.0


def buffered():
    """The environment, without what makes Python write each part of a line by itself."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@attrs.frozen
class Ended:
    """What a launch left: its exit code (negative: a signal), and what it printed."""

    code: int
    out: str
    err: str


@attrs.frozen
class Started:
    """A launch that runs."""

    server: Server
    pid: int
    out: Path
    err: Path

    def wait(self, limit=LIMIT):
        code = self.server.ask({"wait": self.pid, "limit": limit})
        if code is None:
            os.kill(self.pid, 9)
            pytest.fail(f"the launch did not end:\n{self.out.read_text()}\n{self.err.read_text()}")
        return Ended(code, self.out.read_text(), self.err.read_text())


class Server:
    """The preloaded process, which has loaded `modules`, too."""

    def __init__(self, *modules):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("preloaded.py")), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=buffered(),
        )

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        # closing the pipe would not do: ranks that were forked since hold copies of this end
        self.process.stdin.write("null\n")
        self.process.stdin.close()
        self.process.wait(LIMIT)
        self.process.stdout.close()


class Launcher:
    """Runs commands in one folder: `launcher("-n", "2", "train.py")`."""

    def __init__(self, server, folder):
        self.server = server
        self.folder = folder
        self.count = 0
        self.pids = []

    def write(self, text, name="script.py"):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def start(self, *arguments, command="launch", env=None, constants=None, folder=None):
        """`constants`: values of module attributes, by dotted name, in the launcher only."""
        self.count += 1
        out, err = self.folder / f"{self.count}.out", self.folder / f"{self.count}.err"
        order = {
            "argv": [command, *map(str, arguments)],
            "env": {**buffered(), **(env or {})},
            "cwd": str(folder or self.folder),
            "out": str(out),
            "err": str(err),
            "constants": constants or {},
        }
        self.pids.append(self.server.ask(order))
        return Started(self.server, self.pids[-1], out, err)

    def end(self):
        """Kill the launches that still run: those of a test that failed."""
        for pid in self.pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[1]) == self.server.process.pid and fields[0] != "Z":
                    os.kill(pid, 9)

    def __call__(self, *arguments, **options):
        return self.start(*arguments, **options).wait()

    def wait_for(self, *names):
        """Until the script has written files of these names; their texts."""
        end = time.monotonic() + LIMIT
        paths = [self.folder / name for name in names]
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                texts = [path.read_text() for path in paths]
                if all(texts):
                    return texts
            time.sleep(0.01)
        return pytest.fail(f"no {names} in {list(self.folder.iterdir())}")


def gone(pid):
    """Whether a process has ended, or ends soon: before the 100 s that a script sleeps if nobody ends it."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state in "ZX":  # nobody has asked for its exit code yet
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="session")
def preloaded():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def launcher(preloaded, tmp_path):
    made = Launcher(preloaded, tmp_path)
    yield made
    made.end()
