"""World on real ranks: who runs what, in which order."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from pathlib import Path

import pytest

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current


def decorated():
    world = current()
    return (
        world.on_main(lambda: "main")(),
        world.on_process(1)(lambda: "one")(),
        world.on_local_main(lambda: "local")(),
        world.on_last(lambda: "last")(),
        world.on_local_process(1)(lambda: "second here")(),
        world.is_last,
        (world.rank, world.size, world.is_main, world.is_local_main),
    )


def test_decorators_run_on_the_ranks_they_name(pools):
    first, second = pools.run(2, decorated)
    assert first == ("main", None, "local", None, None, False, (0, 2, True, True))
    assert second == (None, "one", None, "last", "second here", True, (1, 2, False, False))


def printed():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        current().print("hello", end="!")
    return out.getvalue()


def test_print_is_the_main_ranks(pools):
    assert pools.run(2, printed) == ["hello!", ""]


def printed_in_order(several):
    out = io.StringIO()
    fa.print_in_order("rank", current().rank if several else "x", sep="=", file=out)
    return out.getvalue()


def test_every_line_is_printed_in_the_order_of_ranks(pools):
    assert pools.run(3, printed_in_order, True) == [
        "[rank 0] rank=0\n[rank 1] rank=1\n[rank 2] rank=2\n",
        "",
        "",
    ]
    assert pools.run(1, printed_in_order, False) == ["rank=x\n"]


def in_turn(folder):
    world = current()
    mark = Path(folder) / "made"
    with world.main_first():
        if world.is_main:
            time.sleep(0.05)  # were the others not waiting, they would not find the file
            mark.write_text("done")
        found = mark.read_text()
    world.barrier()
    return found


def test_main_goes_first(pools, tmp_path):
    assert pools.run(3, in_turn, str(tmp_path)) == ["done"] * 3


def failing_first():
    world = current()
    try:
        with world.main_first():
            if world.is_main:
                raise ValueError("no luck")
    except ValueError:
        return "raised"
    return "went on"


def test_an_error_on_main_does_not_hold_the_others(pools):
    assert pools.run(2, failing_first) == ["raised", "went on"]


def test_a_thread_starts_without_a_world():
    found = []

    def ask():
        try:
            fa.gather(1)
        except errors.NoWorldError as error:
            found.append(error)

    with fa.start():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert found


def test_worlds_nest_and_end():
    with fa.start() as outer:
        with fa.start() as inner:
            assert current() is inner
        assert current() is outer
    with pytest.raises(errors.NoWorldError):
        current()


def fork_beside_a_lost_group():
    """A child that collects garbage, where a process group of the parent is garbage."""
    import gc
    import os
    import time

    import torch
    import torch.distributed as dist

    class Box:
        pass

    box = Box()
    box.itself, box.group = box, dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=box.group)
    known = dist.distributed_c10d._world
    for table in (
        known.pg_map,
        known.pg_names,
        known.pg_group_ranks,
        known.pg_backend_config,
        known.pg_to_tag,
    ):
        table.pop(box.group, None)
    for groups in known.tags_to_pg.values():
        if box.group in groups:
            groups.remove(box.group)
    gc.disable()
    try:
        del box
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def test_a_child_does_not_collect_its_parents_groups(pools):
    assert pools.run(2, fork_beside_a_lost_group) == [True, True]
