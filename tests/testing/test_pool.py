"""RankPool: results in rank order, failures with their rank, no process left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from fnaccel.errors import ArgumentError, LaunchError, WorldError
from fnaccel.testing import RankPool, RankPools
from fnaccel.world import world
from tests.tiny_models import program, whole_params


def who(greeting, *, mark):
    here = world.current()
    total = torch.tensor([here.rank])
    dist.all_reduce(total)
    return f"{greeting} {here.rank} of {here.size}{mark}", total.item(), torch.get_num_threads()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_is_in_a_world(pools, size):
    expected = [(f"rank {rank} of {size}!", size * (size - 1) // 2, 1) for rank in range(size)]
    assert pools.run(size, who, "rank", mark="!") == expected


def process_id():
    return os.getpid()


def test_processes_are_kept(pools):
    first, second = pools.run(2, process_id), pools.run(2, process_id)
    assert first == second == pools.pool(2).pids
    assert os.getpid() not in first


def train():
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad, x


def test_tensors_and_gradients_come_back(pools):
    torch.ones(1, requires_grad=True).sum().backward()  # a parent that has run a backward may fork
    with RankPool(1) as pool:
        [(grad, x)] = pool.run(train)
    assert grad.tolist() == [2.0, 2.0, 2.0]
    assert x.requires_grad


def fail(ranks, kind):
    rank = world.current().rank
    if rank in ranks:
        if kind == "fnaccel":
            raise WorldError(f"no rank {rank}", where="here", fix="there")
        if kind == "unpicklable":
            raise OSError(threading.Lock())
        if kind == "pytest":
            pytest.fail("said so")
        raise KeyError(rank)
    return rank


def test_the_lowest_rank_that_failed_is_raised(pools):
    with pytest.raises(WorldError) as caught:
        pools.run(3, fail, [1, 2], "fnaccel")
    assert (caught.value.what, caught.value.fix) == ("no rank 1", "there")
    assert "on rank 1:\nTraceback" in caught.value.__notes__[0]
    with pytest.raises(KeyError, match="2"):
        pools.run(3, fail, [2], "key")
    for kind in ("unpicklable", "pytest"):
        with pytest.raises(LaunchError, match="a rank failed on rank 0"):
            pools.run(3, fail, [0, 1, 2], kind)
    assert pools.run(3, fail, [], "none") == [0, 1, 2]


def one_ahead():
    if world.current().rank == 0:
        raise KeyError("before the collective")
    return dist.all_reduce(torch.ones(1), async_op=True) is not None


def test_a_failed_run_leaves_nothing_for_the_next(pools):
    pools.run(2, process_id)
    with pytest.raises(KeyError, match="before the collective"):
        pools.run(2, one_ahead)
    assert pools.run(2, who, "rank", mark="")[1][:2] == ("rank 1 of 2", 1)


def hang():
    if world.current().rank == 1:
        threading.Event().wait()


def die():
    if world.current().rank == 1:
        os._exit(3)
    dist.barrier()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def crash():
    if world.current().rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (hang, "rank 1 did not return from hang"),
        # rank 0's own error, if it notices before the pool does
        (die, "rank 1 died in die: exit code 3|Connection (closed|reset) by peer"),
        (crash, "rank 1 died in crash: signal SIGSEGV"),
    ],
)
def test_a_pool_survives_its_ranks(fn, message):
    with RankPool(2) as pool:
        before = pool.run(process_id)
        pool.timeout = 0.5 if fn is hang else 60.0
        with pytest.raises((LaunchError, RuntimeError), match=message) as caught:
            pool.run(fn)
        assert fn is die or f"in {fn.__name__}" in caught.value.__notes__[0]
        assert not any(alive(pid) for pid in before) or fn is die
        pool.timeout = 60.0
        after = pool.run(process_id)
        assert before[1] != after[1]
    assert not any(alive(pid) for pid in [*before, *after])


def test_ranks_are_not_forked_from_a_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError, match="part of a process group"), RankPool(1):
            pass
    finally:
        dist.destroy_process_group()


def test_sizes_and_reuse():
    with pytest.raises(ArgumentError, match="0 ranks"):
        RankPool(0)
    with RankPools([1]) as started:
        assert len(started.pool(1).pids) == 1
        first = started.run(1, process_id)
        started.close()
        assert started.run(1, process_id) != first


def meshes(groups):
    """Whether sharded parameters lie on the mesh of their own train step, and can be gathered."""
    for _ in range(groups):  # names of groups are numbers: another world counts them anew
        dist.new_group([0, 1, 2, 3])
    train_step = program(strategy="hsdp(2, 2)")
    state = train_step.init(seed=0)
    whole_params(state)
    return all(value.device_mesh is train_step.mesh.device for value in state.params.values())


def test_a_new_group_does_not_meet_the_meshes_of_the_last_one():
    with RankPool(4) as pool:
        assert pool.run(meshes, 10) == [True] * 4
        pool._renew = True
        assert pool.run(meshes, 0) == [True] * 4


KEPT = []


def let_go():
    KEPT.clear()
    return world.current().rank


def test_a_fork_does_not_wait_for_threads_of_a_world_that_is_over():
    # the destructor of a group joins its threads, which a fork does not have
    with world.start(device="cpu"):
        program(strategy="ddp")
        KEPT.append(dist.group.WORLD)
    gc.collect()
    with RankPool(2) as pool:
        KEPT.clear()
        assert pool.run(let_go) == [0, 1]
