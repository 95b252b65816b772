"""Slots that a partial restore leaves at their first values count their updates from there, or raise."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

RATE = 0.05


def make(kind):
    if kind == "late":
        late = fa.optim.starting_at(3, fa.adamw(RATE))
        return fa.optim.optimizer_groups([("blocks*", late), ("*", fa.adamw(RATE))])
    return fa.adamw(RATE) if kind == "adamw" else kind


def trained(strategy, kind, folder, steps, save=True, **restoring):
    train_step = program(strategy=strategy, optimizer=make(kind))
    state = train_step.init(seed=0)
    if steps[0]:
        state = fa.restore(folder, like=state, **restoring)
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    for number in range(*steps):
        state, _ = train_step(state, tuple(part.chunk(count)[rank] for part in batch_of(8, number)))
    if save:
        fa.save(folder, state)
    return whole_params(state)


def by_hand():
    """AdamW of torch that forgets the moments of the blocks after three updates."""
    torch.manual_seed(0)
    net = Net()
    rule = torch.optim.AdamW(net.parameters(), lr=RATE)
    for number in range(7):
        if number == 3:
            for param in net.blocks.parameters():
                rule.state.pop(param)
        net.zero_grad()
        x, y = batch_of(8, number)
        torch.nn.functional.mse_loss(net(x), y).backward()
        rule.step()
    return dict(net.named_parameters())


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_slots_that_begin_later_are_refused_or_count_from_there(pools, tmp_path, strategy, ranks):
    pools.run(ranks, trained, strategy, "adamw", tmp_path, (0, 3))
    words = r"blocks\.0\.mix\.weight.* 3 updates[\s\S]*starting_at\(3, "
    with pytest.raises(errors.ArgumentError, match=words):
        pools.run(ranks, trained, strategy, "adamw", tmp_path, (3, 5), False, skip="opt/blocks*")
    pools.run(ranks, trained, strategy, "late", tmp_path, (3, 5), skip="opt/blocks*")
    for params in pools.run(ranks, trained, strategy, "late", tmp_path, (5, 7)):
        assert_close(params, by_hand())


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (fa.sgd(0.1, momentum=0.9), False),
        (fa.optim.from_torch(torch.optim.Adam, lr=0.1), False),  # it counts by parameter
        (fa.optim.chain(fa.optim.scale_by_adam(), fa.optim.trust_ratio(), lr=0.1), True),
        (fa.optim.chain(fa.optim.trace(0.9), fa.optim.lookahead(), lr=0.1), True),
        (fa.optim.from_torch(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1), False),
    ],
    ids=["sgd", "torch's adam", "chain", "lookahead", "adagrad"],
)
def test_which_slots_are_refused(pools, tmp_path, kind, refused):
    pools.run(1, trained, "local", kind, tmp_path, (0, 3))
    pools.run(1, trained, "local", kind, tmp_path, (3, 4), False, skip=("opt", "updates"))
    pools.run(1, trained, "local", kind, tmp_path, (3, 4), False, only="params")
    if not refused:
        pools.run(1, trained, "local", kind, tmp_path, (3, 4), False, skip="opt")
        return
    with pytest.raises(errors.ArgumentError, match="starting_at"):
        pools.run(1, trained, "local", kind, tmp_path, (3, 4), False, skip="opt")


def test_adopted_moments_are_checked_too(tmp_path):
    torch.manual_seed(0)
    net = Net()
    rule = torch.optim.AdamW(net.named_parameters(), lr=RATE)
    for number in range(3):
        loss = loss_fn(net, batch_of(8, number))
        (loss.total / loss.weight).backward()
        rule.step()
    torch.save({"model": net.state_dict(), "optimizer": rule.state_dict()}, tmp_path / "run.pt")
    with fa.start():
        state = program(optimizer=fa.adamw(RATE)).init()
        with pytest.raises(errors.ArgumentError, match=r"starting_at\(3, "):
            fa.interchange.adopt(tmp_path / "run.pt", like=state, skip="opt/blocks*")
        assert fa.interchange.adopt(tmp_path / "run.pt", like=state, skip="opt/*").updates == 0
