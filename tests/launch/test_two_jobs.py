"""Two jobs at one address: they never become one, and the one that came second ends with an error."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fnaccel.launch.network import free_port
from tests.launch.conftest import LIMIT, buffered
from tests.launch.test_elastic import QUICK

pytestmark = pytest.mark.launcher

SUM = """
    import os, sys, torch, fnaccel as fa
    with fa.start(device="cpu") as world:
        print("sum", fa.reduce(torch.tensor(float(os.environ["VALUE"]))).item(), flush=True)
"""
WORK = """
    import time, fnaccel as fa
    from pathlib import Path
    with fa.start(device="cpu") as world:
        Path("began").write_text("x")
        while not Path("enough").exists():
            time.sleep(0.02)
    print("ranks", world.size, flush=True)
"""


def start(launcher, port, *words, number=None, nodes="2", **options):
    numbers = () if number is None else ("--node-rank", number)
    return launcher.start(
        "-n", 1, "--cpu", "--nnodes", nodes, *numbers, "--master-addr", "127.0.0.1", "--master-port", port,
        *words, constants=QUICK, **options,
    )  # fmt: skip


@pytest.mark.long_except(r"contents")
@pytest.mark.parametrize("differ", ["contents", "arguments", "options", "folder"])
def test_launchers_of_two_jobs_do_not_meet(launcher, differ):
    port = free_port()
    started = []
    for number, name in enumerate("ab"):
        launcher.write(SUM + (f"    # {name}\n" if differ == "contents" else ""), f"{name}/train.py")
        args = ("--lr", number) if differ == "arguments" else ()
        flags = ("--set", f"run.steps={number + 1}") if differ == "options" else ()
        options = {"env": {"VALUE": str(number)}, "number": number}
        folder = launcher.folder / ("a" if differ in ("arguments", "options") else name)
        started.append(start(launcher, port, *flags, "train.py", *args, folder=folder, **options))
    reasons = {"contents": "the contents of the script", "folder": "the folder"}
    for ended in [each.wait() for each in started]:
        assert (ended.code, ended.out) == (2, ""), ended
        assert f"two jobs have the address 127.0.0.1:{port}" in ended.err
        assert f"they differ in {reasons.get(differ, 'the command')}" in ended.err
        assert ended.err.count("`fnaccel launch -n 1 --nnodes 2") == 2, "both commands"
        assert "--master-port of its own" in ended.err


@pytest.mark.long
def test_a_second_job_does_not_join_one_that_runs(launcher):
    port = free_port()
    launcher.write(WORK, "a/train.py")
    launcher.write(SUM, "b/train.py")
    first = start(launcher, port, "train.py", nodes="1:2", folder=launcher.folder / "a")
    launcher.wait_for("a/began")
    second = start(launcher, port, "train.py", nodes="1:2", folder=launcher.folder / "b", env={"VALUE": "1"})
    ended = second.wait()
    assert (ended.code, ended.out) == (2, "")
    assert "differ in the contents of the script" in ended.err
    (launcher.folder / "a" / "enough").write_text("x")
    ended = first.wait()
    assert (ended.code, ended.out, ended.err) == (0, "ranks 1\n", "")


@pytest.mark.long
def test_a_launcher_that_was_never_needed_ends_with_an_error(launcher):
    port, script = free_port(), launcher.write(WORK)
    started = [start(launcher, port, script, number=number) for number in range(2)]
    launcher.wait_for("began")
    spare = start(launcher, port, script)
    time.sleep(3)  # it waits
    (launcher.folder / "enough").write_text("x")
    assert [each.wait().code for each in started] == [0, 0]
    ended = spare.wait()
    assert (ended.code, ended.out) == (2, "")
    assert "this machine was in none of its attempts: nothing ran here" in ended.err


@pytest.mark.long
def test_a_launcher_that_came_to_a_job_of_one_machine_is_told(launcher):
    port = free_port()
    script = launcher.write(WORK)
    first = launcher.start("-n", 2, "--cpu", "--master-port", port, script)
    launcher.wait_for("began")
    ended = start(launcher, port, script, number=1).wait()
    assert (ended.code, ended.out) == (2, "")
    assert "is not the launcher of a job on several machines" in ended.err
    ended = launcher("-n", 2, "--cpu", "--master-port", port, script)
    assert (ended.code, ended.out) == (2, "")
    assert f"port {port} can't be listened on" in ended.err
    (launcher.folder / "enough").write_text("x")
    assert first.wait().code == 0


def ranks_of(folder, port, script, *ranks, size=2, **variables):
    """Processes that another launcher has started."""
    processes = []
    for rank in ranks:
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "VALUE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(subprocess.Popen(
            [sys.executable, script], cwd=folder, env=buffered() | place | address | variables,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
    return processes


def outputs(processes):
    try:
        return [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("differ", [pytest.param("script", marks=pytest.mark.long), "run"])
def test_ranks_of_two_jobs_do_not_meet(launcher, differ):
    """Started by hand or by torchrun. Rank 1 of the second job is there before rank 1 of the first."""
    port = free_port()
    scripts = [launcher.write(SUM, "a.py"), launcher.write(SUM + "    # b\n", "b.py")]
    runs = [{"TORCHELASTIC_RUN_ID": name if differ == "run" else "none"} for name in "ab"]
    other = scripts[differ == "script"]
    (first,) = ranks_of(launcher.folder, port, scripts[0], 0, **runs[0])
    (second,) = ranks_of(launcher.folder, port, other, 1, **runs[1])
    ((_, err),) = outputs([second])
    assert f"WorldError: two jobs have the address 127.0.0.1:{port}: rank 1 belongs to" in err
    (third,) = ranks_of(launcher.folder, port, scripts[0], 1, **runs[0])
    assert [out for out, _ in outputs([first, third])] == ["sum 2.0\n"] * 2


@pytest.mark.long
def test_a_second_process_of_a_rank_is_named(launcher):
    port, script = free_port(), launcher.write(SUM)
    first, one, two = ranks_of(launcher.folder, port, script, 0, 1, 1, size=3)
    end = time.monotonic() + LIMIT
    while one.poll() is None and two.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    ended, waits = (one, two) if one.poll() is not None else (two, one)
    ((_, err),) = outputs([ended])
    assert "another process came as rank 1" in err
    assert waits.poll() is None
    for process in (first, waits):
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("port", ["99999", "0", "http", ""])
def test_a_port_that_is_none_is_named(launcher, port):
    script = launcher.write(SUM)
    ((_, err),) = outputs(ranks_of(launcher.folder, port, script, 0))
    assert f"WorldError: MASTER_PORT={port!r} is no port" in err
