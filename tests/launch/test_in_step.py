"""Launchers of several machines fail and start again together; here all of them are on this one."""

from __future__ import annotations

import json
import os
import signal

import pytest

from fnaccel.launch.network import free_port
from fnaccel.launch.verdict import MachineResult, decide
from tests.launch.conftest import gone
from tests.launch.test_restarts import KILL, TRAIN, WAIT

pytestmark = pytest.mark.launcher


def start(launcher, script, *arguments, restarts=2, machines=2):
    """One launcher a machine, with a rank each."""
    port = free_port()
    return [
        launcher.start(
            "-n", 1, "--cpu", "--nnodes", machines, "--node-rank", machine, "--master-addr", "127.0.0.1",
            "--master-port", port, "--max-restarts", restarts, script, *arguments,
        )
        for machine in range(machines)
    ]  # fmt: skip


def train(launcher, plan, **options):
    return start(launcher, launcher.write(TRAIN), json.dumps(plan), 6, **options)


def attempts(ended):
    return [line for line in ended.err.splitlines() if ": attempt " in line]


@pytest.mark.long
def test_a_failure_anywhere_starts_all_again(launcher):
    plan = {"0": [1, 2, KILL], "1": [0, 4, "raise ValueError('boom')"]}
    ended = [one.wait() for one in train(launcher, plan)]
    assert [one.code for one in ended] == [0, 0], ended
    for one in ended:
        assert attempts(one) == [f"fnaccel launch: attempt {n} of 3, with 2 ranks" for n in (2, 3)]
    assert "rank 1 of 2 on " in ended[1].err
    assert "SIGKILL" in ended[1].err
    assert "ValueError: boom" in ended[0].err
    size, first, losses, _ = json.loads((launcher.folder / "done.json").read_text())
    assert (size, first + len(losses)) == (2, 6)
    assert first in (3, 4)
    pids = [int(path.read_text()) for path in launcher.folder.glob("pid*")]
    assert len(pids) == 6
    assert all(gone(pid) for pid in pids)


@pytest.mark.long
def test_restarts_run_out_on_all(launcher):
    plan = {"0": [1, 1, "os._exit(5)"], "1": [1, 2, "os._exit(6)"]}
    ended = [one.wait() for one in train(launcher, plan, restarts=1, machines=3)]
    assert ended[1].code == 6
    assert all(one.code != 0 for one in ended)
    assert [len(attempts(one)) for one in ended] == [1, 1, 1]


@pytest.mark.long
def test_one_that_fails_before_the_others_have_found_it(launcher):
    script = launcher.write("""
        import os, sys, fnaccel as fa
        if os.environ["RANK"] == "0" and os.environ["FNACCEL_RESTART_COUNT"] == "0":
            sys.exit(3)
        with fa.start(device="cpu") as world:
            world.barrier()
            world.print("met")
    """)
    ended = [one.wait() for one in start(launcher, script)]
    assert [(one.code, len(attempts(one))) for one in ended] == [(0, 1)] * 2, ended
    assert ended[0].out == "met\n"


@pytest.mark.long
def test_a_signal_to_one_launcher_saves_on_all(launcher):
    started = train(launcher, {"0": [1, 2, WAIT]})
    launcher.wait_for("ready")
    os.kill(started[1].pid, signal.SIGTERM)
    ended = [one.wait() for one in started]
    assert [one.code for one in ended] == [75, 75], ended
    assert all("preempted: stopped after step 3" in one.err for one in ended)
    assert not any(attempts(one) for one in ended)


@pytest.mark.long
@pytest.mark.parametrize("machine", [0, 1])
def test_a_launcher_that_goes_ends_the_job(launcher, machine):
    started = train(launcher, {"0": [0, 2, WAIT]})
    launcher.wait_for("ready")
    os.kill(started[machine].pid, signal.SIGKILL)
    ended = started[1 - machine].wait()
    assert ended.code != 0
    assert not attempts(ended)
    assert all(gone(int(path.read_text())) for path in launcher.folder.glob("pid*"))


def test_different_commands_are_an_error(launcher):
    script = launcher.write("print('ran')")
    port = free_port()
    flags = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port)
    one = launcher.start("-n", 1, *flags, "--node-rank", 0, "--max-restarts", 1, script)
    two = launcher.start("-n", 2, *flags, "--node-rank", 1, "--max-restarts", 1, script)
    ended = one.wait(), two.wait()
    assert [each.code != 0 for each in ended] == [True, True]
    assert "start the same command on every machine" in ended[0].err
    assert ended[0].out == ended[1].out == ""


def result(code, **more):
    return MachineResult(code=code, failed=code not in (0, 75), **more)


@pytest.mark.parametrize(
    ("results", "more", "again", "code"),
    [
        ([result(0), result(0)], True, False, 0),
        ([result(0), result(1)], True, True, 0),
        ([result(0), result(1)], False, False, 1),
        ([result(1, follows=True), result(137)], False, False, 137),
        ([result(7, order=2), result(8, order=1)], False, False, 8),
        ([result(1, lost=True), result(8, order=1)], False, False, 8),
        ([result(75), result(1, follows=True)], True, False, 75),
        ([result(75), result(137)], True, True, 0),
        ([result(1, told=True), result(1)], True, False, 1),
        ([result(1, follows=True), MachineResult(code=143, told=True)], True, False, 143),
        ([MachineResult(code=143, told=True)], True, False, 143),
        ([MachineResult(code=75, stopped=True), MachineResult(stopped=True)], False, True, 0),
        ([MachineResult(code=75, stopped=True), result(1, follows=True)], False, True, 0),
        ([MachineResult(code=75, stopped=True, told=True)], True, False, 75),
    ],
)
def test_what_follows(results, more, again, code):
    decision = decide(results, more=more)
    assert (decision.again, decision.code) == (again, code)


def test_a_machine_that_joins_uses_up_no_restart():
    assert not decide([MachineResult(stopped=True)], more=True).counted
    assert decide([MachineResult(stopped=True), result(1)], more=True).counted
    assert not decide([MachineResult(stopped=True), result(1)], more=False).again


AGAIN = """
    import torch
    import torch.distributed.nn.functional as functional
    from torch import nn
    import fnaccel as fa

    def loss_fn(model, x):
        return fa.Mean(model(x).square().sum(), weight=len(x))

    kept = []
    for number in range(3):
        with fa.start() as world:
            model = fa.distribute(lambda: nn.Linear(2, 2), "fsdp" if number else "ddp")
            train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(0.1))
            state, metrics = train_step(train_step.init(), torch.ones(1, 2))
            kept.append((train_step, state))
            ranks = functional.all_reduce(torch.ones(()))
            world.print(number, int(ranks), float(metrics["loss"]), flush=True)
"""


def test_worlds_of_one_job_follow_each_other(launcher):
    """The first one's port stayed taken: torch.distributed.nn and a train step that is kept held its groups."""
    ended = launcher("-n", "2", "--cpu", launcher.write(AGAIN))
    assert ended.code == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    assert [line[:2] for line in lines] == [["0", "2"], ["1", "2"], ["2", "2"]]
    assert len({line[2] for line in lines}) == 1
