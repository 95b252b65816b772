"""Law 11: whatever fails at whatever moment of a save, the checkpoint before it is there and is found."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

import pytest
import torch

import fnaccel as fa
from fnaccel.checkpoint import checkpoints, latest, restore, save
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.disk import durable
from fnaccel.errors import (
    ArgumentError,
    CheckpointError,
    FnaccelError,
    NotSerializableError,
    TreeMismatchError,
)
from fnaccel.world import world
from fnaccel.world.world import current, start
from tests.checkpoint.training import batch, make

CALLS = ("make_directory", "write", "sync", "rename", "remove")


class Crash(BaseException):
    """The process ends here: nothing that an `except Exception` would do is done."""


class Faults:
    """Lets the n-th call that changes the disk fail; a write has put down half of its bytes by then."""

    def __init__(self, patch, at, error):
        self.count, self.at, self.error = 0, at, error
        for name in CALLS:
            patch.setattr(durable, name, self._wrap(name, getattr(durable, name)))

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == self.at:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                raise self.error
            return real(*args, **kwargs)

        return call


def value(number):
    return {"x": torch.full((3,), float(number)), "n": number}


def crash_everywhere(root, step, error):
    """For each call of a save on top of one of step 1: fail there, and say what is found afterwards."""
    found = []
    for at in range(1, 100):
        directory = root / str(at)
        save(directory, value(1), step=1)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, error)
            with contextlib.suppress(Crash, CheckpointError):
                save(directory, value(2), step=step)
        left = restore(directory, like=value(0))
        assert torch.equal(left["x"], value(left["n"])["x"])
        names = sorted(one.name for one in directory.iterdir() if one.name.startswith("."))
        save(directory, value(3), step=step)
        assert restore(directory, like=value(0), verify=True)["n"] == 3
        assert not [one for one in directory.iterdir() if not one.name.startswith("step-")]
        assert sorted({1, step}) == [one.step for one in checkpoints(directory)]
        found.append((left["n"], bool(names)))
        if faults.count < at:
            return found
    raise AssertionError("a save never ends")


@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
@pytest.mark.parametrize("error", [Crash(), OSError(errno.ENOSPC, "No space left on device")], ids=type)
def test_a_crash_at_every_write_point(tmp_path, step, error):
    with start(device="cpu"):
        found = crash_everywhere(tmp_path, step, error)
    numbers = [number for number, _ in found]
    assert len(found) > 8
    assert numbers == sorted(numbers)  # the old one up to the commit, the new one from there
    assert {numbers[0], numbers[-1]} == {1, 2}
    leftovers = [names for number, names in found if number == 1]
    assert any(leftovers) == isinstance(error, Crash)


def test_everything_is_on_the_device_before_its_name_is_there_in_order(tmp_path, monkeypatch):
    """Files, then the directory with their names, then the rename, then the directory with that name."""
    seen = []

    def note(name):
        real = getattr(durable, name)

        def call(*args):
            path = args[0] if name == "rename" else Path(f"/proc/self/fd/{args[0]}").readlink()
            seen.append((name, path.name.partition("-")[0]))
            return real(*args)

        return call

    with start(device="cpu"):
        for name in ("sync", "rename"):
            monkeypatch.setattr(durable, name, note(name))
        save(tmp_path / "root", value(1), step=1)
    files = [("sync", "shard"), ("sync", "manifest.json"), ("sync", ".saving")]
    above = ("sync", tmp_path.name.partition("-")[0])
    assert seen == [above, *files, ("rename", ".saving"), ("sync", "root")]


def fail(*args):
    raise OSError(errno.EROFS, "Read-only file system", "shard")


def one_rank_fails(directory):
    mine, second = {"x": torch.arange(4.0)}, world.current().rank == 1
    save(directory, mine, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if second:
            patch.setattr("fnaccel.checkpoint.writing.Writing._write", fail)
        with pytest.raises(CheckpointError) as written:
            save(directory, mine, step=2)
    with pytest.raises(FnaccelError) as encoded:
        save(directory, {**mine, "f": print} if second else mine, step=2)
    with pytest.raises(FnaccelError) as matched:
        restore(directory, like={"y": mine["x"]} if second else mine)
    assert [one.name for one in directory.iterdir()] == ["step-0000000001"]
    return [raised.value for raised in (written, encoded, matched)]


def test_where_one_rank_fails_all_raise(pools, tmp_path):
    first, second = pools.run(2, one_rank_fails, tmp_path)
    assert [type(error) for error in first] == [CheckpointError] * 3
    assert [type(error) for error in second] == [CheckpointError, NotSerializableError, TreeMismatchError]
    starts = ["Read-only file system", "f is a builtins.", "2 paths differ"]
    for here, there, start_of in zip(first, second, starts, strict=True):
        assert here.what.startswith(f"rank 1 failed: {start_of}")
        assert there.what.startswith(start_of)


def test_a_second_job_is_refused_and_a_forgotten_save_swept(tmp_path):
    from fnaccel.checkpoint.disk import publish as commit

    with start(device="cpu"):
        running, gone = commit.stage(tmp_path, 7), commit.stage(tmp_path, 7)
        with commit.held(running):
            with pytest.raises(CheckpointError, match="another process is saving into") as raised:
                save(tmp_path, value(1), step=1)
            assert running.name in raised.value.what
            assert {one.name for one in tmp_path.iterdir()} == {running.name, gone.name}
            commit.sweep(tmp_path)
            assert [one.name for one in tmp_path.iterdir()] == [running.name]
        # where the file system has no locks, only age tells
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fcntl.flock", fail)
            fresh = commit.stage(tmp_path, 8)
            day = time.time() - 2 * 24 * 3600
            os.utime(running, (day, day))
            save(tmp_path, value(1), step=1)
        assert fresh.exists()
        assert not running.exists()


def test_names_and_steps(tmp_path):
    with start(device="cpu"):
        assert latest(tmp_path / "none") is None
        assert checkpoints(tmp_path) == []
        paths = [save(tmp_path, value(n)) for n in (0, 1)]
        paths += [save(tmp_path, value(2), step=10), save(str(tmp_path), value(3))]
        assert [path.name for path in paths] == [f"step-{n:010d}" for n in (0, 1, 10, 11)]
        assert latest(tmp_path) == paths[-1]
        assert restore(tmp_path, like=value(9), step=10)["n"] == 2
        assert restore(paths[1], like=value(9))["n"] == 1
        (tmp_path / "step-0000000099").mkdir()
        (tmp_path / "notes.txt").touch()
        assert [one.step for one in checkpoints(tmp_path)] == [0, 1, 10, 11]
        with pytest.raises(ArgumentError, match="step 5 was asked for"):
            restore(paths[1], like=value(9), step=5)
        with pytest.raises(CheckpointError, match=r"of step 5[^0-9](.|\n)*0, 1, 10, 11"):
            restore(tmp_path, like=value(9), step=5)
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            restore(tmp_path / "none", like=value(9))
        for step in (-1, True, 1.0, 10**19):
            with pytest.raises(ArgumentError, match="number a checkpoint"):
                save(tmp_path, value(0), step=step)


def remembers(value):
    """An UPDATE transform whose state is `value()` after each step."""

    def apply(params, own, info):
        return {"value": torch.tensor(float(value()))}

    return fa.Transform(
        name="own", phase=fa.Phase.UPDATE, apply=apply, init=lambda _: {"value": torch.tensor(0.0)}
    )


def saves_a_transform(directory, layout):
    said = []
    for value in (lambda: 7, lambda: world.current().rank):
        step = make(layout, transform=remembers(value))
        state, _ = step(step.init(seed=1), batch(step.mesh, 0))
        try:
            save(directory, state)
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("layout", ["ddp()", "fsdp()"])
def test_the_state_of_a_transform_that_differs_between_ranks_raises(pools, tmp_path, layout):
    for said in pools.run(2, saves_a_transform, tmp_path, layout):
        assert len(said) == 1
        assert "state.transforms differs between ranks (on rank 1 of the mesh axis 'loss' from" in said[0]
        assert "not from a rank's own loss" in said[0]
    assert [one.name for one in tmp_path.iterdir()] == ["step-0000000001"]


def out_of_step():
    """One rank was cut off in a save, and both save again: their exchanges do not fit."""
    here = world.current()

    def first():
        return "first"

    def second():
        return "second"

    with pytest.raises(CheckpointError, match="ranks are in different parts of a save or restore"):
        together(here, "fa.save", first if here.rank else second)
    return together(here, "fa.save", first)


def test_ranks_in_different_parts_of_a_save_say_so(pools):
    assert pools.run(2, out_of_step) == [["first", "first"]] * 2


def saves_elsewhere(folder):
    rank = current().rank
    path = fa.save(folder / str(rank), {"x": torch.ones(2)}, step=1)
    saving = fa.save_async(folder / str(rank), {"x": torch.ones(2)}, step=2)
    return [str(path), str(saving.wait())]


def test_ranks_that_give_other_folders_get_the_path_that_was_written(pools, tmp_path):
    first, second = pools.run(2, saves_elsewhere, tmp_path)
    assert first == second
    assert all((tmp_path / path / "manifest.json").is_file() for path in first)
