"""Storms of a job with `--nnodes 1:2`: a machine that is killed, freezes, or loses its cable. The job goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from fnaccel.launch.network import free_port
from tests.launch.test_elastic import SLOW, STEPS, children
from tests.launch.test_machines import LIMIT, WORK, buffered, ip, wait_for
from tests.launch.test_machines import machines as machines

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(600)]
STORMS = 50
CABLES = 10


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


@pytest.mark.netns
@pytest.mark.parametrize("seed", range(CABLES))
def test_a_job_goes_on_after_a_cable_was_cut(machines, tmp_path, seed):
    """The second of two machines loses its cable for a while, and joins again if the job still runs."""
    seconds = random.Random(1_000 + seed).uniform(5.0, 30.0)
    (tmp_path / "work.py").write_text(WORK)
    flags = ["--nnodes", "1:2", "--master-addr", "10.77.0.1", "--max-restarts", "100", "-n", "1", "--cpu"]
    (first, _), (second, cable) = machines
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "fnaccel", "launch", *flags, "work.py"],
            cwd=tmp_path, env=buffered(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for name in (first, second)
    ]  # fmt: skip
    try:
        wait_for(tmp_path, "rank0of2", "rank1of2")
        ip("-n", second, "link", "set", cable, "down")
        time.sleep(seconds)
        ip("-n", second, "link", "set", cable, "up")
        time.sleep(1.0)
        (tmp_path / "enough").write_text("x")
        said = [one.communicate(timeout=LIMIT) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    print(f"\ncable {seed}: {seconds:.0f} s -> {[one.returncode for one in started]}", flush=True)
    assert started[0].returncode == 0, said
    assert "finished 0" in said[0][0]
