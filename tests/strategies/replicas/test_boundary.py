"""`metrics="boundary"`: nothing is sent between averages, and the training is that of `metrics="steps"`."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.engine.stop_request import Notice
from fnaccel.errors import ArgumentError, CapabilityError, LossError, Preempted
from fnaccel.testing import count_collectives
from fnaccel.world.progress_marks import NOW
from tests.strategies.replicas.raw import loss_fn, rows
from tests.tiny_models import Net, batch_of, program, whole_params
from tests.tiny_models import loss_fn as plain_loss

TENSOR = "tensor(2, plan={'blocks.*.mix': 'colwise_gather'})"
TRANSFORMS = {
    "plain": lambda step: step,
    "accumulated": lambda step: fa.accumulate(step, 2),
    "checked": lambda step: fa.skip_nonfinite(fa.clip_norm(step, 0.5)),
}


def trained(strategy, steps, kind, transform, broken=False):
    """Parameters, metrics, and the collectives of each step."""
    step = TRANSFORMS[transform](loss_fn)
    train_step = program(step, strategy=strategy, optimizer=fa.adamw(0.02))
    state, losses, sent = train_step.init(seed=0), [], []
    inner = train_step.mesh.gradient_size
    for number in range(steps):
        x, y, weights = rows(kind, number, train_step.mesh.batch_rank, inner)
        if broken and (number, train_step.mesh.batch_rank) == (1, 1):
            x = x * float("nan")
        with count_collectives() as counted:
            state, metrics = train_step(state, (x, y, weights))
        losses.append((float(metrics["loss"]), float(metrics["weight"])))
        sent.append(sum(counted.counts.values()))
    params = whole_params(state)
    updates = int(state.updates)
    train_step.close()
    return params, losses, sent, updates


def equal(first, second):
    return fa.tree.allclose(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["even", "ragged", "a replica without rows"])
@pytest.mark.parametrize("transform", ["plain", "checked"])
@pytest.mark.parametrize("maker", ["local_sgd", "diloco"])
def test_replicas_send_nothing_between_averages(pools, maker, transform, kind):
    each = pools.run(2, trained, f"{maker}(2, every=3)", 8, kind, transform)
    found = pools.run(2, trained, f"{maker}(2, every=3, metrics='boundary')", 8, kind, transform)
    for (params, losses, sent, updates), (wanted, all_losses, _, counted) in zip(found, each, strict=True):
        assert equal(params, wanted)
        assert updates == counted
        assert [count > 0 for count in sent] == [False, False, True, False, False, True, False, False]
        for step in (2, 5):  # those of all rows
            assert losses[step] == pytest.approx(all_losses[step], rel=1e-6)
        weights = [sum(rank[1][step][1] for rank in found) for step in (0, 1, 3, 4)]
        assert weights == [all_losses[step][1] for step in (0, 1, 3, 4)]


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("local_sgd(2, every=3) * fsdp(2)", 4), (f"diloco(2, every=3) * {TENSOR}", 4)]
)
def test_ranks_of_one_replica_still_add_up_their_totals(pools, strategy, ranks):
    each = pools.run(ranks, trained, strategy, 7, "even", "accumulated")
    apart = strategy.replace("every=3", "every=3, metrics='boundary'")
    found = pools.run(ranks, trained, apart, 7, "even", "accumulated")
    for (params, losses, _, _), (wanted, all_losses, _, _) in zip(found, each, strict=True):
        assert equal(params, wanted)
        assert [losses[2], losses[5]] == [all_losses[2], all_losses[5]]
    assert found[0][1] == found[1][1]  # of one replica
    assert found[0][1][0] != found[2][1][0]


def test_an_update_that_one_replica_leaves_out_is_counted_as_before(pools):
    each = pools.run(2, trained, "local_sgd(2, every=3)", 7, "even", "checked", True)
    found = pools.run(2, trained, "local_sgd(2, every=3, metrics='boundary')", 7, "even", "checked", True)
    for (params, _, _, updates), (wanted, _, _, counted) in zip(found, each, strict=True):
        assert equal(params, wanted)
        assert updates == counted


def scanned(folder, stop, product="", steps=40):
    """Where a loop ends whose rank 1 gets a signal after a step."""
    strategy = f"local_sgd(2, every=4, metrics='boundary'){product}"
    train_step = program(plain_loss, strategy=strategy, optimizer=fa.adamw(0.02))
    state, ended = train_step.init(seed=0), None
    shards = fa.shard(DataLoader(TensorDataset(*batch_of(390)), batch_size=11, shuffle=True), seed=5)
    try:
        for state, _ in fa.scan(train_step, state, shards, steps=steps, save=fa.Autosave(folder, every=100)):
            if state.step == stop and train_step.mesh.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except Preempted as error:
        ended = error.step
    train_step.close()
    return ended


@pytest.mark.parametrize(("stop", "ends"), [(4, 8), (5, 8), (8, 12), (39, 40)])
def test_a_stop_request_is_known_at_the_next_average(pools, tmp_path, stop, ends):
    assert pools.run(2, scanned, tmp_path, stop) == [ends, ends]
    assert [saved.step for saved in fa.checkpoint.checkpoints(tmp_path)] == [ends]


@pytest.mark.parametrize("product", [" * fsdp(2)", f" * {TENSOR}"])
def test_a_stop_request_in_one_rank_of_a_replica_waits_as_well(pools, tmp_path, product):
    assert pools.run(4, scanned, tmp_path, 5, product) == [8] * 4


class OnAGpu:
    """A count whose value the host can read."""

    device = torch.device("cuda")

    def __gt__(self, other):
        return True


def test_a_gpus_answer_is_read_in_the_step_of_the_average():
    notice = Notice()
    notice.at_once = True
    notice.hear([OnAGpu()], OnAGpu.device)
    assert notice.stopping


def asked_at_once(metrics):
    """Whether the answer of each step is read at once."""
    train_step = program(plain_loss, strategy=f"local_sgd(2, every=2, metrics={metrics!r})")
    state = train_step.init(seed=0)
    with fa.preemption(train_step) as notice:
        for number in range(2):
            state, _ = train_step(state, batch_of(4, number))
    return notice.at_once


def test_only_answers_that_are_steps_apart_are_read_at_once(pools):
    assert pools.run(2, asked_at_once, "boundary") == [True, True]
    assert pools.run(2, asked_at_once, "steps") == [False, False]


def of_another_kind(model, batch):
    """As many numbers on all ranks, with another name on those of the second replica."""
    loss = loss_fn(model, batch)
    second = 2 * torch.distributed.get_rank() >= torch.distributed.get_world_size()
    return fa.Mean(loss.total, weight=loss.weight, aux={"b" if second else "a": loss.total.detach()})


def mixed(product):
    train_step = program(of_another_kind, strategy=f"local_sgd(2, every=3, metrics='boundary'){product}")
    state = train_step.init(seed=0)
    for number in range(2):
        state, _ = train_step(state, rows("even", number, train_step.mesh.batch_rank))
    with pytest.raises(LossError, match="the losses of ranks differ"):
        train_step(state, rows("even", 2, train_step.mesh.batch_rank))


@pytest.mark.parametrize(("product", "ranks"), [("", 2), (" * fsdp(2)", 4)])
def test_losses_of_two_kinds_are_found_at_the_first_average(pools, product, ranks):
    pools.run(ranks, mixed, product)


def marked(strategy):
    """Whether the hang detector takes each step for one in which all ranks wait for each other."""
    found = []

    def noted(model, batch):
        found.append(NOW.shares)
        return plain_loss(model, batch)

    train_step = program(noted, strategy=strategy)
    state = train_step.init(seed=0)
    for number in range(6):
        state, _ = train_step(state, batch_of(4, number))
    return found


def test_the_hang_detector_lets_replicas_be_steps_apart(pools):
    (found, _) = pools.run(2, marked, "local_sgd(2, every=3, metrics='boundary')")
    assert found == [False, False, True, False, False, True]
    assert all(pools.run(2, marked, "local_sgd(2, every=3)")[0])


def test_what_needs_the_loss_of_all_rows_is_refused(pools):
    with pytest.raises(ArgumentError, match="the weight of all rows in each step"):
        fa.local_sgd(metrics="boundary", weighting="rows")
    with pytest.raises(ArgumentError, match="'steps' or 'boundary'"):
        fa.diloco(metrics="never")
    pools.run(2, spiked)


def spiked():
    step = fa.transforms.on_spike(plain_loss, do="warn")
    with pytest.raises(CapabilityError, match="on_spike decides by the loss of all rows"):
        program(step, strategy="diloco(2, metrics='boundary')").init()


def plan_of(strategy):
    return str(program(plain_loss, strategy=strategy).plan)


def test_the_plan_says_when_a_stop_request_is_known(pools):
    text = pools.run(2, plan_of, "diloco(2, metrics='boundary')")[0]
    assert "diloco: between averages metrics are those of this rank's replica" in text
    assert "diloco: ranks learn of a stop request at the next average" in text
    sent = fa.strategies.footprint(Net, "local_sgd(2, every=4, metrics='boundary')", 2).traffic
    assert [(row.axis, row.size) for row in sent] == [("dp_replicate", (460 + 16) // 4)]
