"""Runs `train_gpt.py` through the launcher and ends it with kill -9 at chosen moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import attrs

from tests.launch.conftest import LIMIT, Launcher, gone

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
MOMENTS = ("start", "save", "step")
TARGETS = ("launcher", "one rank", "all ranks")


@attrs.frozen
class Kill:
    """Who is killed, and when: some time after the start, as a save begins, or between saves."""

    target: str
    moment: str
    commits: int
    delay: float


def kills(seed, count):
    """Kills of every kind, in an order that the seed gives."""
    chance = random.Random(seed)
    kinds = [(target, moment) for target in TARGETS for moment in MOMENTS]
    return [
        Kill(*kinds[at % len(kinds)], chance.randrange(3), chance.random())
        for at in chance.sample(range(count), count)
    ]


@attrs.frozen
class Training:
    """One run in one directory, in as many processes as it takes."""

    launcher: Launcher
    name: str
    steps: int
    flags: tuple[str, ...] = ()
    strategy: str = "ddp"

    @property
    def root(self):
        return self.launcher.folder / self.name

    def start(self, ranks, *launch):
        own = ("--dir", self.name, "--json", f"{self.name}.json", "--steps", self.steps, "--quiet")
        return self.launcher.start(
            "-n",
            ranks,
            "--cpu",
            "--strategy",
            self.strategy,
            *launch,
            SCRIPT,
            *own,
            "--global-batch",
            4,
            *self.flags,
        )

    def finish(self, ranks=2, *launch):
        """Run to the end; what the last process wrote."""
        ended = self.start(ranks, *launch).wait()
        assert ended.code == 0, ended.err
        return self.result()

    def result(self):
        left = [path.name for path in self.root.iterdir() if not path.name.startswith("step-")]
        assert not left, "leftovers of saves"
        return json.loads((self.launcher.folder / f"{self.name}.json").read_text())

    def committed(self):
        names = list_of(self.root)
        return [name for name in names if name.startswith("step-")]

    def kill(self, kill, ranks=2):
        """Start, kill, and see that nobody is left."""
        started = self.start(ranks)
        self.wait_for(kill, started.pid)
        everyone = children(started.pid)
        end = time.monotonic() + LIMIT
        while kill.target != "launcher" and not everyone and time.monotonic() < end:  # not forked yet
            time.sleep(0.001)
            everyone = children(started.pid)
        pids = [] if kill.target == "launcher" else everyone
        for pid in {"launcher": [started.pid], "one rank": pids[:1], "all ranks": pids}[kill.target]:
            signal_process(pid)
        ended = started.wait()
        assert ended.code in (-9, 137), (kill, ended)
        assert all(gone(pid) for pid in everyone), kill

    def wait_for(self, kill, pid):
        if kill.moment == "start":
            time.sleep(2 * kill.delay)
            return
        known = set(list_of(self.root))
        end = time.monotonic() + LIMIT
        news = set()
        while time.monotonic() < end and Path(f"/proc/{pid}").exists():
            news |= set(list_of(self.root)) - known
            commits = sum(name.startswith("step-") for name in news)
            if commits >= max(kill.commits, kill.moment == "step"):
                if kill.moment == "step":
                    time.sleep(0.05 * kill.delay)
                    return
                if any(name.startswith(".saving-") for name in set(list_of(self.root)) - known):
                    time.sleep(0.005 * kill.delay)
                    return
            time.sleep(0.0005)
        raise AssertionError(f"no moment for {kill}")


def list_of(folder):
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are enough, and it is asked often
    except FileNotFoundError:
        return []


def children(pid):
    """The processes that one has forked; in a random, but repeatable order."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found.append(int(entry.name))
    return random.Random(len(found) + pid).sample(found, len(found))


def signal_process(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
