"""Ranks that do not make the same calls: each fault that is certain ends with an error that names both calls.

No time is asserted. A rank that waits for its process group's timeout (600 s) is killed by `run_ranks`, and
counts as hung.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fnaccel as fa
from fnaccel import _torch
from fnaccel.errors import WorldError
from fnaccel.launch import watch
from fnaccel.launch.job import Job
from fnaccel.launch.supervise import launch
from fnaccel.world import joining, record_board, watcher
from fnaccel.world.connections import listening_ports
from fnaccel.world.world import current
from tests.faulty import run_ranks, train

pytestmark = pytest.mark.launcher
STEP = "train_step(state, batch)"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Ranks are forks: they inherit these."""
    monkeypatch.setattr(watcher, "INTERVAL", 0.2)
    monkeypatch.setattr(watcher, "PATIENCE", 0.5)


@pytest.fixture
def run(tmp_path):
    return lambda program, *arguments: run_ranks(program, *arguments, folder=tmp_path)


def waits(outcome, rank, *parts):
    """See that a rank raised PeerLostError, and that it names another rank and these calls."""
    assert outcome.error == "PeerLostError", outcome
    assert re.search(rf"\brank {rank}\b", outcome.what), outcome
    assert not [part for part in parts if part not in outcome.what], outcome
    assert "\n  where: " in outcome.what
    assert "\n  fix: " in outcome.what


@pytest.mark.parametrize(
    ("faulty", "name", "error", "reason"),
    [
        (
            0,
            "leaves its loop early",
            "returned",
            f"left the world, after call 5, {STEP}",
        ),  # it keeps the store
        (1, "leaves its loop early", "returned", f"left the world, after call 5, {STEP}"),
        (1, "closes the world early", "returned", "left the world, after call 5"),
        (
            0,
            "raises in the loss",
            "ValueError",
            "which raised ValueError in it: boom in the loss",
        ),
        (1, "sys.exit(0)", "SystemExit", "ended with exit code 0, after call 5"),
    ],
)
def test_a_rank_that_leaves_is_named(run, tmp_path, faulty, name, error, reason):
    outcomes = run(train, [faulty], name, tmp_path, "ddp")
    assert outcomes[faulty].error == error
    for outcome in outcomes:
        if outcome.rank != faulty:
            waits(outcome, faulty, STEP, reason)


@pytest.mark.parametrize("name", ["leaves a step out", "takes a step more"])
def test_a_rank_whose_batch_is_another_ends_all_with_the_positions(run, tmp_path, name):
    outcomes = run(train, [1], name, tmp_path, "ddp")
    for outcome in outcomes:
        assert outcome.error == "RankMismatchError", outcome
        assert re.search(r"rank 0 is at .*; rank 1 is at ", outcome.what), outcome


@pytest.mark.long_except(r"ddp-saves|1-fsdp-gathers")
@pytest.mark.parametrize(
    ("faulty", "strategy", "name", "call"),
    [
        ([1], "ddp", "gathers, the others step", "fa.gather"),
        ([0, 2], "ddp", "gathers, the others step", "fa.gather"),
        ([1], "ddp", "saves, the others step", "fa.save"),
        ([0, 2], "ddp", "evaluates, the others step", "fa.evaluate"),
        ([1], "ddp", "builds a second train step, the others step", "fa.train_step"),
        ([0, 2], "fsdp", "builds a second train step, the others step", "fa.train_step"),
        # messages of other lengths in one process group would abort the ranks
        ([1], "fsdp", "gathers, the others step", "fa.gather"),
        ([0, 2], "fsdp", "saves, the others step", "fa.save"),
        ([1], "fsdp", "evaluates, the others step", "fa.evaluate"),
        ([0, 2], "fsdp", "looks, the others step", "train_step.look(state, fn)"),
        ([1], "fsdp", "restores, the others step", "fa.restore"),
    ],
)
def test_ranks_in_different_calls(run, tmp_path, strategy, name, call, faulty):
    outcomes = run(train, faulty, name, tmp_path, strategy)
    for outcome in outcomes:
        other = next(rank for rank in range(3) if (rank in faulty) != (outcome.rank in faulty))
        assert outcome.error == "PeerLostError", outcome
        assert "ranks make different calls: call 6 of this world is " in outcome.what
        assert f"{call} (faulty.py:" in outcome.what
        assert f"{STEP} (faulty.py:" in outcome.what
        assert f"rank {outcome.rank}" in outcome.what
        assert any(f"rank {rank}" in outcome.what for rank in {other, *range(3)} - {outcome.rank})


