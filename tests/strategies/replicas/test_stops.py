"""Runs of replicas that stop: killed, asked to stop between two averages, or at the end of a loop."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.errors import LaunchError, Preempted
from tests.tiny_models import batch_of, loss_fn, program, whole

STEPS = 11


def everything(state):
    trees = (state.params, state.buffers, state.opt, state.transforms)
    return tuple(fa.tree.map_tensors(whole, dict(part)) for part in trees)


def scanned(strategy, folder, kill=None, stop=None, steps=STEPS, every=3):
    """A loop that saves. All ranks are killed in a step, or one is asked to stop.

    Returns the first step, the values at the end, and where it stopped.
    """
    step = fa.skip_nonfinite(fa.accumulate(loss_fn, 2))
    train_step = program(step, strategy=strategy, optimizer=fa.adamw(0.02))
    state = train_step.init(seed=0)
    if fa.checkpoint.latest(folder) is not None:
        state = fa.restore(folder, like=state)
    first, stopped = state.step, None
    shards = fa.shard(DataLoader(TensorDataset(*batch_of(390)), batch_size=11, shuffle=True), seed=5)
    try:
        for state, _ in fa.scan(
            train_step, state, shards, steps=steps, save=fa.Autosave(folder, every=every)
        ):
            if state.step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == stop and train_step.mesh.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except Preempted as ended:
        stopped = ended.step
    found = everything(state)
    train_step.close()
    return first, found, stopped


def equal(first, second):
    return fa.tree.allclose(first, second, rtol=0, atol=0)


PRODUCTS = [
    ("local_sgd(2, every=3)", 2),
    ("local_sgd(2, every=3, slots='average')", 2),
    ("diloco(2, every=3) * fsdp(2)", 4),
]


@pytest.mark.parametrize("at", [6, 8])  # an average, and between two
@pytest.mark.parametrize(("strategy", "ranks"), PRODUCTS)
def test_a_run_that_is_killed_goes_on_with_the_same_bits(pools, tmp_path, strategy, ranks, at):
    expected = pools.run(ranks, scanned, strategy, tmp_path / "a")
    with pytest.raises(LaunchError):
        pools.run(ranks, scanned, strategy, tmp_path / "b", at)
    saved = fa.checkpoint.checkpoints(tmp_path / "b")[-1].step
    assert saved == (3 if at == 6 else 6)
    found = pools.run(ranks, scanned, strategy, tmp_path / "b")
    for (first, state, _), (_, wanted, _) in zip(found, expected, strict=True):
        assert first == saved
        assert equal(state, wanted)


@pytest.mark.parametrize(("strategy", "ranks"), PRODUCTS)
def test_a_run_that_is_asked_to_stop_saves_each_replica_at_once(pools, tmp_path, strategy, ranks):
    expected = pools.run(ranks, scanned, strategy, tmp_path / "a")
    stopped = pools.run(ranks, scanned, strategy, tmp_path / "b", None, 4, every=100)
    assert {at for *_, at in stopped} == {5}  # all ranks hear of it with the totals of the next step
    assert not equal(stopped[0][1][0], stopped[-1][1][0])  # parameters of two replicas
    found = pools.run(ranks, scanned, strategy, tmp_path / "b", every=3)
    for (first, state, _), (_, wanted, _) in zip(found, expected, strict=True):
        assert first == 5
        assert equal(state, wanted)


def restored(strategy, folder):
    train_step = program(fa.skip_nonfinite(loss_fn), strategy=strategy, optimizer=fa.adamw(0.02))
    found = everything(fa.restore(folder, like=train_step.init(seed=1)))
    train_step.close()
    return found


@pytest.mark.parametrize("saved", ["local_sgd(2, every=3)", "diloco(2, every=3)"])
def test_another_layout_goes_on_with_the_mean_of_replicas(pools, tmp_path, saved):
    stopped = pools.run(2, scanned, saved, tmp_path, None, 4, every=100)
    (params, _, slots, _), (others, _, other_slots, _) = (state for _, state, _ in stopped)
    for strategy, ranks in ((saved.replace("(2", "(4"), 4), ("ddp", 3), ("local", 1)):
        for found in pools.run(ranks, restored, strategy, tmp_path):
            for name, value in found[0].items():
                assert torch.allclose(value, (params[name] + others[name]) / 2, rtol=1e-6, atol=0), name
            for (path, value), (_, other) in zip(
                fa.tree.items(slots), fa.tree.items(other_slots), strict=True
            ):
                mean = dict(fa.tree.items(found[2]))[path]
                assert torch.allclose(mean, (value + other) / 2, rtol=1e-6, atol=0), path


def test_a_loop_that_ends_between_two_averages_saves_its_last_step(pools, tmp_path):
    pools.run(2, scanned, "local_sgd(2, every=3)", tmp_path, steps=8)
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == [3, 6, 8]
    again = pools.run(2, scanned, "local_sgd(2, every=3)", tmp_path)
    whole_run = pools.run(2, scanned, "local_sgd(2, every=3)", tmp_path / "a")
    assert all(equal(one, other) for (_, one, _), (_, other, _) in zip(again, whole_run, strict=True))


def test_a_checkpoint_between_two_averages_is_adopted_as_the_mean(pools, tmp_path):
    """Other readers of checkpoints than `fa.restore` take the mean, too."""
    stopped = pools.run(2, scanned, "local_sgd(2, every=3)", tmp_path / "run", None, 4, every=100)
    params, others = (state[0] for _, state, _ in stopped)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, value in params.items():
        assert torch.allclose(found[name], (value + others[name]) / 2, rtol=1e-6, atol=0), name


def crossed(strategy, folder, only):
    """Parameters of a run that takes values from between two averages, at once and after its next average."""
    train_step = program(fa.skip_nonfinite(loss_fn), strategy=strategy, optimizer=fa.adamw(0.02))
    state = fa.restore(folder, like=train_step.init(seed=1), only=only)
    first = everything(state)[0]
    inner = train_step.mesh.batch_rank
    while state.step % 12 or not state.step:
        state, _ = train_step(state, batch_of(4, seed=10 * state.step + inner))
    fa.save(folder.with_name("after"), state)  # which compares all values
    found = first, everything(state)[0]
    train_step.close()
    return found


@pytest.mark.parametrize(
    ("saved", "strategy", "only"),
    [
        ("local_sgd(2, every=4)", "diloco(2, every=4)", None),
        ("diloco(2, every=4)", "local_sgd(2, every=4)", None),
        ("diloco(2, every=4)", "diloco(2, every=4)", "params"),
        ("local_sgd(2, every=4)", "local_sgd(2, every=3)", None),  # 6 is between two averages, or none
    ],
)
def test_values_of_each_replica_go_to_the_run_that_they_are_of(pools, tmp_path, saved, strategy, only):
    folder = tmp_path / "run"
    stopped = pools.run(2, scanned, saved, folder, None, 5, every=100)
    assert {at for *_, at in stopped} == {6}
    params, others = (state[0] for _, state, _ in stopped)
    (one, end), (other, other_end) = pools.run(2, crossed, strategy, folder, only)
    assert equal(one, other)
    assert equal(end, other_end)
    for name, value in one.items():
        assert torch.allclose(value, (params[name] + others[name]) / 2, rtol=1e-6, atol=0), name


def of_a_snapshot(folder):
    train_step = program(loss_fn, strategy="local_sgd(2, every=3)", optimizer=fa.adamw(0.02))
    with pytest.raises(fa.errors.CheckpointError, match="the values of this rank's replica"):
        fa.save(folder, fa.snapshot(train_step.init()))
    train_step.close()


def test_a_snapshot_of_one_replica_is_not_saved_for_all(pools, tmp_path):
    pools.run(2, of_a_snapshot, tmp_path)
    assert not any(tmp_path.iterdir())


def without_rows(folder, steps):
    """A loop whose last batch of an epoch leaves rank 1 without rows, stopped between two averages."""
    train_step = program(loss_fn, strategy="local_sgd(2, every=4)", optimizer=fa.adamw(0.02))
    state = fa.resume_or_init(folder, train_step, seed=0)
    shards = fa.shard(DataLoader(TensorDataset(*batch_of(11)), batch_size=2))
    for state, _ in fa.scan(train_step, state, shards, steps=steps, save=fa.Autosave(folder)):
        pass
    found = everything(state), state.updates
    train_step.close()
    return found


def test_a_replica_without_rows_resumes_with_the_same_bits(pools, tmp_path):
    expected = pools.run(2, without_rows, tmp_path / "a", 8)
    pools.run(2, without_rows, tmp_path / "b", 7)
    found = pools.run(2, without_rows, tmp_path / "b", 8)
    for (state, updates), (wanted, counted) in zip(found, expected, strict=True):
        assert updates == counted == 8
        assert equal(state, wanted)


def never_finite(steps):
    train_step = program(fa.skip_nonfinite(loss_fn, max_skipped=3), strategy="local_sgd(2, every=4)")
    state = train_step.init(seed=0)
    for step in range(steps):
        x, y = batch_of(4, seed=step)
        state, _ = train_step(state, (x * float("nan") if train_step.mesh.batch_rank else x, y))
    return state.step


def test_a_replica_that_is_never_finite_ends_all_ranks_at_the_next_average(pools):
    assert pools.run(2, never_finite, 4) == [4, 4]
    with pytest.raises(fa.errors.NonfiniteError, match="4 updates in a row"):
        pools.run(2, never_finite, 5)
