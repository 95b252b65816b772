"""Batch norm on several ranks: statistics over all of them, and buffers that are one for all."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from fnaccel.world.world import current

STEPS = 4
RANKS = 2
STRATEGIES = ["ddp", "fsdp", "hsdp(2, 1)", "hsdp(1, 2)"]


class Net(nn.Module):
    """Norms over rows and over positions, with and without weights, and one that averages all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6, affine=False)]
        )
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        x = torch.relu(self.norms[0](self.conv(x))).mean(dim=-1)
        return self.out(torch.tanh(self.norms[2](self.norms[1](self.mix(x)))))


class Plain(Net):
    """Without the average of all batches, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norms[1].momentum = 0.1


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def rows(step, rank, micro, size):
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    x = 3 * torch.randn(size, 3, 4, generator=generator) + 10
    return x, x.sum((1, 2))[:, None].sin()


# rows of each micro-batch of each rank. None: this rank has none, and runs a filler
SHAPES = {
    "one": [[5], [3]],
    "accumulated": [[3, 2, 2], [2, 2, 1]],
    "a filler": [[3, 2], [4, None]],
}


def micro_batches(shape, step, rank):
    return [(micro, size) for micro, size in enumerate(SHAPES[shape][rank])]


def run(strategy, shape, remat=False, steps=STEPS):
    """Parameters and buffers after some steps with synchronised norms."""
    rank = current().rank
    step = fa.transforms.sync_batch_norm(fa.clip_norm(loss_fn, 1.0))
    step = fa.remat(step, units=("ModuleList", "BatchNorm1d")) if remat else step
    train_step = fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    for number in range(steps):
        window = [
            fa.data.Batch(
                data=rows(number, rank, micro, size or 2),
                valid=size or 0,
                rows=size or 2,
                position=state.data,
            )
            for micro, size in micro_batches(shape, number, rank)
        ]
        state, _ = train_step(state, fa.data.Window(window))
    named = {**state.params, **state.buffers}
    plan = str(train_step.plan)
    result = {name: fa.tree.whole(value).detach().clone() for name, value in named.items()}
    train_step.close()
    return result, plan


def expected(shape):
    """The raw loop on one process, with micro-batches of the rows of all ranks."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        total = weight = 0
        for micro in range(len(SHAPES[shape][0])):
            parts = [
                rows(number, rank, micro, size)
                for rank in range(RANKS)
                if (size := SHAPES[shape][rank][micro]) is not None
            ]
            output = loss_fn(model, tuple(map(torch.cat, zip(*parts, strict=True))))
            total, weight = total + output.total, weight + output.weight
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_equal_one_rank_with_the_same_micro_batches(pools, strategy, shape):
    for result, plan in pools.run(RANKS, run, strategy, shape):
        assert_close(result, expected(shape))
        assert "MODULE   sync_batch_norm" in plan
        assert "3 BatchNorm1d: statistics are those of each micro-batch (2 ranks) over all ranks" in plan


def test_beside_remat(pools):
    for result, _ in pools.run(RANKS, run, "ddp", "accumulated", True):
        assert_close(result, expected("accumulated"))


def a_nan_that_does_not_count():
    """Rank 1 has no row that counts, and a loss of 0 by 0."""
    rank = current().rank

    def loss(model, batch):
        x, y = batch
        counted = torch.zeros(len(y), 1) if current().rank else torch.ones(len(y), 1)
        mean = ((model(x) - y).square() * counted).sum() / counted.sum()
        return fa.Mean.of(mean, counted.sum())

    train_step = fa.train_step(
        fa.transforms.sync_batch_norm(loss), model=fa.distribute(Net, "ddp"), optimizer=fa.sgd(0.1)
    )
    state = train_step.init(seed=0)
    state, _ = train_step(state, rows(0, rank, 0, 4))
    finite = all(bool(fa.tree.whole(value).isfinite().all()) for value in state.params.values())
    train_step.close()
    return finite


def test_a_loss_that_does_not_count_sends_no_nan_to_other_ranks(pools):
    assert pools.run(RANKS, a_nan_that_does_not_count) == [True, True]


