"""`resume_or_init`: begins once, goes on always, and never begins anew over what is damaged."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import CheckpointError, NotSerializableError, TreeMismatchError
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, program, whole_params


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


def trained(root, steps, **options):
    """A run that goes on from what a root holds, and saves each step."""
    train_step = program(**options)
    state = fa.resume_or_init(root, train_step, seed=3)
    first = state.step
    while state.step < steps:
        state, _ = train_step(state, batch_of(4, seed=state.step))
        fa.save(root, state)
    return first, state


def test_a_run_begins_and_goes_on(world, tmp_path):
    root = tmp_path / "not" / "there"
    train_step = program()
    state = fa.resume_or_init(root, train_step, seed=3, extras={"mine": 1})
    assert (state.step, state.rng.root, state.extras) == (0, 3, {"mine": 1})
    assert not root.exists()
    fa.save(root, state)
    assert trained(root, 2)[0] == 0
    first, state = trained(root, 4)
    assert first == 2
    other, expected = trained(tmp_path / "whole", 4)
    assert other == 0
    assert fa.tree.allclose(fa.snapshot(state).params, fa.snapshot(expected).params, rtol=0, atol=0)


def test_extras_that_can_not_be_saved_are_named_before_the_run(world, tmp_path):
    """A run that saves at its end only would be lost there."""
    extras = {"note": "x", "best": object(), "tags": [1, {2}], "scale": torch.ones(2)}
    shards = fa.shard([batch_of(4, seed=seed) for seed in range(3)])
    both = r"extras/best is a builtins.object, .*; extras/tags/1 is a builtins.set, .*"
    train_step = program()
    with pytest.raises(NotSerializableError, match=both) as raised:
        fa.resume_or_init(tmp_path, train_step, extras=extras)
    assert raised.value.where == "fa.resume_or_init"
    assert train_step.live_state is None
    with pytest.raises(NotSerializableError, match=both) as raised:
        train_step.init(extras=extras)
    assert raised.value.where == "train_step.init(extras=)"
    state = train_step.init(extras={})
    state.extras.update(extras)
    with pytest.raises(NotSerializableError, match=both) as raised:
        next(fa.scan(train_step, state, shards, steps=3, save=tmp_path))
    assert raised.value.where == "fa.scan(save=)"
    assert train_step.live_state.step == 0
    state.extras.clear()
    states = fa.scan(train_step, state, shards, steps=3, save=tmp_path)
    assert [state.step for state, _ in states] == [1, 2, 3]


def test_without_a_directory_a_run_begins(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(tmp_path, 1)
    state = fa.resume_or_init(None, program(), seed=3, extras={"mine": 1})
    assert (state.step, state.rng.root, state.extras) == (0, 3, {"mine": 1})


def test_the_seed_of_a_run_that_goes_on_is_its_own(world, tmp_path):
    trained(tmp_path, 1)
    state = fa.resume_or_init(tmp_path, program(), seed=99, extras=None)
    assert (state.step, state.rng.root) == (1, 3)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def break_json(path):
    path.write_text(path.read_text()[:100])


DAMAGE = {
    "file gone": ("*.safetensors", lambda path: path.unlink()),
    "file cut": ("*.safetensors", cut),
    "manifest gone": ("manifest.json", lambda path: path.unlink()),
    "manifest cut": ("manifest.json", break_json),
    "manifest empty": ("manifest.json", lambda path: path.write_text("")),
    "manifest of a later version": (
        "manifest.json",
        lambda path: path.write_text(json.dumps({"format": 99})),
    ),
}


def damage(root, step, name):
    pattern, do = DAMAGE[name]
    do(next((root / f"step-{step:010d}").glob(pattern)))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_raises_and_names_the_older_ones(world, tmp_path, name):
    trained(tmp_path, 3)
    damage(tmp_path, 3, name)
    with pytest.raises(CheckpointError, match="the checkpoint of step 3 can't be read") as raised:
        fa.resume_or_init(tmp_path, program())
    assert "older steps are 2, 1: fallback=True" in raised.value.fix
    with pytest.warns(UserWarning, match="step 3 in .* can't be read, and step 2 is taken"):
        state = fa.resume_or_init(tmp_path, program(), fallback=True)
    assert state.step == 2


def test_the_only_one_or_all_damaged(world, tmp_path):
    trained(tmp_path, 1)
    damage(tmp_path, 1, "file cut")
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match="step 1") as raised:
            fa.resume_or_init(tmp_path, program(), fallback=fallback)
        assert "move this one away" in raised.value.fix


def test_checksums_are_compared_unless_told_otherwise(world, tmp_path):
    trained(tmp_path, 2)
    path = next((tmp_path / "step-0000000002").glob("*.safetensors"))
    bytes_ = bytearray(path.read_bytes())
    bytes_[-1] ^= 1
    path.write_bytes(bytes_)
    assert fa.resume_or_init(tmp_path, program(), verify=False).step == 2
    with pytest.raises(CheckpointError, match="step 2"):
        fa.resume_or_init(tmp_path, program())
    with pytest.warns(UserWarning, match="step 1 is taken"):
        assert fa.resume_or_init(tmp_path, program(), fallback=True).step == 1


def test_another_model_is_no_damage(world, tmp_path):
    trained(tmp_path, 2)
    for fallback in (False, True):
        with pytest.raises(TreeMismatchError):
            fa.resume_or_init(tmp_path, program(model=lambda: torch.nn.Linear(3, 1)), fallback=fallback)


def several(root, steps, strategy):
    """Two train steps with a root each; every rank sees the rows of a part of each batch."""
    mesh, found = None, []
    for name in ("first", "second"):
        train_step = program(strategy=strategy, model=Net)
        mesh = train_step.mesh
        state = fa.resume_or_init(f"{root}/{name}", train_step, seed=4)
        found.append(state.step)
        while state.step < steps:
            rows = [x.tensor_split(mesh.batch_size)[mesh.batch_rank] for x in batch_of(7, seed=state.step)]
            state, _ = train_step(state, rows)
        fa.save(f"{root}/{name}", state)
        found.append(whole_params(state))
    return found


def test_other_ranks_and_strategies_go_on(pools, tmp_path):
    whole = pools.run(1, several, str(tmp_path / "whole"), 6, "local")[0]
    for ranks, strategy, steps in ((2, "ddp", 2), (1, "local", 3), (4, "fsdp", 5), (2, "fsdp", 6)):
        found = pools.run(ranks, several, str(tmp_path / "run"), steps, strategy)
    for each in found:
        assert each[0] == each[2] == 5
        for one, other in ((each[1], whole[1]), (each[3], whole[3])):
            for name, value in one.items():
                torch.testing.assert_close(value, other[name], rtol=0, atol=1e-6)


def hidden_from_one(root, fallback):
    """One rank can't read what the others can: they all raise, or all fall back."""
    from fnaccel.checkpoint import reading

    train_step = program(strategy="ddp")
    if current().rank == 1:
        real = reading.open_manifest

        def refuse(directory, **options):
            if directory.path.name.endswith("2"):
                raise CheckpointError("not here", where="test", fix="none")
            return real(directory, **options)

        reading.open_manifest = refuse
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = fa.resume_or_init(root, train_step, fallback=fallback)
    except CheckpointError as error:
        return error.what
    finally:
        if current().rank == 1:
            reading.open_manifest = real
    return state.step


def test_ranks_agree(pools, world, tmp_path):
    trained(tmp_path, 2)
    said = pools.run(2, hidden_from_one, str(tmp_path), False)
    assert ["not here" in text for text in said] == [True, True]
    assert pools.run(2, hidden_from_one, str(tmp_path), True) == [1, 1]
    shutil.rmtree(tmp_path / "step-0000000002")
    assert pools.run(2, hidden_from_one, str(tmp_path), False) == [1, 1]