def test_objects_of_a_save_are_not_taken_for_others(run, tmp_path):
    outcomes = run(train, [1], "gathers objects, the others save", tmp_path, "ddp")
    assert [outcome.error for outcome in outcomes] == ["RankMismatchError"] * 3, outcomes
    assert (
        "gather_objects(in fa.save) on ranks 0 and 2, fa.collectives.gather_objects() on rank 1"
        in outcomes[0].what
    )


def test_a_rank_that_is_killed_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "ANSWER", 1.0)
    outcomes = run(train, [1], "kill -9", tmp_path, "ddp")
    assert outcomes[1].error == "ended with -9"
    for outcome in (outcomes[0], outcomes[2]):
        waits(outcome, 1, f"call 6, {STEP}", "no answer, so it exited, was killed or is cut off")


def ends_before_the_first_call():
    fa.start(device="cpu")
    if current().rank == 1:
        sys.exit(0)
    fa.gather(torch.ones(1))


def wait_for_each_other():
    """Rank 0, which keeps the store, dies; the others wait in a connection in which it has no part."""
    with fa.start(device="cpu") as world:
        if world.rank == 0:
            time.sleep(0.5)
            os._exit(0)
        assert world.calls is not None
        world.calls.run("a call", dist.recv, torch.zeros(1), src=3 - world.rank)


@pytest.mark.long
def test_ranks_that_wait_for_each_other_do_not_outlive_the_store(run, monkeypatch):
    monkeypatch.setattr(watcher, "DEPARTURE", 1.0)
    for outcome in run(wait_for_each_other)[1:]:
        waits(outcome, 0, "call 1, a call", "keeps the store")


def test_a_rank_that_exits_before_its_first_call(run):
    outcomes = run(ends_before_the_first_call)
    for outcome in (outcomes[0], outcomes[2]):
        waits(outcome, 1, "fa.gather (test_uneven.py:", "exited, before its first call")


def comes_after_the_others_have_raised():
    """Rank 1 exits, rank 0 raises because of it and exits too. Then rank 2 comes."""
    fa.start(device="cpu")
    if current().rank == 1:
        sys.exit(0)
    time.sleep(2.0 * (current().rank == 2))
    fa.gather(torch.ones(1))


@pytest.mark.long
def test_a_rank_that_exits_because_of_another_one_is_not_to_blame(run):
    outcomes = run(comes_after_the_others_have_raised)
    for outcome in (outcomes[0], outcomes[2]):
        waits(outcome, 1, "fa.gather (test_uneven.py:", "exited, before its first call")


def late():
    """Ranks that are slow, each in another place, and do nothing wrong."""
    with fa.start(device="cpu") as world:
        fa.gather(torch.ones(1))
        if world.rank == 0:
            time.sleep(1.0)
        world.barrier()
        if world.rank == 1:
            time.sleep(1.0)  # the others wait in a clean end
        total = fa.reduce(torch.ones(1))
        if world.rank == 2:
            time.sleep(0.75)
    return total


@pytest.mark.long
def test_a_slow_rank_is_no_fault(run, monkeypatch):
    monkeypatch.setattr(watcher, "INTERVAL", 0.1)
    monkeypatch.setattr(watcher, "PATIENCE", 0.25)
    monkeypatch.setattr(record_board, "DEPARTURE", 0.25)
    assert [outcome.error for outcome in run(late)] == ["returned"] * 3


def watchers():
    """How many threads of fnaccel run in this rank: before a save or a tracker begins, those that watch."""
    return sum(thread.name.startswith("fnaccel") for thread in threading.enumerate())


def leaves_no_thread():
    before = listening_ports()  # what the fork has inherited
    with fa.start(device="cpu") as world:
        world.barrier()
        assert watchers() == 1
    assert watchers() == 0
    assert listening_ports() == before
    with fa.start(device="cpu") as world:  # and it can begin again
        world.barrier()


