"""Extras that differ between ranks: a checkpoint would hold rank 0's, and each rank would resume with it."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import batch_of, program


class Replay:
    """An object with a state, such as the environment of a rank."""

    def __init__(self, rows):
        self.rows = rows

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


KINDS = {
    "number": lambda rank: 1.0 + rank,
    "tensor": lambda rank: torch.full((3,), float(rank)),
    "object": lambda rank: Replay(torch.full((3,), float(rank))),
    "length": lambda rank: [torch.ones(2)] * (1 + rank),
    "large": lambda rank: torch.cat([torch.zeros(20_000_000), torch.full((4,), float(rank))]),
}


def saved(kind, folder, rank=None):
    rank = current(None).rank if rank is None else rank
    state = program(strategy="ddp").init(extras={"same": 3, "mine": KINDS[kind](rank)})
    return fa.save(folder, state).name


@pytest.mark.parametrize("kind", ["number", "tensor", "object", "length"])
def test_extras_of_each_rank_are_refused(pools, tmp_path, kind):
    words = r"extras/mine differs between ranks \(on rank 1 from rank 0\)[\s\S]*gather_objects"
    with pytest.raises(errors.CheckpointError, match=words):
        pools.run(2, saved, kind, tmp_path)
    assert pools.run(2, saved, kind, tmp_path, 0)


def test_large_extras_are_sampled(pools, tmp_path):
    pools.run(2, saved, "large", tmp_path, 0)


def changed(folder):
    """Values that differ later: numbers always, tensors after a change of shapes."""
    train_step, rank = program(strategy="ddp"), current(None).rank
    state = train_step.init(extras={"rows": torch.zeros(2), "best": 0.0})
    fa.save(folder, state)
    state.extras["rows"] = torch.full((4,), float(rank))
    state, _ = train_step(state, batch_of(4))
    fa.save(folder, state)


def test_extras_that_differ_later(pools, tmp_path):
    with pytest.raises(errors.CheckpointError, match="extras/rows differs"):
        pools.run(2, changed, tmp_path)


def gathered(folder):
    """Each rank's value in a list, as the error says."""
    rank = current(None).rank
    mine = torch.full((2,), 1.0 + rank)
    state = program(strategy="ddp").init(extras={"all": fa.collectives.gather_objects(mine)})
    fa.save(folder, state)
    like = program(strategy="ddp").init(extras={"all": [torch.zeros(2)] * 2})
    return fa.restore(folder, like=like).extras["all"][rank].tolist()


def test_gathered_values_come_back_to_each_rank(pools, tmp_path):
    assert pools.run(2, gathered, tmp_path) == [[1.0, 1.0], [2.0, 2.0]]


def test_extras_that_no_checkpoint_holds_raise_at_init():
    with fa.start():
        train_step = program()
        with pytest.raises(errors.NotSerializableError, match=r"fn is a [\s\S]*train_step\.init"):
            train_step.init(extras={"fn": print})
        assert train_step.live_state is None
