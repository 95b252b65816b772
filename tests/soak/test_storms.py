"""Storms of a job with `--nnodes 1:2`: a machine whose rank or launcher is killed, or that freezes. The job goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from fnaccel.launch.network import free_port
from tests.launch.test_elastic import SLOW, STEPS, children

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(600)]
STORMS = 50


class Machines:
    """Two machines of one job, both here."""

    def __init__(self, launcher):
        self.launcher, self.port, self.script = launcher, free_port(), launcher.write(SLOW)
        self.started = [self.start(number) for number in range(2)]
        launcher.wait_for("ready")

    def start(self, number):
        return self.launcher.start(
            "-n", 1, "--cpu", "--nnodes", "1:2", "--master-addr", "127.0.0.1", "--master-port", self.port,
            "--max-restarts", 100, "--node-rank", number, self.script,
        )  # fmt: skip

    def freeze(self, seconds):
        pids = [self.started[1].pid, *children(self.started[1].pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def kill_rank(self):
        os.kill(int((self.launcher.folder / "pid1").read_text()), signal.SIGKILL)

    def kill_launcher(self, seconds):
        os.kill(self.started[1].pid, signal.SIGKILL)
        self.started[1].wait()
        time.sleep(seconds)
        self.started[1] = self.start(1)


@pytest.mark.parametrize("seed", range(STORMS))
def test_a_job_goes_on_after_a_storm(launcher, seed):
    chosen = random.Random(seed)
    machines = Machines(launcher)
    time.sleep(chosen.uniform(0.0, 1.0))
    what, seconds = chosen.choice(["rank", "launcher", "freeze", "freeze"]), chosen.uniform(5.0, 30.0)
    if what == "rank":
        machines.kill_rank()
    elif what == "launcher":
        machines.kill_launcher(seconds / 10)
    else:
        machines.freeze(seconds)
    ended = [each.wait() for each in machines.started]
    print(f"\nstorm {seed}: {what} {seconds:.0f} s -> {[each.code for each in ended]}", flush=True)
    assert [each.code for each in ended] == [0, 0], ended
    _, first, losses, _ = json.loads((launcher.folder / "done.json").read_text())
    assert first + len(losses) == STEPS
