"""What `fnaccel launch` promises about several machines, and PyTorch's elastic agent does not keep.

Each promise runs on both. If PyTorch keeps one some day, its row fails, and docs/decisions.md has a reason less.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fnaccel.launch.network import free_port
from tests.launch.conftest import buffered
from tests.launch.test_elastic import QUICK

pytestmark = [pytest.mark.launcher, pytest.mark.long]

BEGIN = """
    import os, pathlib, signal, sys, time
    who = os.environ["WHO"]
    starts = len(list(pathlib.Path().glob(f"began-{who}-*")))
    pathlib.Path(f"began-{who}-{starts}").write_text("begun")
"""


def ended_in_time(process):
    """The exit code, or None if the agent still waits for the other one."""
    try:
        return process.wait(20)
    except subprocess.TimeoutExpired:
        return None


@pytest.fixture(
    params=["fnaccel", pytest.param("torch", marks=pytest.mark.xfail(strict=True, raises=AssertionError))]
)
def agents(request, launcher):
    """Starts a script on two machines, which are called a and b in the variable WHO; both are this one."""
    port = free_port()
    started = []

    def torchs(script, who, restarts):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        keeps = f"is_host={str(who == 'a').lower()}"  # the store of the job, which ends with its agent
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", keeps]
        limits = ["--monitor-interval", "0.1", "--max-restarts", str(restarts)]
        process = subprocess.Popen(
            [*command, *meeting, *limits, script],
            cwd=launcher.folder, env=buffered() | {"WHO": who}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        started.append(process)
        return process.pid, lambda: ended_in_time(process)

    def ours(script, who, restarts):
        run = launcher.start(
            "-n", 1, "--cpu", "--nnodes", 2, "--node-rank", "ab".index(who), "--master-addr", "127.0.0.1",
            "--master-port", port, "--max-restarts", restarts, script, env={"WHO": who}, constants=QUICK,
        )  # fmt: skip
        return run.pid, lambda: run.wait().code

    def start(text, restarts=0):
        script = launcher.write(BEGIN + text)
        return [(torchs if request.param == "torch" else ours)(script, who, restarts) for who in "ab"]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_failure_on_one_machine_ends_the_ranks_of_the_other(launcher, agents):
    """The agent tells nobody: ranks that do not talk go on, and their launcher ends with code 0."""
    (_, first), (_, second) = agents("""
    if who == "b":
        sys.exit(7)
    time.sleep(8)
    pathlib.Path("went-on").write_text("to its end")
    """)
    codes = first(), second()
    assert not (launcher.folder / "went-on").exists()
    assert codes == (7, 7)


def test_restarts_are_those_of_the_job(launcher, agents):
    """Each agent counts its own: with 1 restart, two machines make three attempts."""
    (_, first), (_, second) = agents(
        """
    if starts == "ab".index(who):
        sys.exit(7)
    time.sleep(4)
    """,
        restarts=1,
    )
    codes = first(), second()
    begun = sorted(path.name for path in launcher.folder.glob("began-*"))
    assert begun == ["began-a-0", "began-a-1", "began-b-0", "began-b-1"]
    assert codes == (7, 7)


def test_ranks_that_were_told_to_stop_are_not_started_again(launcher, agents):
    """Code 75 says that all have saved and want to go on later. For the agent it is a failure like any other."""
    (_, first), (pid, second) = agents(
        """
    stop = pathlib.Path("stop")
    signal.signal(signal.SIGTERM, lambda *_: stop.write_text("agreed"))
    pathlib.Path(f"ready-{who}").write_text("ready")
    while not stop.exists():
        time.sleep(0.01)
    sys.exit(75)
    """,
        restarts=1,
    )
    launcher.wait_for("ready-a", "ready-b")
    os.kill(pid, signal.SIGTERM)
    codes = first(), second()
    assert sorted(path.name for path in launcher.folder.glob("began-*")) == ["began-a-0", "began-b-0"]
    assert codes == (75, 75)


def test_what_starts_ranks_has_one_thread(launcher, agents):
    """A fork copies one thread, with the locks of all. The agent keeps its rendezvous alive in a thread."""
    runs = agents("""
    status = pathlib.Path(f"/proc/{os.getppid()}/status").read_text()
    threads = next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:"))
    pathlib.Path(f"threads-{who}").write_text(threads)
    """)
    assert [wait() for _, wait in runs] == [0, 0]
    assert launcher.wait_for("threads-a", "threads-b") == ["1", "1"]
