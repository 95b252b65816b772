"""Which rank keeps the others waiting: the pure functions of the watchdog."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path

import pytest

import fnaccel as fa
from fnaccel.cli.launch import read
from fnaccel.errors import WorldError
from fnaccel.launch.failure import Failure, describe
from fnaccel.launch.job import Job
from fnaccel.launch.variables import variables
from fnaccel.world import calls, progress_marks
from fnaccel.world.hang_report import CODE, report
from fnaccel.world.progress_marks import enter, enter_step
from fnaccel.world.rank_record import RankRecord, SharedRecords, process_state
from fnaccel.world.stacks import own_stacks, shorten
from fnaccel.world.stalls import StallClock, judge, steps_apart

LIMIT = 10.0


def ranks(*positions, age=11.0, **views):
    """Records of ranks in step 5 that are past the limit, each with its own changes."""
    past = {"sequence": 9, "first": False, "shares": True, "step": 5, "of": "a", "age": age, **views}
    return [RankRecord(**past | changes | {"rank": rank}) for rank, changes in enumerate(positions)]


WAITS = {"phase": "gradients", "inside": True, "calls": 7, "names": ["train_step(state, batch)"]}
LOOKS = {"phase": "evaluate", "inside": True, "calls": 7, "names": ["train_step.look(state, fn)"]}
DATA = {"phase": "data", "age": 51.0}
STAGE = {"phase": "forward", "micro_batch": 3, "stage": 1, "does": "runs stage 1"}
BEHIND = {"phase": "backward", "micro_batch": 0, "stage": 0, "does": "waits for stage 1"}
STOPPED = {"state": "T", "stopped": 11.0}


@pytest.mark.parametrize(
    ("positions", "culprits", "what"),
    [
        ([WAITS, DATA], (1,), "rank 1 has waited 51 s for its next batch, in step 5, and rank 0 waits for it"),
        ([DATA, WAITS, DATA, WAITS], (0, 2), "ranks 0, 2 have waited 51 s for their next batch"),
        ([WAITS, DATA | STOPPED], (1,), "rank 1 was stopped 11 s ago, and rank 0 waits for it"),
        ([{"phase": "save"}, {"phase": "init"} | STOPPED], (1,), "rank 1 was stopped"),
        ([WAITS, WAITS | {"step": 6}, WAITS, WAITS], (1,), "rank 0 runs step 5, rank 1 runs step 6"),
        ([WAITS, WAITS | {"step": 6}], (0, 1), "ranks run different steps"),
        ([WAITS, WAITS | {"step": 0, "first": True}], (0, 1), "ranks run different steps"),
        ([WAITS, WAITS | {"of": "b"}], (0, 1), "rank 0 runs step 5 of a, rank 1 runs step 5 of b"),
        ([WAITS, {"phase": "forward", "inside": True}], (1,), "rank 1 has been in step 5, forward"),
        ([{"phase": "backward"}, {"phase": "forward", "micro_batch": 1}], (0,), "rank 0 has been in step 5, backward"),
        ([STAGE, BEHIND], (0,), "rank 0 has been in step 5, forward, micro-batch 3, stage 1 for 11 s, and rank 1 waits for it. Last, rank 0 runs stage 1"),
        ([WAITS, WAITS], (), "all ranks have been in gradients for 11 s, in step 5"),
        ([DATA, DATA], (), "all ranks have waited 51 s for their next batch"),
        ([{"phase": "outside", "inside": True, "names": ["world.barrier"]}] * 2, (), "all ranks have been in world.barrier"),
        ([WAITS, {"phase": "outside", "age": 51.0}], (1,), "rank 1 has been in code of the script for 51 s"),
        ([WAITS, {"sequence": 0, "first": True, "silent": 9.0}], (1,), "rank 1 does not answer"),
        ([WAITS, WAITS | {"silent": 9.0}], (1,), "rank 1 does not answer, and rank 0 waits for it"),
        ([LOOKS, LOOKS | {"calls": 8}], (1,), "rank 1 has ended call 7, train_step.look(state, fn), and rank 0 still waits in it"),
        ([LOOKS, LOOKS | {"calls": 8}, LOOKS], (1,), "and ranks 0, 2 still wait in it"),
        ([LOOKS, WAITS | {"calls": 8, "phase": "forward"}], (1,), "rank 1 has ended call 7"),
        ([LOOKS | {"age": 51.0}, {"phase": "outside", "calls": 7, "age": 51.0}], (1,), "rank 1 has been in code of the script"),
        ([WAITS | {"first": True, "age": 301.0}] * 2, (), "all ranks have been in gradients for 301 s"),
        ([WAITS | {"does": "gathers a"}, WAITS | {"does": "calls fa.reduce"}], (), "s, in step 5. Last, rank 0 gathers a, and rank 1 calls fa.reduce"),
        ([WAITS | {"does": "gathers a"}, WAITS | {"phase": "forward"}], (1,), "rank 0 waits for it. Last, rank 0 gathers a, and rank 1 no part"),
        ([WAITS | {"shares": False, "first": True, "age": 301.0}, {"sequence": 0, "shares": False, "first": True, "age": 301.0}], (1,), "rank 1"),
    ],
)  # fmt: skip
def test_the_rank_that_keeps_the_others_waiting(positions, culprits, what):
    finding = judge(ranks(*positions), LIMIT)
    assert finding is not None
    assert finding.ranks == culprits
    assert what in finding.what


@pytest.mark.parametrize(
    "positions",
    [
        [WAITS, WAITS | {"age": 9.0}],
        [WAITS, {"phase": "outside"}],
        [WAITS, {"phase": "evaluate", "age": 49.0}],
        [WAITS, DATA | {"age": 49.0}],
        [WAITS, {"phase": "compile", "age": 9e9}],
        [WAITS, {"phase": "save", "age": 9e9}],
        [WAITS, {"phase": "init", "age": 299.0}],
        [WAITS, {"phase": "restore", "age": 9e9}],
        [WAITS, DATA | {"first": True, "age": 299.0}],
        [WAITS | {"first": True}, WAITS | {"first": True}],
        [WAITS, DATA | {"sequence": 0}],
        [WAITS, {"phase": "save", "silent": 9.0}],
        [WAITS | {"first": True}, {"sequence": 0, "silent": 9.0}],
        [WAITS, DATA | {"state": "t"}],
        [WAITS, DATA | {"state": "T", "stopped": 9.0}],
        [WAITS | {"shares": False, "inside": False}, DATA | {"shares": False} | STOPPED],
        [{"phase": "outside", "age": 9e9}] * 2,
    ],
)
def test_no_alarm(positions):
    assert judge(ranks(*positions), LIMIT) is None


def test_ranks_that_go_on_steps_apart():
    views = ranks(WAITS, WAITS | {"step": 7}, WAITS, age=0.0)
    assert steps_apart(views)
    assert judge(views, LIMIT, apart=9.0) is None
    finding = judge(views, LIMIT, apart=10.0)
    assert finding is not None
    assert finding.ranks == (1,)
    assert "rank 0 at step 5, rank 1 at step 7, rank 2 at step 5" in finding.what
    assert not steps_apart(ranks(WAITS, WAITS | {"step": 6}))
    assert not steps_apart(ranks(WAITS, WAITS | {"step": 7, "shares": False}))
    assert not steps_apart(ranks(WAITS, WAITS | {"step": 7, "of": "another"}))


def test_time_in_which_the_observer_was_suspended_does_not_count():
    clock = StallClock(1.0)
    ages = []
    for now, sequence, state in ((0, 3, "S"), (1, 3, "T"), (100, 3, "T"), (101, 4, "S")):
        clock.tick(float(now))
        record = clock.see(RankRecord(sequence=sequence), state)
        ages.append((record.age, record.stopped))
    assert ages == [(0.0, 0.0), (1.0, 1.0), (3.0, 3.0), (0.0, 0.0)]


def test_the_state_of_a_process():
    assert process_state(os.getpid()) in {"R", "S"}
    assert process_state(2**22 + 1) == ""


def test_a_record_holds_the_newest_mark_and_call():
    records = SharedRecords.make(2)
    log = calls.CallLog()
    end = records.write(1)
    try:
        enter_step(7, "TrainStep(plain)", first=False, shares=True)
        enter("backward", 2)
        log.run("fa.gather", enter, "update")
    finally:
        end()
    enter("outside")  # nobody listens any more
    log.run("fa.reduce", lambda: None)
    assert records.read(0) == RankRecord()
    found = records.read(1)
    records.close()
    assert (found.phase, found.step, found.first, found.shares) == ("update", 7, False, True)
    assert (found.of, found.calls, found.names, found.inside) == (
        "TrainStep(plain)",
        1,
        ("fa.gather",),
        False,
    )
    assert found.sequence == 4
    assert not calls.LISTENERS


def test_a_record_says_what_a_phase_has_begun_last():
    records = SharedRecords.make(1)
    log = calls.CallLog()
    end = records.write(0)
    try:
        enter("forward")
        log.run("train_step", log.run, "fa.reduce", lambda: None)
        inside = records.read(0)
        enter("update")
    finally:
        end()
    assert (inside.does, inside.names) == ("calls fa.reduce", ("train_step",))
    assert records.read(0).does == ""
    records.close()


def test_forks_do_not_write():
    records = SharedRecords.make(1)
    end = records.write(0)
    enter("data")
    pid = os.fork()
    if pid == 0:
        progress_marks.enter("update")
        os._exit(0)
    os.waitpid(pid, 0)
    end()
    assert records.read(0).phase == "data"
    records.close()
    progress_marks.enter("outside")


def test_a_dump_becomes_the_stack_of_the_main_thread_and_of_threads_that_matter():
    package = Path(calls.__file__).parents[1]
    dump = f"""Thread 0x0000000000000002 (most recent call first):
  File "{package}/world/watcher.py", line 3 in _watch
  File "/lib/threading.py", line 9 in run