def test_nothing_is_left_of_a_world(run):
    outcomes = run(leaves_no_thread)
    assert [outcome.error for outcome in outcomes] == ["returned"] * 3, outcomes


def begins_again_at_once():
    """Rank 0, which keeps the store, is slow to end; the others are at its port again by then."""
    end_groups = _torch.end_groups

    def slowly():
        time.sleep(0.3)
        end_groups()

    for _ in range(2):
        with fa.start(device="cpu") as world:
            world.barrier()
            _torch.end_groups = slowly if world.rank == 0 else end_groups


@pytest.mark.long
def test_a_world_that_begins_again_at_once_does_not_meet_in_the_old_store(run):
    outcomes = run(begins_again_at_once)
    assert [outcome.error for outcome in outcomes] == ["returned"] * 3, outcomes


def test_one_rank_has_no_log_and_no_thread():
    before = watchers()
    with fa.start(device="cpu") as world:
        assert world.calls is None
        assert watchers() == before


def copies_of_connections():
    """A forked process holds copies of this rank's connections: closing them here closes nothing."""
    with fa.start(device="cpu") as world:
        world.barrier()
        if world.rank == 1:
            child = os.fork()
            if child == 0:
                for path in list(
                    Path("/proc/self/fd").iterdir()
                ):  # the parent waits for the end of its pipes
                    with contextlib.suppress(OSError):
                        if str(path.readlink()).startswith("pipe:"):
                            os.close(int(path.name))
                time.sleep(30)
                os._exit(0)
            return
        world.barrier()


def test_a_rank_with_forked_workers_leaves(run):
    outcomes = run(copies_of_connections)
    assert outcomes[1].error == "returned"
    for outcome in (outcomes[0], outcomes[2]):
        waits(outcome, 1, "world.barrier", "left the world, after call 1")


def asks_after_its_world(folder):
    """A loop whose iterator outlives the world asks after it has been left."""
    with fa.start(device="cpu") as world:
        world.barrier()
    Path(folder, f"late{world.rank}").write_text(str(world.all_come(0.1)))


def test_no_rank_comes_after_its_world(run, tmp_path):
    outcomes = run(asks_after_its_world, str(tmp_path))
    assert {outcome.error for outcome in outcomes} == {"returned"}
    assert {path.read_text() for path in tmp_path.glob("late*")} == {"False"}


def sockets_of_a_worker(folder):
    """What connections a forked process holds: a rank that is killed is seen to go while its workers live."""
    with fa.start(device="cpu") as world:
        world.barrier()
        child = os.fork()
        if child == 0:
            connected = []
            for path in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if connection.family is not socket.AF_UNIX:  # those are the test's own
                        connected.append(connection.getpeername()[1])
            store = int(os.environ["MASTER_PORT"])
            others = [port for port in connected if port != store]
            Path(folder, f"worker{world.rank}").write_text(repr(others))
            os._exit(0)
        os.waitpid(child, 0)
        world.barrier()  # the parent's connections are as they were