def buffers_of_ranks(strategy, steps=3, compiled=False):
    """The buffers of this rank after some steps, and the scores before a save and after its restore."""
    world = current()
    step = fa.compile(loss_fn, backend="eager") if compiled else loss_fn
    train_step = fa.train_step(step, model=fa.distribute(Plain, strategy), optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    for number in range(steps):
        state, _ = train_step(state, rows(number, world.rank, 0, 5 - world.rank))
    folder = fa.collectives.broadcast_objects(_folder() if world.is_main else None)
    shards = fa.shard(DataLoader(TensorDataset(*rows(9, 0, 0, 7)), batch_size=4))
    apart = "sync_buffers=False" in strategy  # one score of two models raises
    before = None if apart else float(fa.evaluate(train_step, state, loss_fn, shards))
    held = {name: value.clone() for name, value in state.buffers.items()}
    fa.save(folder, state)
    unchanged = all(torch.equal(held[name], value) for name, value in state.buffers.items())
    state = fa.restore(folder, like=state)
    after = float(fa.evaluate(train_step, state, loss_fn, shards))
    plan = str(train_step.plan)
    train_step.close()
    return held, before, after, unchanged, plan


def _folder():
    import tempfile

    return tempfile.mkdtemp()


@pytest.mark.long_except("eager")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_hold_the_first_rank_s_buffers(pools, strategy, compiled):
    """Under fsdp a state evaluated to other values after it was restored than before it was saved."""
    first, second = pools.run(RANKS, buffers_of_ranks, strategy, 3, compiled)
    assert first[0].keys() == second[0].keys() != set()
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    torch.manual_seed(0)
    alone = _running_statistics_of_rank_0()
    torch.testing.assert_close(first[0]["norms.0.num_batches_tracked"], alone["norms.0.num_batches_tracked"])
    assert first[1] == first[2] == second[1] == second[2]
    assert first[3]
    assert second[3]
    assert (
        "on each rank, and running statistics those of the first rank. fa.transforms.sync_batch" in first[4]
    )


def _running_statistics_of_rank_0():
    model = Net()
    for number in range(3):
        model(rows(number, 0, 0, 5)[0])
    return dict(model.named_buffers())


def test_buffers_stay_apart_if_asked_for(pools):
    first, second = pools.run(RANKS, buffers_of_ranks, "ddp(sync_buffers=False)")
    assert not torch.equal(first[0]["norms.0.running_mean"], second[0]["norms.0.running_mean"])
    assert "sync_buffers=False: each rank keeps its own buffers" in first[4]


class Grows(nn.Module):
    """A saved buffer whose size depends on the rows of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = x.detach()[:, 0, 0].clone()
        return self.lin(x.mean(dim=-1))


def grown():
    rank = current().rank
    train_step = fa.train_step(loss_fn, model=fa.distribute(Grows, "ddp"), optimizer=fa.sgd(0.1))
    try:
        train_step(train_step.init(), rows(0, rank, 0, 3 + rank))
    finally:
        train_step.close()


def test_a_buffer_of_another_size_on_another_rank_raises(pools):
    with pytest.raises(errors.CapabilityError, match=r"the buffer seen has \[12, 16\] bytes on the ranks"):
        pools.run(RANKS, grown)


class Late(nn.Module):
    """Buffers that begin to change, or to grow, after ranks have agreed on those that move."""

    def __init__(self, begins, grows) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1)
        self.calls, self.begins, self.grows = 0, begins, grows
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.count += 1
            if self.calls > self.begins:
                self.total += x.detach().sum()
            if self.grows and self.calls > self.begins:
                self.count = torch.cat([self.count, self.count])
        return self.lin(x.mean(dim=-1))


def late(steps, grows):
    rank = current().rank
    train_step = fa.train_step(
        loss_fn, model=fa.distribute(functools.partial(Late, 4, grows), "ddp"), optimizer=fa.sgd(0.1)
    )
    try:
        state = train_step.init()
        for number in range(steps):
            state, _ = train_step(state, rows(number, rank, 0, 3))
        return state.buffers["total"].item(), state.buffers["count"].item()
    finally:
        train_step.close()


def test_a_buffer_that_moves_late_is_shared_from_the_next_comparison_on(pools):
    """Ranks compare after calls 1, 2, 4, 8, 16, and so on."""
    first, second = pools.run(RANKS, late, 8, False)
    assert first == second
    assert first[0] != 0
    assert first[1] == 8


def test_a_buffer_that_grows_later_raises(pools):
    with pytest.raises(
        errors.CapabilityError, match="the buffer count has 8 bytes on this rank, and had 4 on all"
    ):
        pools.run(RANKS, late, 6, True)


class TestOneRank:
    @pytest.fixture(autouse=True)
    def world(self):
        with fa.start(device="cpu") as started:
            yield started

    def made(self, step, model=Net):
        return fa.train_step(step, model=fa.distribute(model, "local"), optimizer=fa.sgd(0.1))

    def test_it_is_torch_s_own(self):
        states = []
        for step in (loss_fn, fa.transforms.sync_batch_norm(loss_fn)):
            train_step = self.made(step)
            state, _ = train_step(train_step.init(seed=0), rows(0, 0, 0, 4))
            states.append(fa.snapshot(state))
        assert fa.tree.allclose(dict(states[0].params), dict(states[1].params), rtol=0, atol=0)
        assert fa.tree.allclose(dict(states[0].buffers), dict(states[1].buffers), rtol=0, atol=0)

    def test_accumulation_is_in_the_plan(self):
        train_step = self.made(fa.accumulate(loss_fn, 2))
        train_step.init()
        note, _ = train_step.plan.notes
        assert note == "3 BatchNorm1d: statistics are those of each micro-batch (2 an update)"
        train_step = self.made(loss_fn)
        train_step.init()
        assert len(train_step.plan.notes) == 1  # the count of parameters

    def test_a_model_without_batch_norm_raises(self):
        with pytest.raises(errors.CapabilityError, match="the model has no batch norm"):
            self.made(fa.transforms.sync_batch_norm(loss_fn), lambda: nn.Linear(3, 1)).init()

    def test_a_norm_with_a_forward_of_its_own_raises(self):
        class Activated(nn.BatchNorm1d):
            def forward(self, x):
                return torch.relu(super().forward(x))

        with pytest.raises(errors.CapabilityError, match="1 is a batch norm with a forward of its own"):
            self.made(
                fa.transforms.sync_batch_norm(loss_fn), lambda: nn.Sequential(nn.Linear(3, 2), Activated(2))
            ).init()

    @pytest.mark.parametrize("scope", ["auto", "block", "loss", "step"])
    def test_beside_compile_it_raises(self, scope):
        with pytest.raises(errors.CapabilityError, match="sync_batch_norm"):
            self.made(fa.compile(fa.transforms.sync_batch_norm(loss_fn), scope=scope))
