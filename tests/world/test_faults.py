"""`find_fault`: what is certain from the records of ranks, and what is not."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pkgutil
import signal
import time

import attrs
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fnaccel import launch, world
from fnaccel.errors import ArgumentError
from fnaccel.world import record_board
from fnaccel.world.calls import NAMES, CallLog
from fnaccel.world.rank_record import RankRecord, process_state
from fnaccel.world.record_board import RecordBoard
from fnaccel.world.stalls import find_fault


def record(rank, names, **more):
    return RankRecord(rank=rank, calls=len(names), names=names[-NAMES:], **more)


NAME = st.sampled_from(["step", "gather", "save"])


@given(st.lists(NAME, min_size=1), st.integers(0, 5))
def test_ranks_that_are_behind_are_no_fault(names, behind):
    me = record(0, names, inside=True)
    assert find_fault(me, [record(1, names[: max(0, len(names) - behind)], inside=True)]) is None


@given(st.lists(NAME, max_size=2 * NAMES), st.lists(NAME, max_size=3), st.lists(NAME, max_size=3))
def test_the_first_call_that_differs_is_named_alike_on_both(names, mine, theirs):
    me, other = record(0, [*names, "gather", *mine]), record(1, [*names, "save", *theirs])
    number = len(names) + 1
    said = find_fault(me, [other]), find_fault(other, [me])
    assert f"call {number} of this world is gather on rank 0 and save on rank 1" in said[0]
    assert said[0] == said[1]


def test_a_rank_that_left_counts_if_it_will_not_make_the_call():
    me = record(0, ["step"] * 3, inside=True)
    before = record(1, ["step"] * 2, left="exited")
    assert "rank 0 waits in call 3, step, for rank 1, which exited, after call 2, step" in find_fault(
        me, [before]
    )
    assert find_fault(me, [record(1, ["step"] * 3, left="exited")]) is None, "it has made the call"
    inside = record(1, ["step"] * 3, left="ended with ValueError", failed=True)
    assert "which ended with ValueError, in call 3, step" in find_fault(me, [inside])


def test_a_rank_that_left_for_another_one_is_not_to_blame():
    me = record(0, ["step"] * 3, inside=True)
    follower = record(1, ["step"] * 3, left="ended with PeerLostError", failed=True, follows=True)
    assert find_fault(me, [follower]) is None
    culprit = record(2, ["step"], left="exited")
    assert "rank 2" in find_fault(me, [follower, culprit])


def test_a_rank_whose_memory_ran_out_in_a_call_counts_if_this_rank_only_waits_there():
    other = record(1, ["step", "step", "fit"], inside=True, abandoned=2, why="whose memory ran out in it")
    me = record(0, ["step", "step"], inside=True)
    assert "rank 0 waits in call 2, step, for rank 1, whose memory ran out in it" in find_fault(me, [other])
    assert find_fault(me, [other], idle=False) is None, "its own memory may run out, too"
    assert find_fault(record(0, ["step", "step"]), [other]) is None, "it has raised, too"
    assert find_fault(record(0, ["step"], inside=True), [other]) is None
    assert find_fault(record(0, [], inside=True), [record(1, [])]) is None


def test_records_survive_a_store():
    whole = record(3, ["a", "b"], inside=True, line="train.py:3", left="left", failed=True, ports=(4, 5))
    assert RankRecord.of_text(whole.text()) == whole


def keep_store(ready):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready.send(store.port)
    signal.pause()


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while process_state(pid) != "T":
        time.sleep(0.01)


@pytest.mark.long
def test_a_board_raises_while_its_store_is_stopped_and_can_be_used_again(monkeypatch):
    monkeypatch.setattr(record_board, "STORE", 1.0)
    ready, of_child = multiprocessing.Pipe()
    keeper = multiprocessing.get_context("fork").Process(target=keep_store, args=(of_child,))
    keeper.start()
    try:
        store = dist.TCPStore("127.0.0.1", ready.recv(), is_master=False, wait_for_workers=False)
        boards = [RecordBoard(store, rank, 2, functools.partial(RankRecord, rank=rank)) for rank in range(2)]
        boards[1].post()
        stop(keeper.pid)
        with pytest.raises(RuntimeError):
            boards[0].read()
        assert not boards[0].answers_again()
        os.kill(keeper.pid, signal.SIGCONT)
        while not boards[0].answers_again():
            time.sleep(0.01)
        assert boards[0].read() == [RankRecord(rank=1)]
        stop(keeper.pid)
        with pytest.raises(RuntimeError):
            boards[0].read()
        keeper.kill()
        keeper.join()
        with pytest.raises(RuntimeError, match="has ended"):
            boards[0].answers_again()
    finally:
        keeper.kill()
        keeper.join()


def test_where_a_rank_is_has_one_record():
    """No second class that holds a rank's phase, its calls or its departure: all who ask read `RankRecord`."""
    records = set()
    for package in (world, launch):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type) and attrs.has(value):
                    names = {field.name.lstrip("_") for field in attrs.fields(value)}
                    if names & {"phase", "position", "inside", "sequence", "left", "age", "beat"}:
                        records.add(value)
    assert records == {RankRecord}


def test_a_call_inside_of_a_call_is_no_call_of_its_own():
    log = CallLog()
    log.run("outer", lambda: log.run("inner", lambda: None))
    assert (log.count, list(log.newest), log.thread) == (1, [(1, "outer")], None)


def test_what_a_failed_collective_raises_is_replaced_once():
    log = CallLog()
    log.explain = lambda name, error: ArgumentError(f"{name}: {error}", where="here", fix="none")

    def fail():
        raise RuntimeError("closed by peer")

    with pytest.raises(ArgumentError, match="outer: closed by peer") as caught:
        log.run("outer", lambda: log.run("inner", fail))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (log.failed, log.thread) == (1, None)
    assert log.failed_at.startswith("test_faults.py:")
