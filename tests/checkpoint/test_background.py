"""`save_async`, and which checkpoints stay: the state may go on, failures are told once, and nothing is lost."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading

import pytest
import torch

from fnaccel.checkpoint import checkpoints, latest, restore, save, save_async
from fnaccel.checkpoint.disk import durable
from fnaccel.checkpoint.disk import publish as commit
from fnaccel.errors import ArgumentError, CheckpointError, NotSerializableError
from fnaccel.world.world import current, start
from tests.checkpoint.training import gathered, make, train, unequal


def goes_on(layout, directory):
    """Training donates the state while it is written; what is found is the state at the call."""
    step = make(layout)
    state = train(step, step.init(seed=1), 0, 1)
    for number in range(1, 4):
        wanted = gathered(state)
        saving = save_async(directory, state, metadata={"number": number})
        state = train(step, state, number, 1)
        path = saving.wait()
        assert saving.done
        assert path == directory / f"step-{number:010d}"
        found = restore(directory, like=make(layout).init(seed=9), verify=True)
        wrong = unequal(gathered(found), wanted)
        assert [path for path in wrong if current().is_main or not path.startswith("buffers/")] == []
    return [one.step for one in checkpoints(directory)]


@pytest.mark.parametrize("layout", [("local()", 1), ("ddp()", 2), ("fsdp()", 3)], ids=str)
def test_training_goes_on(pools, tmp_path, layout):
    assert pools.run(layout[1], goes_on, layout[0], tmp_path) == [[1, 2, 3]] * layout[1]


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def fails_on_one(directory, then):
    """Rank 1's disk is full: every rank hears of it, once, at its next call."""
    world = current()
    mine = {"x": torch.arange(4.0) + world.rank}
    save(directory, mine, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("fnaccel.checkpoint.writing.Writing._write", full)
        saving = save_async(directory, mine, step=2)
        while not saving.done:
            saving._thread.join(1)
    calls = {
        "save": lambda: save(directory, mine, step=3),
        "save_async": lambda: save_async(directory, mine, step=3),
        "restore": lambda: restore(directory, like=mine),
        "wait": saving.wait,
    }
    if then == "one rank waits":  # what one rank was told, all are told at the next call
        if world.rank == 0:
            with pytest.raises(CheckpointError, match="No space left"):
                saving.wait()
        then = "save"
    with pytest.raises(CheckpointError, match="No space left"):
        calls[then]()
    assert [one.step for one in checkpoints(directory)] == [1]
    world.barrier()  # rank 0 has cleaned up
    assert [path.name for path in directory.iterdir()] == ["step-0000000001"]
    world.barrier()
    save_async(directory, mine, step=4).wait()
    return True


@pytest.mark.parametrize("then", ["save", "save_async", "restore", "wait", "one rank waits"])
def test_a_failure_is_told_on_every_rank(pools, tmp_path, then):
    assert pools.run(2, fails_on_one, tmp_path, then) == [True, True]


def leaves_the_world(directory, mistake=None):
    with start(device="cpu"):
        save_async(directory, {"x": torch.ones(1)})
        if mistake is not None:
            raise mistake


def test_a_failure_is_told_when_the_world_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(durable, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        leaves_the_world(tmp_path)
    assert latest(tmp_path) is None
    # an error of the script's own is not hidden by it
    with pytest.raises(ZeroDivisionError):
        leaves_the_world(tmp_path, ZeroDivisionError())
    assert "CheckpointError: No space left" in capsys.readouterr().err


@pytest.mark.long
def test_a_failure_is_told_as_a_script_ends(tmp_path):
    script = (
        "import sys, torch, fnaccel as fa\n"
        "from fnaccel.checkpoint.disk import durable\n"
        "def full(*args): raise OSError(28, 'No space left on device')\n"
        "fa.start(device='cpu')\n"
        "fa.save_async(sys.argv[1], {'x': torch.ones(1)}, step=1).wait()\n"
        "durable.write = full\n"
        "fa.save_async(sys.argv[1], {'x': torch.ones(1)}, step=2)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert "CheckpointError: No space left on device" in run.stderr
    assert [one.step for one in checkpoints(tmp_path)] == [1]


def test_a_save_is_whole_if_no_thread_can_be_started(tmp_path, monkeypatch):
    """As Python 3.12 starts none once a script has ended, while a save is under way."""
    refused = []
    begin = threading.Thread.start

    def start_thread(self):
        if self.name == "fnaccel-behind":
            refused.append(self)
            raise RuntimeError("can't create new thread at interpreter shutdown")
        begin(self)

    monkeypatch.setattr(threading.Thread, "start", start_thread)
    with start(device="cpu"):
        value = {"x": torch.arange(300_000.0), "y": torch.ones(3)}
        save_async(tmp_path, value, step=1).wait()
        found = restore(tmp_path, like={"x": torch.zeros(300_000), "y": torch.zeros(3)})
        assert all(torch.equal(found[name], value[name]) for name in value)
    assert refused


def test_what_is_wrong_with_the_call_raises_in_the_call(tmp_path):
    with start(device="cpu"):
        with pytest.raises(NotSerializableError):
            save_async(tmp_path, {"f": print})
        with pytest.raises(ArgumentError):
            save_async(tmp_path, {}, step=-1)
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="Not a directory"):
            save_async(tmp_path / "file", {})


def test_the_script_may_change_its_directory(tmp_path, monkeypatch):
    """A relative path means the directory of the call, also if the thread comes later."""
    gate, real = threading.Event(), durable.sync
    (tmp_path / "first" / "relative").mkdir(parents=True)
    (tmp_path / "second").mkdir()
    with start(device="cpu"):
        monkeypatch.chdir(tmp_path / "first")
        monkeypatch.setattr(durable, "sync", lambda file: (gate.wait(60), real(file)))
        saving = save_async("relative", {"x": torch.ones(1)}, step=1)
        monkeypatch.chdir(tmp_path / "second")
        gate.set()
        assert saving.wait() == tmp_path / "first" / "relative" / "step-0000000001"
        assert restore(saving.wait(), like={"x": torch.zeros(1)})["x"].all()
    assert [path.name for path in tmp_path.rglob("manifest.json")] == ["manifest.json"]
    assert not any((tmp_path / "second").iterdir())


def test_one_at_a_time(tmp_path, monkeypatch):
    """The second call waits for the first, and both are there."""
    gate, real = threading.Event(), durable.sync
    order = []

    def slow(file):
        gate.wait(60)
        order.append("written")
        return real(file)

    with start(device="cpu"):
        monkeypatch.setattr(durable, "sync", slow)
        save_async(tmp_path, {"x": torch.ones(1)}, step=1)
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        second = save_async(tmp_path, {"x": torch.ones(1)}, step=2)
        assert "written" in order
        second.wait()
    assert [one.step for one in checkpoints(tmp_path)] == [1, 2]


def test_a_run_that_begins_again_waits_for_what_is_under_way(tmp_path, monkeypatch):
    from fnaccel.checkpoint import resume_or_init

    real = durable.sync
    with start(device="cpu"):
        step = make("local()")
        state = train(step, step.init(seed=1), 0, 2)
        monkeypatch.setattr(durable, "sync", lambda file: (threading.Event().wait(0.1), real(file)))
        save_async(tmp_path, state)
        assert resume_or_init(tmp_path, make("local()")).step == 2


def steps(directory):
    return [one.step for one in checkpoints(directory)]


def test_retention(tmp_path):
    with start(device="cpu"):
        for step in range(1, 8):
            save(tmp_path, {"n": step}, step=step, keep=2, keep_every=3)
        assert steps(tmp_path) == [3, 6, 7]
        # a run that went back keeps its own, and without keep= nothing goes
        save(tmp_path, {"n": 4}, step=4, keep=1)
        assert steps(tmp_path) == [4, 6, 7]
        save(tmp_path, {"n": 5}, step=5)
        assert steps(tmp_path) == [4, 5, 6, 7]
        save_async(tmp_path, {"n": 8}, step=8, keep=1).wait()
        assert steps(tmp_path) == [8]
        for options in ({"keep": 0}, {"keep": True}, {"keep_every": 2}, {"keep": 1, "keep_every": -1}):
            with pytest.raises(ArgumentError, match="keep"):
                save(tmp_path, {}, step=9, **options)
        assert steps(tmp_path) == [8]


def test_a_checkpoint_that_is_read_stays_until_it_was(tmp_path):
    with start(device="cpu"):
        save(tmp_path, {"n": 1}, step=1)
        with commit.held(latest(tmp_path)):
            save(tmp_path, {"n": 2}, step=2, keep=1)
            assert steps(tmp_path) == [1, 2]
        save(tmp_path, {"n": 3}, step=3, keep=1)
        assert steps(tmp_path) == [3]


def test_a_child_that_is_forked_meanwhile_holds_nothing(tmp_path):
    import multiprocessing

    with start(device="cpu"):
        save(tmp_path, {"n": 1}, step=1)
        with commit.held(latest(tmp_path)):
            fork = multiprocessing.get_context("fork")
            runs = fork.Event()
            child = fork.Process(target=lambda: (runs.set(), threading.Event().wait()), daemon=True)
            child.start()
            runs.wait()
        save(tmp_path, {"n": 2}, step=2, keep=1)
        assert steps(tmp_path) == [2]
        child.kill()
        child.join()


def test_a_checkpoint_goes_only_after_the_next_is_committed(tmp_path, monkeypatch):
    seen = []
    real = durable.rename

    def rename(path, to):
        seen.append((path.name.split("-")[0], steps(tmp_path)))
        return real(path, to)

    with start(device="cpu"):
        save(tmp_path, {"n": 1}, step=1)
        monkeypatch.setattr(durable, "rename", rename)
        save(tmp_path, {"n": 2}, step=2, keep=1)
    assert seen == [(".saving", [1]), ("step", [1, 2])]


def test_what_a_manifest_says_of_its_making(tmp_path):
    import json

    with start(device="cpu"):
        step = make("local()")
        save(tmp_path, step.init(seed=0), metadata={"note": "first"})
        plan = str(step.plan)
    found = json.loads((latest(tmp_path) / "manifest.json").read_text())
    assert found["written_by"].keys() == {
        "fnaccel",
        "torch",
        "python",
        "ranks",
        "time",
        "plan",
        "transient_buffers",
        "git",
    }
    assert plan.startswith(found["written_by"]["plan"])  # which has no count of the parameters of a rank
    assert found["metadata"] == {"dict": {"note": "first"}}