Current thread 0x0000000000000003 (most recent call first):
  File "loader.py", line 4 in read

Thread 0x0000000000000001 (most recent call first):
  File "{package}/engine/eager.py", line 30 in four
  File "{package}/engine/eager.py", line 20 in three
  File "{package}/engine/eager.py", line 20 in two
  File "{package}/engine/eager.py", line 10 in one
  File "train.py", line 2 in <module>
  File "{package}/launch/rank.py", line 5 in live
  File "bin/fnaccel", line 6 in <module>
"""
    lines = shorten(dump, 1).splitlines()
    names = [line.rpartition(" ")[2] for line in lines if "File" in line or "frames" in line]
    assert names == ["<module>", "one", "fnaccel", "four", "read"]
    assert "  ... 2 frames of fnaccel" in lines


def test_the_loop_of_the_script_is_shown_above_a_deep_model():
    library = Path(threading.__file__).parent
    deep = [f'  File "{library}/module.py", line {number} in call' for number in range(40)]
    frames = ['  File "model.py", line 9 in forward', *deep, '  File "train.py", line 7 in loop']
    dump = "\n".join(["Thread 0x0000000000000001 (most recent call first):", *frames])
    names = [
        line.rpartition(" ")[2] for line in shorten(dump, 1).splitlines() if "File" in line or "..." in line
    ]
    assert names == ["loop", "frames", *["call"] * 29, "forward"]


def test_the_place_of_a_call_is_the_line_that_makes_it():
    log = calls.CallLog()

    def loss():  # of the script too, and inside of the call
        return log.place()

    place = log.run("train_step(state, batch)", loss)
    line = inspect.currentframe().f_lineno - 1
    assert place == f"{Path(__file__).name}:{line}"


def test_own_stacks_name_this_test():
    text = own_stacks(threading.main_thread().ident or 0)
    assert "in test_own_stacks_name_this_test" in text


def test_the_report_has_a_table_and_the_stacks():
    views = ranks(WAITS, DATA | STOPPED, WAITS | {"silent": 9.0}, host="h", pid=4)
    finding = judge(views, LIMIT)
    assert finding is not None
    text = report(finding, views, {0: '  File "train.py", line 3, in <module>'}, limit=LIMIT)
    assert text.startswith(
        "PeerLostError: rank 1 was stopped 11 s ago, and ranks 0, 2 wait for it\n  where: rank 1: "
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "4", "stopped", "5", "data", "51", "none"] in lines
    assert [
        "0",
        "4",
        "unknown",
        "5",
        "gradients",
        "11",
        "7",
        "train_step(state,",
        "batch),",
        "inside",
    ] in lines
    assert "rank 0, most recent call last:\n  File" in text
    assert "rank 1: no stack, its process is stopped" in text
    assert "rank 2: no stack, it does not answer" in text
    assert text.endswith("the watchdog (limit 10 s) ended the job with exit code 76")
    failure = Failure(rank=1, code=CODE, when=0.0, text=text, hung=True)
    assert describe(failure, Job(script="train.py")) == text


def test_the_limit_reaches_the_ranks_of_several_machines():
    assert read(["train.py"]).watchdog == 120
    job = read(["--watchdog", "30", "-n", "2", "train.py"])
    one, several = (variables(job, 0, port=1, environ={}, several=several) for several in (False, True))
    assert (one["FNACCEL_WATCHDOG"], one["FNACCEL_LAUNCHER_WATCHDOG"]) == ("0", "30")
    assert (several["FNACCEL_WATCHDOG"], several["FNACCEL_LAUNCHER_WATCHDOG"]) == ("30", "0")


@pytest.mark.parametrize(
    ("environ", "given", "limits"),
    [
        ({}, {}, (7200.0, 600.0)),
        ({}, {"watchdog": 600}, (36_000.0, 600.0)),
        ({}, {"watchdog": 0}, (600.0, 600.0)),
        ({}, {"watchdog": 1}, (600.0, 600.0)),
        ({}, {"timeout": 5}, (5, 5)),
        ({"FNACCEL_WATCHDOG": "0", "FNACCEL_LAUNCHER_WATCHDOG": "300"}, {}, (18_000.0, 600.0)),
        ({"FNACCEL_WATCHDOG": "0", "FNACCEL_LAUNCHER_WATCHDOG": "0"}, {}, (600.0, 600.0)),
    ],
)
def test_a_collective_may_take_longer_than_all_limits_of_the_watchdog(monkeypatch, environ, given, limits):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **environ}.items():
        monkeypatch.setenv(name, value)
    joins = []

    def join(ranks, device, backend, timeout, environ, *, joining):
        joins.append((timeout, joining))
        raise WorldError("no other rank", where="this test", fix="none")

    monkeypatch.setattr("fnaccel.world.world.join", join)
    with pytest.raises(WorldError, match="no other rank"):
        fa.start(device="cpu", **given)
    assert joins == [limits]
