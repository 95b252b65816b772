"""Checkpoints in folders that machines do not share. Machines are simulated: each has a folder of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import attrs
import pytest

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, loss_fn, whole_params


def of_machine(per):
    """The world of a rank, as if each machine had `per` of the ranks."""
    world = current()
    machine, local_rank = divmod(world.rank, per)
    world = attrs.evolve(
        world, machine=machine, machines=world.size // per, local_rank=local_rank, local_size=per
    )
    world.enter()
    return world


def folder_of(root, world):
    return Path(root) / f"machine{world.machine}"


def program(strategy, world):
    model = fa.distribute(Net, strategy)
    return fa.train_step(fa.with_ema(loss_fn, 0.9), model=model, optimizer=fa.adamw(0.01), world=world)


def step(train_step, state, number):
    batch = [fa.split_between_processes(part) for part in batch_of(12, number)]
    return train_step(state, tuple(batch))[0]


def saved(root, strategy, per, background=False):
    world = of_machine(per)
    train_step = program(strategy, world)
    state = step(train_step, train_step.init(seed=0), 0)
    folder = folder_of(root, world)
    if background:
        fa.save_async(folder, state, keep=1, each_machine=True, world=world).wait()
    else:
        fa.save(folder, state, keep=1, each_machine=True, world=world)
    return whole_params(step(train_step, state, 1))


def restored(root, strategy, per, verify=True, **options):
    world = of_machine(per)
    train_step = program(strategy, world)
    options = {"each_machine": True, "verify": verify, "world": world} | options
    state = fa.restore(folder_of(root, world), like=train_step.init(seed=1), **options)
    return whole_params(step(train_step, state, 1))


@pytest.mark.parametrize(("strategy", "ranks", "per"), [
    ("fsdp", 2, 1), ("ddp", 2, 1), ("hsdp(2, 2)", 4, 2), ("fsdp", 3, 1), ("fsdp", 4, 2),
])  # fmt: skip
def test_the_same_machines_and_layout_go_on(pools, tmp_path, strategy, ranks, per):
    expected = pools.run(ranks, saved, tmp_path, strategy, per, ranks == 3)
    for found, params in zip(pools.run(ranks, restored, tmp_path, strategy, per), expected, strict=True):
        assert_close(found, params)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == ranks // per
    for number, folder in enumerate(folders):
        (checkpoint,) = folder.iterdir()
        described = json.loads((checkpoint / "manifest.json").read_text())
        assert described["written_by"]["machine"] == number
        own = {path.name for path in checkpoint.glob("*.safetensors")}
        if strategy in ("ddp", "hsdp(2, 2)"):  # each machine has all of it
            named = {
                piece["file"]
                for path, stored in described["tensors"].items()
                for piece in stored["pieces"]
                if not path.startswith("~streams")
            }
            assert named <= own


def test_the_folders_of_all_machines_copied_into_one_are_a_checkpoint(pools, tmp_path):
    expected = pools.run(4, saved, tmp_path, "fsdp", 2)[0]
    together = tmp_path / "machine0"
    for file in (tmp_path / "machine1").glob("*/*.safetensors"):
        shutil.copy(file, next(together.iterdir()))
    found = pools.run(1, restored, tmp_path, "local", 1, each_machine=False)[0]
    assert_close(found, expected)


def error_of(root, strategy, per, **options):
    try:
        restored(root, strategy, per, **options)
    except errors.FnaccelError as error:
        return str(error)
    return None


def test_another_layout_lists_the_pieces_that_are_missing(pools, tmp_path):
    pools.run(2, saved, tmp_path, "fsdp", 1)
    first, second = pools.run(2, error_of, tmp_path, "ddp", 1)
    assert "machine 0 lacks" in first
    assert "shard-00001-of-00002.safetensors" in first
    assert "machine 1 lacks" in second
    assert "params/" in second
    without = pools.run(2, error_of, tmp_path, "fsdp", 1, each_machine=False, verify=False)
    assert all("is missing" in text for text in without)


def resumed(root, per):
    world = of_machine(per)
    folder = folder_of(root, world)
    train_step = program("fsdp", world)
    state = fa.resume_or_init(folder, train_step, seed=0, each_machine=True)
    first = state.step
    loader = [tuple(fa.split_between_processes(part) for part in batch_of(12, n)) for n in range(3)]
    for state, _ in fa.scan(train_step, state, fa.shard(loader, presplit=True), steps=first + 2, save=fa.Autosave(folder, every=1, keep=2, each_machine=True)):  # fmt: skip
        pass
    return first, [entry.step for entry in fa.checkpoint.checkpoints(folder)]


def test_a_run_goes_on_at_the_newest_step_that_all_machines_have(pools, tmp_path):
    assert pools.run(2, resumed, tmp_path, 1) == [(0, [1, 2]), (0, [1, 2])]
    shutil.rmtree(
        tmp_path / "machine1" / "step-0000000002"
    )  # as if that machine had failed before its commit
    assert pools.run(2, resumed, tmp_path, 1) == [(1, [2, 3]), (1, [2, 3])]
    shutil.rmtree(tmp_path / "machine1")
    assert pools.run(2, resumed, tmp_path, 1)[0][0] == 0


def test_one_machine_writes_an_ordinary_checkpoint(pools, tmp_path):
    expected = pools.run(2, saved, tmp_path, "fsdp", 2)[0]
    found = pools.run(2, restored, tmp_path, "ddp", 2)[0]
    assert_close(found, expected)
