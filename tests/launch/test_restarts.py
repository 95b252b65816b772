"""Ranks that fail are started again; ranks that were asked to stop have saved, and are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from fnaccel.launch.failure import Failure
from fnaccel.launch.job import Job
from fnaccel.launch.watch import Watch
from tests.launch.conftest import LIMIT, Launcher, buffered, gone

pytestmark = pytest.mark.launcher

TRAIN = """
    import json, os, signal, sys, time
    import torch, fnaccel as fa
    from torch.utils.data import DataLoader, TensorDataset

    attempt = int(os.environ.get("FNACCEL_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    plan = json.loads(sys.argv[1])  # attempt -> [rank, step, what]
    steps = int(sys.argv[2])

    def loss(m, b): return fa.Mean((m(b[0]) - b[1]).square().sum(), weight=len(b[0]))

    made = torch.Generator().manual_seed(0)
    x = torch.randn(96, 3, generator=made)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    with fa.start(device="cpu") as world:
        with open(f"pid{world.rank}.{attempt}", "w") as file:
            file.write(str(os.getpid()))
        step = fa.train_step(
            loss, model=fa.distribute(lambda: torch.nn.Linear(3, 1), "ddp"), optimizer=fa.adamw(0.1)
        )
        state = fa.resume_or_init("run", step, seed=1)
        first, losses = state.step, []
        for state, metrics in fa.scan(step, state, fa.shard(loader), steps=steps, save=fa.Autosave("run", every=1)):
            losses.append(metrics["loss"].item())
            rank, at, what = plan.get(str(attempt), (None, None, None))
            if world.rank == rank and state.step == at:
                exec(what)
        if world.is_main:
            with open("done.json", "w") as file:
                json.dump([world.size, first, losses, state.params["weight"].tolist()], file)
"""
KILL = "os.kill(os.getpid(), 9)"
WAIT = """
open('ready', 'w').write('x')
while not step.notice.asked: time.sleep(0.01)
"""


def run(launcher, plan, *flags, ranks=2, steps=6):
    script = launcher.write(TRAIN)
    (launcher.folder / "done.json").unlink(missing_ok=True)
    ended = launcher("-n", ranks, "--cpu", *flags, script, json.dumps(plan), steps)
    path = launcher.folder / "done.json"
    return ended, json.loads(path.read_text()) if path.exists() else None


@pytest.fixture(scope="module")
def undisturbed(preloaded, tmp_path_factory):
    """What a run without a fault writes: ranks, the first step, losses, the weight."""
    ended, done = run(Launcher(preloaded, tmp_path_factory.mktemp("undisturbed")), {})
    assert ended.code == 0, ended.err
    return done


@pytest.mark.long
def test_after_a_kill_the_ranks_go_on_where_they_were(launcher, undisturbed):
    ended, done = run(launcher, {"0": [1, 2, KILL], "1": [0, 4, KILL]}, "--max-restarts", 3)
    assert ended.code == 0, ended.err
    assert "rank 1 of 2 on " in ended.err
    assert "rank 0 of 2 on " in ended.err
    lines = [line for line in ended.err.splitlines() if line.startswith("fnaccel launch: ")]
    assert lines == [f"fnaccel launch: attempt {n} of 4, with 2 ranks" for n in (2, 3)]
    assert "Traceback" not in ended.err
    size, first, losses, weight = done
    assert (size, weight) == (2, undisturbed[3]), "the same bits"
    assert first in (3, 4)  # rank 0 may have saved the step in which it was killed, or not
    assert losses == undisturbed[2][first:]
    pids = [path.read_text() for path in launcher.folder.glob("pid*")]
    assert len(pids) == 8 or len(pids) == 6
    assert all(gone(int(pid)) for pid in pids)
    assert not list((launcher.folder / "run").glob(".saving*"))


@pytest.mark.long
def test_an_error_too_and_the_last_code_counts_when_restarts_run_out(launcher):
    plan = {"0": [1, 1, "raise ValueError('boom')"], "1": [0, 2, "os._exit(7)"]}
    ended, done = run(launcher, plan, "--max-restarts", 1)
    assert (ended.code, done) == (7, None)
    assert ended.err.count("ValueError: boom") == 1
    assert ended.err.count("attempt 2 of 2") == 1
    assert "ended with exit code 7" in ended.err
    assert run(launcher, {"0": [1, 3, "sys.exit(5)"]})[0].code == 5, "none where none was asked for"


@pytest.mark.long
def test_a_run_goes_on_with_fewer_ranks(launcher, undisturbed):
    plan = {"0": [2, 2, KILL], "1": [0, 3, KILL], "2": [0, 4, KILL]}
    flags = ["--max-restarts", 5, "--min-ranks", 1]
    ended, done = run(launcher, plan, *flags, ranks=3)
    assert ended.code == 0, ended.err
    assert [line[-7:] for line in ended.err.splitlines() if "attempt" in line] == [
        "2 ranks",
        " 1 rank",
        " 1 rank",
    ]
    size, first, losses, weight = done
    assert size == 1
    assert losses == pytest.approx(undisturbed[2][first:], rel=1e-6, abs=1e-6)
    assert weight[0] == pytest.approx(undisturbed[3][0], rel=1e-6, abs=1e-6)


@pytest.mark.long
def test_an_error_leaves_no_rank_out(launcher):
    plan = {"0": [1, 2, "1 / 0"]}
    ended, done = run(launcher, plan, "--max-restarts", 1, "--min-ranks", 1)
    assert (ended.code, done[0]) == (0, 2), ended.err


@pytest.mark.long
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 1)])
def test_a_signal_to_the_launcher_saves_and_ends_with_75(launcher, undisturbed, number, ranks):
    script = launcher.write(TRAIN)
    plan = {"0": [0, 2, WAIT]}
    arguments = ("-n", ranks, "--cpu", "--max-restarts", 3, script, json.dumps(plan), 6)
    started = launcher.start(*arguments)
    launcher.wait_for("ready")
    os.kill(started.pid, number)
    ended = started.wait()
    assert ended.code == 75, ended.err
    saved = launcher.folder / "run/step-0000000003"
    expected = f"fnaccel launch: preempted: stopped after step 3, saved {saved}; start it again to go on\n"
    assert ended.err == expected
    assert [path.name for path in sorted((launcher.folder / "run").iterdir())][-1] == saved.name
    ended, done = run(launcher, {}, ranks=ranks)
    assert ended.code == 0, ended.err
    assert done[1] == 3
    assert done[2] == pytest.approx(undisturbed[2][3:], rel=1e-6, abs=1e-6)


@pytest.mark.long
def test_a_signal_to_one_rank_ends_all_with_75(launcher):
    ended, done = run(launcher, {"0": [1, 2, "os.kill(os.getpid(), 10)"]}, "--max-restarts", 3)
    assert (ended.code, done) == (75, None)
    assert ended.err.count("\n") == 1
    assert "stopped after step 3" in ended.err


def test_a_script_of_its_own_may_end_with_75(launcher):
    ended = launcher("-n", 2, "--max-restarts", 3, launcher.write("import sys; sys.exit(75)"))
    assert ended.code == 75
    assert ended.err == "fnaccel launch: preempted: a rank ended with exit code 75; start it again to go on\n"


@pytest.mark.long
def test_without_a_launcher_the_process_ends_with_75_too(launcher):
    script = launcher.write(TRAIN)
    plan = json.dumps({"0": [0, 2, "os.kill(os.getpid(), 15)"]})
    ended = subprocess.run(
        [sys.executable, script, plan, "9"],
        capture_output=True, text=True, cwd=launcher.folder, env=buffered(), check=False, timeout=LIMIT,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, "", "")


def test_what_was_told_to_end_is_not_started_again(launcher):
    script = launcher.write("""
        import os, time
        with open(f"pid{os.environ['RANK']}", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(100)
    """)
    for number, code in ((signal.SIGUSR1, 138), (signal.SIGTERM, 143)):
        started = launcher.start("-n", 2, "--max-restarts", 3, script)
        pids = [int(text) for text in launcher.wait_for("pid0", "pid1")]
        os.kill(started.pid, number)
        ended = started.wait()
        assert (ended.code, "attempt" in ended.err) == (code, False), ended.err
        assert all(gone(pid) for pid in pids)
        for rank in range(2):
            (launcher.folder / f"pid{rank}").unlink()


def failed(rank, code, **more):
    return Failure(rank=rank, code=code, when=float(rank), **more)


def watched(*failures):
    watch = Watch(Job(script="x.py", ranks=3), [], -1)
    for one in failures:
        watch._note(one)
    return watch._outcome()


def test_one_that_has_saved_says_it_for_those_that_looked_for_it():
    saved, lost = failed(0, 75, text="saved"), failed(1, 1, follows=True)
    for order in ((saved, lost), (lost, saved)):
        outcome = watched(*order)
        assert (outcome.code, outcome.preempted, outcome.failure) == (75, "saved", None)
    outcome = watched(saved, failed(1, 137, killed=True))
    assert (outcome.code, outcome.killed) == (137, 1)


def test_aborts_are_not_kills():
    """NCCL aborts the ranks that are left."""
    assert [Failure.ended(0, status).killed for status in (9, 6, 11, 7 << 8)] == [True, False, True, False]
    assert Failure.ended(0, 0) is None


@pytest.mark.long
def test_torchruns_restarts(launcher):
    script = launcher.write(TRAIN)
    plan = json.dumps({"0": [1, 2, KILL]})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    ended = subprocess.run(
        [*command, "--monitor-interval", "0.1", script, plan, "5"],
        capture_output=True, text=True, cwd=launcher.folder, env=buffered(), check=False, timeout=LIMIT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads((launcher.folder / "done.json").read_text())[0] == 2
    assert len(list(launcher.folder.glob("pid*.1"))) == 2
