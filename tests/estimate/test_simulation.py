"""A world without its other ranks, to plan and to count in."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import count_collectives
from tests.tiny_models import batch_of, program


def count_in(strategy):
    train_step = program(strategy=strategy)
    state, batch = train_step.init(seed=0), batch_of(8)
    state, _ = train_step(state, batch)
    with count_collectives() as counted:
        train_step(state, batch)
    return dict(counted.counts), str(train_step.plan)


def count_in_simulation(strategy, ranks):
    with fa.simulate(ranks=ranks):
        return count_in(strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp(2, 2)"])
def test_it_sends_what_ranks_send(pools, strategy):
    ranks = 4
    assert count_in_simulation(strategy, ranks) == pools.run(ranks, count_in, strategy)[0]


def places():
    with fa.simulate(ranks=16, per_machine=8, rank=11) as world:
        return world.rank, world.size, world.local_rank, world.machine, world.machines, world.is_main


def test_its_place():
    assert places() == (11, 16, 3, 1, 2, False)


def test_it_ends():
    with fa.simulate(ranks=8):
        assert torch.distributed.get_world_size() == 8
    assert not torch.distributed.is_initialized()
    with pytest.raises(errors.NoWorldError):
        program()
    with fa.simulate(ranks=2), pytest.raises(errors.WorldError, match="part of a process group"):
        fa.simulate(ranks=4)


def test_mistakes():
    for options, text in [
        ({"ranks": 0}, "0 ranks can't train"),
        ({"ranks": 8, "per_machine": 3}, "8 ranks do not make machines of 3"),
        ({"ranks": 8, "rank": 8}, "there is no rank 8"),
    ]:
        with pytest.raises(errors.ArgumentError, match=text):
            fa.simulate(**options)
