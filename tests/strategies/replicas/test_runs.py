"""Runs of replicas: an optimizer of torch, trackers and a report of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.track import JsonlTracker, read_jsonl
from tests.strategies.replicas.raw import loss_fn, rows
from tests.strategies.replicas.test_training import check, outer_of
from tests.tiny_models import batch_of, program, whole, whole_params
from tests.tiny_models import loss_fn as plain_loss


def by_torch(strategy, steps, kind, folder=None, at=None):
    """As `test_training.trained`, by torch's AdamW. Saved after a step, or resumed if there is a checkpoint."""
    optimizer = fa.optim.from_torch(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
    train_step = program(loss_fn, strategy=strategy, optimizer=optimizer)
    state, losses, inner = train_step.init(seed=0), [], train_step.mesh.gradient_size
    if folder is not None and fa.checkpoint.latest(folder) is not None:
        state = fa.restore(folder, like=state)
    while state.step < steps:
        state, metrics = train_step(state, rows(kind, state.step, train_step.mesh.batch_rank, inner))
        losses.append(float(metrics["loss"]))
        if state.step == at:
            fa.save(folder, state, between=True)
    found = whole_params(state), losses, {path: whole(x) for path, x in fa.tree.items(state.opt)}
    train_step.close()
    return found


@pytest.mark.parametrize("kind", ["ragged", "a replica without rows"])
@pytest.mark.parametrize(
    ("strategy", "ranks", "outer"),
    [
        ("local_sgd(2, every=3)", 2, None),
        ("local_sgd(2, every=3) * fsdp(2)", 4, None),
        ("diloco(2, every=3)", 2, outer_of),
    ],
)
def test_an_optimizer_of_torch_trains_each_replica(pools, strategy, ranks, outer, kind):
    found = pools.run(ranks, by_torch, strategy, 10, kind)
    check(found, ranks, 2, 10, 3, kind, outer=outer, counted=False)


@pytest.mark.parametrize("at", [6, 7])  # an average, and between two
def test_slots_of_an_optimizer_of_torch_go_on_with_the_same_bits(pools, tmp_path, at):
    expected = pools.run(2, by_torch, "local_sgd(2, every=3)", 10, "ragged", tmp_path, at)
    again = pools.run(2, by_torch, "local_sgd(2, every=3)", 10, "ragged", tmp_path)
    for (params, _, slots), (wanted, _, others) in zip(again, expected, strict=True):
        assert fa.tree.allclose((params, slots), (wanted, others), rtol=0, atol=0)


def tracked(strategy, folder):
    """The metrics of a loop with trackers, and how many steps each of them got."""
    train_step = program(fa.clip_norm(plain_loss, 1.0), strategy=strategy)
    shards = fa.shard(DataLoader(TensorDataset(*batch_of(32)), batch_size=4))
    trackers = [JsonlTracker(folder / "main.jsonl"), JsonlTracker(folder / "all.jsonl", ranks="all")]
    losses = [
        float(metrics["loss"])
        for _, metrics in fa.scan(train_step, train_step.init(seed=0), shards, track=trackers)
    ]
    train_step.close()
    return losses


@pytest.mark.parametrize("metrics", ["steps", "boundary"])
@pytest.mark.parametrize("maker", ["local_sgd", "diloco"])
def test_trackers_and_a_report_have_the_metrics_of_each_step(pools, tmp_path, maker, metrics):
    found = pools.run(2, tracked, f"{maker}(2, every=4, metrics={metrics!r})", tmp_path)
    for name, losses in (("main", found[0]), ("all.rank0", found[0]), ("all.rank1", found[1])):
        records = read_jsonl(tmp_path / f"{name}.jsonl")[1:]
        assert [record["step"] for record in records] == [*range(1, 9)]
        assert [record["loss"] for record in records] == losses
        assert all(record["grad_norm"] > 0 for record in records)
    same = [one == other for one, other in zip(*found, strict=True)]
    assert same == [metrics == "steps" or step % 4 == 0 for step in range(1, 9)]
    page = fa.seeing.write_report(tmp_path / "main.jsonl", tmp_path / "report.html").read_text()
    assert "Loss" in page
    assert f"note: {maker}: 2 replicas train apart, and average after each 4 steps" in page
