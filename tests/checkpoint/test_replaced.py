"""Law 17: a reader of a checkpoint directory gets one whole checkpoint, old or new, whatever a writer does."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

import fnaccel as fa
from fnaccel.checkpoint import checkpoints, latest, restore, save
from fnaccel.checkpoint.disk import directory as directories
from fnaccel.checkpoint.disk import publish as commit
from fnaccel.checkpoint.format import manifest
from fnaccel.checkpoint.format.found import read_all
from fnaccel.cli import inspect as inspecting
from fnaccel.cli.main import main
from fnaccel.errors import CheckpointError
from fnaccel.interchange.sources.fnaccel_files import open_own
from fnaccel.world.world import current, start
from tests.tiny_models import batch_of, program

SYSTEMS = ["open directories", "no path below", "no locks"]


@pytest.fixture(params=SYSTEMS)
def system(request, monkeypatch):
    """Linux; a system without a path below an open directory; a file system without locks."""
    if request.param == "no path below":
        monkeypatch.setattr(directories, "_NUMBERS", Path("not", "there"), raising=False)
    if request.param == "no locks":
        monkeypatch.setattr("fcntl.flock", refuse)
    with start(device="cpu"):
        yield request.param


def refuse(*args):
    raise OSError(errno.ENOLCK, "No locks available")


def value(number):
    return {
        "params": {"x": torch.full((3, 2), float(number)), "y": torch.full((5,), float(number))},
        "n": number,
    }


def check(tree):
    """A tree that is of one save; which one."""
    assert all(bool((tensor == tree["n"]).all()) for tensor in tree["params"].values()), tree
    return tree["n"]


@pytest.fixture
def between(monkeypatch):
    """Let a writer act when a reader has read the manifest, and has not opened a file of tensors yet."""
    real, actions = manifest.parse, []

    def parse(*args):
        if actions:
            actions.pop()()
        return real(*args)

    monkeypatch.setattr(manifest, "parse", parse)
    return actions


def restored(root):
    return check(restore(root, like=value(0), step=1))


def restored_by_path(root):
    return check(restore(root / "step-0000000001", like=value(0), verify=True))


def adopted(root):
    found = fa.interchange.adopt(root, like={"x": torch.zeros(3, 2), "y": torch.zeros(5)})
    return check({"params": found, "n": int(found["x"][0, 0])})


def exported(root):
    from safetensors.torch import load_file

    target = root.parent / "exported"
    shutil.rmtree(target, ignore_errors=True)
    fa.interchange.export_hf(target, root)
    tensors = load_file(target / "model.safetensors")
    return check({"params": tensors, "n": int(tensors["x"][0, 0])})


def converted(root):
    target = root.parent / "converted"
    shutil.rmtree(target, ignore_errors=True)
    assert main(["convert", str(root), str(target), "--to", "fnaccel"]) == 0
    return adopted(target)


def inspected(root):
    assert main(["inspect", str(root), "--verify", "--json"]) == 0
    return 1


READERS = [restored, restored_by_path, adopted, exported, converted, inspected]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_law_17_a_checkpoint_that_is_replaced_while_it_is_read(system, between, tmp_path, reader):
    root = tmp_path / "root"
    save(root, value(1), step=1)
    between.append(lambda: save(root, value(2), step=1))
    assert reader(root) in (1, 2)
    assert not between


def test_files_that_are_opened_again_are_of_the_same_checkpoint(system, monkeypatch, tmp_path):
    """A source lets files go after some megabytes: here after each tensor."""
    monkeypatch.setattr("fnaccel.checkpoint.reading._MOST", 0)
    save(tmp_path, value(1), step=1)
    with contextlib.ExitStack() as stack:
        weights = open_own(tmp_path, stack).weights
        found = {"params": {"x": read_all(weights["x"])}, "n": 1}
        for number in (2, 3):
            save(tmp_path, value(number), step=1)
        if system == "open directories":
            found["params"]["y"] = read_all(weights["y"])
        else:
            with pytest.raises(CheckpointError, match=r"replaced while|No such file"):
                read_all(weights["y"])
    assert check(found) == 1


@pytest.mark.parametrize("reader", [restored, adopted], ids=lambda reader: reader.__name__)
def test_law_17_a_checkpoint_that_is_removed_while_it_is_read(system, between, tmp_path, reader):
    root = tmp_path / "root"
    save(root, value(1), step=1)
    between.append(lambda: save(root, value(2), step=2, keep=1))
    if system != "no locks" or reader is adopted:
        assert reader(root) in (1, 2)
    else:  # step 1 was asked for, and is gone
        with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 1\b"):
            reader(root)


def test_a_live_state_is_not_donated_to_a_checkpoint_that_goes(system, between, tmp_path):
    train_step = program()
    state = train_step.init(seed=1)
    state, _ = train_step(state, batch_of(4, seed=1))
    first = fa.snapshot(state)
    save(tmp_path, state)
    state, _ = train_step(state, batch_of(4, seed=2))
    second = fa.snapshot(state)

    def other():
        for _ in range(2):
            save(tmp_path, second, step=1)

    between.append(other)
    found = fa.resume_or_init(tmp_path, program())
    wanted = first if found.step == 1 else second
    assert found.step == wanted.step
    for part in ("params", "opt"):
        assert fa.tree.allclose(getattr(fa.snapshot(found), part), getattr(wanted, part), rtol=0, atol=0)


def test_a_run_begins_again_if_its_checkpoint_went(system, monkeypatch, tmp_path):
    """A job beside this one keeps the newest only: step 1 goes between the listing and the opening."""
    train_step = program()
    state = train_step.init(seed=1)
    save(tmp_path, state, step=1)
    real, calls = restore, []

    def restores(*args, **options):
        if not calls:
            save(tmp_path, state, step=2, keep=1)
        calls.append(options["step"])
        return real(*args, **options)

    monkeypatch.setattr("fnaccel.checkpoint.resuming.restore", restores)
    assert fa.resume_or_init(tmp_path, program()).step == 0
    assert calls == [1, 2]
    assert [one.step for one in checkpoints(tmp_path)] == [2]


def hide(root):
    """A writer between its two renames."""
    (root / "step-0000000001").rename(root / "step-0000000001.old")


def test_between_two_renames(system, tmp_path, capsys):
    root = tmp_path / "root"
    path = save(root, value(1), step=1)
    hide(root)
    assert latest(root) == path.with_name(path.name + ".old")
    for where in (root, path, latest(root)):
        assert check(restore(where, like=value(0), step=1)) == 1
        assert adopted(where) == 1
        assert main(["inspect", str(where)]) == 0
    was = latest(root)
    was.rename(path)
    assert check(restore(was, like=value(0))) == 1  # what fa.checkpoint.latest returned, under its other name


def test_a_listing_during_a_rename(monkeypatch, tmp_path):
    """The name is read before the rename, and the manifest looked for after it."""
    with start(device="cpu"):
        save(tmp_path, value(1), step=1)
        real = Path.is_file

        def is_file(path):
            if path.parent.name == "step-0000000001" and path.parent.is_dir():
                hide(tmp_path)
            return real(path)

        monkeypatch.setattr(Path, "is_file", is_file)
        assert [one.step for one in checkpoints(tmp_path)] == [1]
        assert latest(tmp_path) is not None


def open_at_other_times(root, other):
    """Rank 1 opens the directory after rank 0, and it is another checkpoint by then."""
    flag, opened = root.parent / "flag", []
    real = manifest.parse
    wait = directories.hold if hasattr(directories, "hold") else commit.held

    def parse(*args):
        if current().rank == 0 and not opened:
            opened.append(True)
            hide(root)
            other.rename(root / "step-0000000001")
            flag.touch()
        return real(*args)

    def hold(path):
        for _ in range(2_000):
            if current().rank == 0 or flag.exists():
                return wait(path)
            time.sleep(0.005)
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "parse", parse)
        patch.setattr(directories, "hold", hold)
        return check(restore(root, like=value(0), step=1))


def test_all_ranks_read_the_same_checkpoint(pools, tmp_path):
    with start(device="cpu"):
        save(tmp_path / "root", value(1), step=1)
        other = save(tmp_path / "other", value(2), step=1)
    first, second = pools.run(2, open_at_other_times, tmp_path / "root", other)
    assert first == second


def writes(fixed, rolling, stop):
    with start(device="cpu"):
        number = 1
        while not stop.is_set():
            number += 1
            save(fixed, value(number), step=1)
            save(rolling, value(number), step=number, keep=1)


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="names of open directories can't change there")
def test_law_17_beside_a_writer(tmp_path, capsys):
    """One step is replaced again and again; another root keeps its newest only."""
    fixed, rolling = tmp_path / "fixed", tmp_path / "rolling"
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    with start(device="cpu"):
        for root in (fixed, rolling):
            save(root, value(1), step=1)
        writer = context.Process(target=writes, args=(fixed, rolling, stop), daemon=True)
        writer.start()
        try:
            seen = set()
            while len(seen) < 30 and writer.is_alive():
                seen.add(restored(fixed))
                for read in (restored_by_path, adopted, inspected):
                    read(fixed)
                assert latest(rolling) is not None
                check(restore(rolling, like=value(0)))
                adopted(rolling)
        finally:
            stop.set()
            writer.join()
        for root in (fixed, rolling):
            save(root, value(0), step=10**9)
            assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_a_reader_is_not_a_second_job(tmp_path):
    """What a reader holds is hidden and stays, and the save after it removes it."""
    with start(device="cpu"):
        path = save(tmp_path, value(1), step=1)
        with directories.hold(path) as held:
            for number in (2, 3):
                save(tmp_path, value(number), step=1)
            assert held.is_replaced()
            assert b'"fnaccel-checkpoint"' in held.read("manifest.json")
            assert [p.name[:9] for p in tmp_path.iterdir() if p.name.startswith(".")] == [".removing"]
        save(tmp_path, value(4), step=1)
        assert [p.name for p in tmp_path.iterdir()] == ["step-0000000001"]


def test_inspect_reads_one_checkpoint(tmp_path, between, capsys):
    """The table and the checksums are of one save."""
    with start(device="cpu"):
        save(tmp_path, value(1), step=1)
        between.append(lambda: save(tmp_path, {"other": torch.zeros(7)}, step=1))
        assert inspecting.run([str(tmp_path), "--verify"]) == 0
    assert "params/x" in capsys.readouterr().out
