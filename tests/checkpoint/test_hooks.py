"""Functions of the user's around saves and restores, and one file from rank 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import batch_of, program, whole_params


def trained(strategy="local"):
    train_step = program(strategy=strategy, optimizer=fa.adamw(0.01))
    state, _ = train_step(train_step.init(seed=0), batch_of(4))
    return train_step, state


def with_files(folder):
    """Each hook's calls, and whether the files of `before_save` lie in the checkpoint."""
    world, calls = current(), []

    def before_save(directory, state):
        calls.append(("before_save", state.step, directory.name.startswith(".saving")))
        if world.is_main:
            (directory / "tokenizer").mkdir()
            (directory / "tokenizer" / "vocabulary.json").write_text("{}")

    train_step, state = trained("fsdp")
    with fa.checkpoint.hooks(
        before_save=before_save,
        after_save=lambda path: calls.append(("after_save", path.name)),
        before_restore=lambda path, like: calls.append(("before_restore", path.name, like.step)),
        after_restore=lambda path, state: calls.append(("after_restore", path.name, state.step)),
    ):
        path = fa.save(folder, state, keep=1)
        fa.save_async(folder, state, keep=1).wait()
        fa.restore(folder, like=train_step.init(seed=1))
    fa.save(folder, train_step.live_state, step=5)
    return calls, json.loads((path / "tokenizer" / "vocabulary.json").read_text())


def test_hooks_run_on_all_ranks_and_their_files_are_kept(pools, tmp_path):
    name = "step-0000000001"
    saved = [("before_save", 1, True), ("after_save", name)]
    restored = [("before_restore", name, 0), ("after_restore", name, 1)]
    for calls, content in pools.run(2, with_files, tmp_path):
        assert calls == [*saved, *saved, *restored]
        assert content == {}


def refused(folder):
    _, state = trained("ddp")
    path = fa.save(folder, state)

    def refuse(*_):
        if current().rank == 1:
            raise RuntimeError("not now")

    found = []
    for hook in ("before_save", "before_restore", "after_restore"):
        handle = fa.checkpoint.hooks(**{hook: refuse})
        try:
            fa.save(folder, state, step=7)
            fa.restore(folder, like=fa.snapshot(state))
        except errors.CheckpointError as error:
            found.append(error.what)
        handle.remove()
        handle.remove()
    return found, [entry.step for entry in fa.checkpoint.checkpoints(folder)], path.exists()


def test_a_hook_that_fails_on_one_rank_fails_on_all(pools, tmp_path):
    first, second = pools.run(2, refused, tmp_path)
    assert first[0] == ["rank 1 failed: RuntimeError: not now"] * 3
    assert second[0] == ["RuntimeError: not now"] * 3
    assert first[1] == [1, 7]
    assert not list(tmp_path.glob(".saving*"))


@pytest.mark.parametrize("given", [{}, {"before_save": 3}])
def test_hooks_that_are_none(given):
    with fa.start(), pytest.raises(errors.ArgumentError, match="function"):
        fa.checkpoint.hooks(**given)


def on_main(folder):
    _, state = trained("fsdp")
    paths = [
        fa.checkpoint.save_on_main({"params": state.params, "words": ["a"]}, Path(folder) / "all.pt"),
        fa.checkpoint.save_on_main(state.params, Path(folder) / "deep" / "all.safetensors"),
        fa.checkpoint.save_on_main({"rank": current().rank}, Path(folder) / "rank.pt", each_machine=True),
    ]
    loaded = torch.load(paths[0]), load_file(paths[1]), torch.load(paths[2])
    return loaded, whole_params(state)


def test_one_object_from_rank_0(pools, tmp_path):
    for (everything, tensors, ranked), params in pools.run(2, on_main, tmp_path):
        assert everything["words"] == ["a"]
        assert ranked == {"rank": 0}
        for name, value in params.items():
            torch.testing.assert_close(everything["params"][name], value)
            torch.testing.assert_close(tensors[name], value)


def test_what_save_on_main_refuses(tmp_path):
    with fa.start():
        path = fa.checkpoint.save_on_main([1], tmp_path / "kept.pt")
        with pytest.raises(errors.ArgumentError, match="dict of tensors"):
            fa.checkpoint.save_on_main([1], tmp_path / "x.safetensors")
        with pytest.raises(errors.CheckpointError, match="exists"):
            fa.checkpoint.save_on_main([2], path, overwrite=False)
        with pytest.raises(errors.CheckpointError, match=r"pickle|local object"):
            fa.checkpoint.save_on_main(lambda: 1, path)
    assert torch.load(path) == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["kept.pt"]


def gathered():
    _, state = trained("fsdp")
    found = fa.interchange.gather_state_dict(state)
    half = fa.interchange.gather_state_dict(state, dtype="bf16", only="out.*")
    return found, half, whole_params(state)


def test_the_whole_state_dict_is_on_rank_0(pools):
    (found, half, params), (nothing, none, _) = pools.run(2, gathered)
    assert nothing is none is None
    assert list(found) == list(params)
    for name, value in params.items():
        torch.testing.assert_close(found[name], value)
    assert {name: value.dtype for name, value in half.items()} == {
        "out.weight": torch.bfloat16,
        "out.bias": torch.bfloat16,
    }


def test_a_state_dict_loads_into_a_module():
    with fa.start():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        train_step = program(model=lambda: model, optimizer=fa.sgd(0.1))
        state, _ = train_step(train_step.init(seed=0), batch_of(4))
        found = fa.interchange.gather_state_dict(state)
        assert list(found) != []
        other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        other.load_state_dict(found)  # strict
        with pytest.raises(errors.ArgumentError, match="give the state"):
            fa.interchange.gather_state_dict({"a": torch.ones(1)})


def misplaced(name):
    def hook(directory, state):
        if name:
            (directory / name).write_text("{}")
        else:
            directory.rmdir()

    return hook


@pytest.mark.parametrize(
    "name", ["manifest.json", "shard-00000-of-00001.safetensors", "shard-00001-of-00004.safetensors", ""]
)
def test_a_hook_that_takes_the_names_of_the_save_is_named(tmp_path, name):
    with fa.start():
        _, state = trained()
        with (
            fa.checkpoint.hooks(before_save=misplaced(name)),
            pytest.raises(errors.CheckpointError, match="before_save hook wrote or removed"),
        ):
            fa.save(tmp_path, state)
        assert fa.checkpoint.latest(tmp_path) is None
        assert fa.save(tmp_path, state) == fa.checkpoint.latest(tmp_path)


def test_paths_are_absolute_and_counts_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fa.start():
        train_step, state = trained()
        assert (
            fa.save("runs", state)
            == fa.checkpoint.latest("runs")
            == fa.checkpoint.checkpoints("runs")[0].path
        )
        with pytest.raises(errors.ArgumentError, match="train_step is a TrainState"):
            fa.resume_or_init("runs", state)
        with pytest.raises(errors.ArgumentError, match="keep=0"):
            fa.scan(train_step, state, fa.shard([batch_of(4)]), save=fa.Autosave("runs", keep=0))
        with pytest.raises(errors.ArgumentError, match="keep=0"):
            fa.config.CheckpointRecipe(directory="runs", keep=0)
        with pytest.raises(errors.CheckpointError, match="overwrite=True"):
            fa.checkpoint.save_on_main([1], fa.checkpoint.save_on_main([1], "x.pt"), overwrite=False)
