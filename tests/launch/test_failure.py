"""A rank fails: one message, its exit code, and no process left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fnaccel.launch.failure import Failure, cause, describe, follows
from fnaccel.launch.job import Job
from tests.launch.conftest import LIMIT, buffered, gone

ROOT = Path(__file__).parents[2]


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, "rank 0 of 1 on "),
        ("sys.exit('no data')", 1, "no data\n"),
        ("os._exit(7)", 7, "ended with exit code 7"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n\nrank 0 of 1 on "),
        ("os.kill(os.getpid(), 9)", 137, "ended by SIGKILL\n  where: fnaccel launch script.py\n  fix:"),
        ("exec('1 +')", 1, "SyntaxError: invalid syntax"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_exit_codes(launcher, body, code, said):
    ended = launcher("-n", 1, launcher.write(f"import os, signal, sys\n{body}\n"))
    assert ended.code == code
    assert said in ended.err
    assert (ended.err == "") == (code == 0)
    assert "fnaccel/" not in ended.err, "frames of the launcher"


@pytest.mark.long
@pytest.mark.launcher
def test_a_rank_that_cleans_up_reports_the_cause_after_those_that_followed(launcher):
    script = launcher.write("""
        import time
        import fnaccel as fa
        rank = None
        try:
            with fa.start(device="cpu") as world:
                rank = world.rank
                world.barrier()
                if rank == 1:
                    raise ValueError("boom")
                world.barrier()
        finally:
            if rank == 1:
                time.sleep(2)
    """)
    ended = launcher("-n", 2, script)
    assert ended.code == 1
    assert "ValueError: boom" in ended.err
    assert "PeerLostError" not in ended.err


@pytest.mark.launcher
def test_one_traceback_of_the_rank_that_came_first(launcher):
    script = launcher.write("""
        import fnaccel as fa
        with fa.start(device="cpu") as world:
            world.barrier()
            if world.rank == 1:
                raise ValueError("boom")
            world.barrier()
    """)
    ended = launcher("-n", 3, script)
    assert ended.code == 1
    lines = ended.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{launcher.folder / script}", line 6, in <module>'
    assert lines[-3] == "ValueError: boom"
    assert lines[-1] == f"rank 1 of 3 on {os.uname().nodename} failed with exit code 1"
    assert ended.err.count("Traceback") == 1


@pytest.mark.launcher
def test_a_rank_that_was_killed_is_named_and_not_those_that_missed_it(launcher):
    script = launcher.write("""
        import os, signal, fnaccel as fa
        with fa.start(device="cpu") as world:
            world.barrier()
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            world.barrier()
    """)
    ended = launcher("-n", 2, script)
    assert ended.code == 137
    assert ended.err.startswith("LaunchError: rank 1 of 2 on ")
    assert "Traceback" not in ended.err


@pytest.mark.launcher
def test_our_errors_are_shown_as_they_are(launcher):
    script = launcher.write("""
        import fnaccel as fa
        def build():
            return fa.accumulate(lambda model, batch: 0, 0)
        build()
    """)
    ended = launcher("-n", 2, script)
    assert ended.code == 1
    assert ended.err.count("ArgumentError: ") == 1
    assert ended.err.count("\n  where: ") == ended.err.count("\n  fix: ") == 1
    assert [line.split(", ")[1] for line in ended.err.splitlines() if "File" in line] == ["line 5", "line 4"]


@pytest.mark.launcher
def test_a_hook_of_the_script_still_runs(launcher):
    script = launcher.write("""
        import sys
        before = sys.excepthook
        def hook(*error):
            print("hook", error[1], flush=True)
            before(*error)
        sys.excepthook = hook
        raise ValueError("boom")
    """)
    ended = launcher("-n", 1, script)
    assert (ended.code, ended.out, ended.err.count("ValueError: boom")) == (1, "hook boom\n", 1)


STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(f"pid{os.environ['RANK']}", "w") as file:
        print(os.getpid(), file=file)
    if os.environ["RANK"] == "1":
        while not os.path.exists("pid0"):
            time.sleep(0.01)
        sys.exit(5)
    time.sleep(100)
"""


@pytest.mark.launcher
def test_the_other_ranks_end_even_where_they_ignore_sigterm(launcher):
    began = time.monotonic()
    ended = launcher("-n", 2, "--timeout-grace", 0.2, launcher.write(STUBBORN))
    assert ended.code == 5
    assert time.monotonic() - began < 90, "it sleeps for 100 s if it is not killed"
    assert all(gone(int(text)) for text in launcher.wait_for("pid0", "pid1"))


