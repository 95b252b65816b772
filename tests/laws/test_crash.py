"""Law 11 with real processes: a rank killed at any write of a save leaves the checkpoint before it, whole."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnaccel.checkpoint import checkpoints, restore, save, save_async
from fnaccel.checkpoint.disk import durable
from fnaccel.errors import FnaccelError, LaunchError
from fnaccel.testing import RankPool
from fnaccel.world.world import current, start
from tests.checkpoint.training import gathered, make, train, unlike

CALLS = ("make_directory", "write", "flush", "sync", "rename", "remove")


def arm(at):
    """Kill this process in the middle of its n-th call that changes the disk."""
    left = [at]

    def wrap(name, real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(durable, name, wrap(name, getattr(durable, name)))


def doomed(layout, directory, victim, at, again, background):
    step = make(layout)
    state = train(step, step.init(seed=1), 0, 1)
    save(directory, state)
    if not again:
        state = train(step, state, 1, 1)
    if current().rank == victim:
        arm(at)
    if background:
        saving = save_async(directory, state, keep=1)
        train(step, state, 2, 1)
        saving.wait()
    else:
        save(directory, state, keep=1)


def states(layout):
    """The states after one and two steps, by step."""
    step = make(layout)
    state = train(step, step.init(seed=1), 0, 1)
    first = gathered(state)
    return {1: first, 2: gathered(train(step, state, 1, 1))}


def read(layout, directory, wanted):
    """What is found is whole, whatever it is; and the next save clears up."""
    step = make(layout)
    state = restore(directory, like=step.init(seed=5), verify=True)
    wrong = unlike(state, wanted[state.step])
    number = state.step
    save(directory, state, step=9)
    return [path for path in wrong if current().is_main or not path.startswith("buffers/")], number


LAYOUTS = [("local()", 1), ("ddp()", 2), ("fsdp()", 2), ("fsdp()", 3)]
WANTED = {}


@pytest.mark.long
@settings(max_examples=20)
@given(
    layout=st.sampled_from(LAYOUTS),
    victim=st.integers(0, 2),
    at=st.integers(1, 14),
    again=st.booleans(),
    background=st.booleans(),
)
def test_law_11_a_killed_rank_leaves_a_whole_checkpoint(
    pools, tmp_path_factory, layout, victim, at, again, background
):
    name, ranks = layout
    if layout not in WANTED:
        WANTED[layout] = pools.run(ranks, states, name)[0]
    directory = tmp_path_factory.mktemp("crash")
    # the save may be through before the n-th call
    with contextlib.suppress(FnaccelError), RankPool(ranks, timeout=60) as pool:
        pool.run(doomed, name, directory, victim % ranks, at, again, background)
    assert [one.step for one in checkpoints(directory)] in ([1], [2], [1, 2])
    for wrong, step in pools.run(ranks, read, name, directory, WANTED[layout]):
        assert wrong == []
        assert step in ((1,) if again else (1, 2))
    left = {path.name for path in directory.iterdir()}
    assert not [one for one in left if one.startswith(".") or one.removesuffix(".old") in left - {one}]


def test_the_first_save_of_all(tmp_path):
    """Where nothing was there before, nothing is found, and the next save goes on from there."""
    with RankPool(1, timeout=60) as pool, pytest.raises(LaunchError, match="died"):
        pool.run(only_save, tmp_path)
    assert checkpoints(tmp_path) == []
    with start(device="cpu"):
        save(tmp_path, {"x": torch.ones(1)}, step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]


def only_save(directory):
    arm(5)
    save(directory, {"x": torch.ones(1)}, step=1)