def test_a_forked_worker_lets_go_of_the_connections(run, tmp_path):
    outcomes = run(sockets_of_a_worker, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["returned"] * 3, outcomes
    assert [(tmp_path / f"worker{rank}").read_text() for rank in (1, 2)] == ["[]"] * 2


def comes_late(absent):
    if int(os.environ["RANK"]) != absent:
        fa.start(device="cpu", timeout=2.0)


@pytest.mark.long
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named(run, absent):
    outcomes = run(comes_late, absent)
    for outcome in outcomes:
        if outcome.rank != absent:
            assert outcome.error == "WorldError"
            assert f"rank {absent} did not come to fa.start within 2 s" in outcome.what


def ends_in_the_middle(ends, absent):
    rank = int(os.environ["RANK"])
    if rank == absent:
        return
    if rank == ends:
        owner, name = (joining.dist, "init_process_group") if absent is None else (joining, "_wait_for_all")
        setattr(owner, name, lambda *_, **__: (time.sleep(2.5), os._exit(0)))
    fa.start(device="cpu", timeout=6.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ends", "absent", "what"),
    [
        (0, 2, "rank 0, or the launcher, which keeps the store at .*, has ended, and rank 2 had not come"),
        (2, None, "fix: a rank that came to fa.start has ended, or was stopped: see its output"),
    ],
)
def test_a_rank_that_ends_while_ranks_join(run, ends, absent, what):
    outcomes = [each for each in run(ends_in_the_middle, ends, absent) if each.rank not in (ends, absent)]
    assert outcomes
    for outcome in outcomes:
        assert outcome.error == "WorldError"
        assert re.search(what, outcome.what)


def test_a_port_that_says_nothing(monkeypatch):
    monkeypatch.setattr(joining, "GRACE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for name, value in {
            "RANK": 1,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(WorldError, match=f"127.0.0.1:{port} did not answer within 0.2 s"):
            fa.start(device="cpu", timeout=0.2)


def waits_in_a_group_of_two():
    with fa.start(device="cpu", timeout=1.5) as world:
        group = dist.new_subgroups_by_enumeration([[0, 1], [2]])[0]
        loss = lambda model, batch: model(batch).sum()  # noqa: E731
        fa.train_step(loss, model=fa.distribute(lambda: nn.Linear(2, 1), "ddp"), optimizer=fa.sgd(0.1)).init()
        if world.rank == 0:
            with pytest.raises(RuntimeError, match="Timed out waiting 1500ms"):
                dist.all_reduce(torch.ones(1), group=group)
        time.sleep(3 * (world.rank != 0))


@pytest.mark.long
def test_a_group_of_some_ranks_has_the_limit_of_all(run):
    assert run(waits_in_a_group_of_two)[0].error == "returned"


@pytest.mark.long
@pytest.mark.parametrize("early", [0, 1])
def test_the_launcher_names_a_rank_that_exits_before_start(launcher, early):
    script = launcher.write(f"""
        import os, sys, fnaccel as fa
        if os.environ["RANK"] == "{early}":
            sys.exit(0)
        with fa.start(device="cpu") as world:
            world.barrier()
    """)
    ended = launcher("-n", 3, script)
    assert ended.code == 1
    assert ended.err.startswith(f"LaunchError: rank {early} exited with code 0 before fa.start, where rank")
    assert "\n  where: fnaccel launch script.py\n  fix: " in ended.err
    assert "Traceback" not in ended.err


def launched(script, err):
    """The launcher itself in a fork of this process, which has the patches of a test."""
    os.chdir(Path(script).parent)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w")
    os._exit(launch(Job(script=script, ranks=3, cpu=True)))


@pytest.mark.long
def test_the_launcher_names_a_rank_that_sleeps(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "NOTICE", 0.2)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time, fnaccel as fa\n"
        "time.sleep(2 * (os.environ['RANK'] == '1'))\n"
        "with fa.start() as world: world.barrier()\n"
    )
    err = tmp_path / "err"
    process = multiprocessing.get_context("fork").Process(target=launched, args=(str(script), str(err)))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert err.read_text().startswith("fnaccel launch: rank")
    assert re.search(r"in fa.start for rank 1, for 0.2 s by now\n", err.read_text())


def test_scripts_without_start_may_end_when_they_like(launcher):
    script = launcher.write("import os, time; time.sleep(0.3 * int(os.environ['RANK']))")
    ended = launcher("-n", 2, script)
    assert (ended.code, ended.err) == (0, "")


LISTENS = """
    import os, fnaccel as fa
    with fa.start(device="cpu") as world:
        world.barrier()
        inodes = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                inodes.add(os.readlink(f"/proc/self/fd/{name}").strip("socket:[]"))
            except OSError:
                pass
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in open(table).readlines()[1:] if os.path.exists(table) else []:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    print(world.rank, fields[1].split(":")[0], flush=True)
        world.barrier()
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_ranks_of_one_machine_listen_on_the_loopback_only(launcher):
    ended = launcher("-n", 2, launcher.write(LISTENS))
    assert ended.code == 0, ended.err
    listening = [line.split() for line in ended.out.splitlines()]
    assert [rank for rank, _ in listening].count("0") == [rank for rank, _ in listening].count("1") + 1, (
        "the store"
    )
    assert {address for _, address in listening} <= LOOPBACK