CLEANING = """
    import os, sys, time
    try:
        with open(f"pid{os.environ['RANK']}", "w") as file:
            print(os.getpid(), file=file)
        time.sleep(100)
    except KeyboardInterrupt:
        print("cleaned up")
        raise
"""


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("number", "code", "out"),
    [
        (signal.SIGINT, 130, "cleaned up\n" * 2),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_signals_to_the_launcher_end_all_ranks(launcher, number, code, out):
    started = launcher.start("-n", 2, launcher.write(CLEANING))
    pids = [int(text) for text in launcher.wait_for("pid0", "pid1")]
    os.kill(started.pid, number)
    ended = started.wait()
    assert (ended.code, ended.out, ended.err) == (code, out, "")
    assert all(gone(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.launcher
def test_ctrl_c_at_a_terminal_reaches_each_rank_once(launcher):
    ours, theirs = pty.openpty()
    script = launcher.write(CLEANING.replace("print(", "time.sleep(0.2); print("))
    with subprocess.Popen(
        [sys.executable, "-m", "fnaccel", "launch", "-n", "2", script],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=launcher.folder,
        env=buffered(),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as program:
        launcher.wait_for("pid0", "pid1")
        os.write(ours, b"\x03")
        out, err = program.communicate(timeout=LIMIT)
    os.close(ours)
    os.close(theirs)
    assert (program.returncode, out, err) == (130, "cleaned up\n" * 2, "")


@pytest.mark.launcher
def test_a_second_signal_ends_ranks_at_once(launcher):
    script = launcher.write(STUBBORN.replace('== "1"', '== "none"'))
    started = launcher.start("-n", 2, "--timeout-grace", 100, script)
    pids = [int(text) for text in launcher.wait_for("pid0", "pid1")]
    os.kill(started.pid, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait().code == 143
    assert all(gone(pid) for pid in pids)


@pytest.mark.launcher
def test_an_override_that_nobody_used_is_an_error(launcher):
    ended = launcher("-n", 2, "--precision", "bf16", launcher.write("print('trained')"))
    assert (ended.code, ended.out) == (1, "trained\n" * 2)
    assert ended.err.startswith("UnusedOverrideError: the launcher was told precision='bf16'")
    assert ended.err.count("UnusedOverrideError") == 1


def test_the_cause_is_the_first_that_did_not_follow():
    saw_it_go = Failure(rank=0, code=1, when=1.0, text="closed by peer", follows=True)
    killed = Failure(rank=2, code=137, when=2.0)
    later = Failure(rank=1, code=1, when=3.0, text="ValueError")
    assert cause([saw_it_go, later, killed]) is killed
    assert cause([saw_it_go]) is saw_it_go


def test_failures_go_through_a_pipe_as_they_are():
    failure = Failure(rank=1, code=1, when=1.5, text="a\nb é", follows=True)
    assert failure.line().count(b"\n") == 1
    assert Failure.of(failure.line()) == failure


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234", True),
        ("NCCL error: ncclRemoteError: A call failed possibly due to a network error", True),
        ("boom", False),
    ],
)
def test_errors_that_follow(message, expected):
    assert follows(RuntimeError(message)) is expected


def test_a_signal_without_a_name_is_described():
    assert "was ended by signal 40" in describe(Failure(rank=0, code=168, when=0.0), Job(script="x.py"))


@pytest.mark.long
@pytest.mark.launcher
def test_a_rank_that_takes_fewer_steps_is_named(launcher):
    script = launcher.write("""
        import time, torch, fnaccel as fa
        def loss(m, b): return fa.Mean(m(b).sum(), weight=len(b))
        with fa.start(timeout=3) as world:
            step = fa.train_step(
                loss, model=fa.distribute(lambda: torch.nn.Linear(2, 1), "ddp"), optimizer=fa.sgd(0.1)
            )
            state = step.init()
            for _ in range(4 - 2 * world.rank):
                state, _ = step(state, torch.ones(3, 2))
            time.sleep(12 * world.rank)
    """)
    ended = launcher("-n", 2, script)
    assert ended.code == 1
    assert (
        "PeerLostError: rank 0 waited in call 5, train_step(state, batch) (script.py:10), "
        "for rank 1, whose newest call is call 4, train_step(state, batch)" in ended.err
    )


@pytest.mark.long
@pytest.mark.launcher
def test_a_hang_is_reported_as_the_readme_shows(launcher):
    ended = launcher("-n", 2, "--cpu", ROOT / "examples" / "by_feature" / "hang.py")
    assert ended.code == 1
    (report,) = re.findall(r"^PeerLostError: .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert report in ended.err


@pytest.mark.launcher
@pytest.mark.long_except("save_async-1")
@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("save", ["save", "save_async"])
def test_a_full_disk_is_shown_with_its_folder_and_not_its_report_on_another_rank(launcher, full, save):
    script = launcher.write("""
        import sys, time
        import torch
        from torch import nn
        import fnaccel as fa
        from fnaccel.checkpoint.disk import durable

        def loss_fn(model, batch):
            return fa.Mean(model(batch).sum(), weight=len(batch))

        def no_space(file, data):
            raise OSError(28, "No space left on device")

        full = int(sys.argv[1])
        with fa.start(device="cpu") as world:
            model = fa.distribute(lambda: nn.Linear(4, 4), "fsdp")
            train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(0.1))
            state, _ = train_step(train_step.init(), torch.ones(4, 4))
            if world.rank == full:
                durable.write = no_space
            try:
                saving = getattr(fa, sys.argv[2])("checkpoints", state)
                sys.argv[2] == "save_async" and saving.wait()
            finally:
                time.sleep(0.2 * (world.rank == full))  # the other rank reports first
    """)
    ended = launcher("-n", 2, script, full, save)
    assert ended.code == 1
    assert "CheckpointError: No space left on device (" in ended.err, ended.err
    assert str(launcher.folder / "checkpoints") in ended.err
    assert f"where: fa.{save} on rank {full}" in ended.err
    assert ended.err.count("Traceback") == 1
    assert "contextlib.py" not in ended.err
