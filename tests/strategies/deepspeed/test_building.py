"""The first build of an extension: its line, its lock after a kill, and locks of other programs. Nothing is compiled."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from fnaccel.strategies.deepspeed import building
from fnaccel.strategies.deepspeed.comm import begin

NAME = "deepspeed_shm_comm"
KILLED = f"""
import os, signal, sys
from pathlib import Path
from fnaccel.strategies.deepspeed.building import building
with building("{NAME}"):
    Path(sys.argv[1], "lock").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / NAME
    folder.mkdir()
    return folder


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def build(folder, caplog):
    """Build as torch does, and return whether torch would wait for a lock."""
    with caplog.at_level(logging.WARNING, logger="fnaccel"), building.building(NAME):
        if (folder / "lock").exists():
            return True
        (folder / f"{NAME}.so").touch()
        return False


@pytest.mark.long
def test_one_line_before_the_first_build_only(folder, caplog):
    assert not build(folder, caplog)
    assert lines(caplog) == [f"compiling shm_comm, once, about 100 s: {folder}"]
    assert not build(folder, caplog)
    assert len(lines(caplog)) == 1


@pytest.mark.long
def test_the_lock_of_a_killed_build_is_removed(folder, caplog):
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert (folder / "lock").exists()
    assert not build(folder, caplog), "torch would wait for it without end"
    assert not (folder / "lock").exists()
    (folder / "lock").touch()
    assert build(folder, caplog), "that build has ended well: this lock is of another program"


@pytest.mark.parametrize("age", [10, building.STALE + 10])
def test_a_lock_of_another_program_stays_and_is_named_if_it_is_old(folder, caplog, age):
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    assert build(folder, caplog)
    assert lock.exists()
    old = [
        f"{lock} is older than 15 minutes: if no build is running, remove it. DeepSpeed waits for it without end"
    ]
    assert lines(caplog) == (old if age > building.STALE else [])
    assert build(folder, caplog)
    assert lock.exists(), "a process that waits for the lock of another program does not own it"


def test_an_error_of_a_build_leaves_no_lock_for_the_next(folder, caplog):
    with pytest.raises(ZeroDivisionError), building.building(NAME):
        1 / (folder / "lock").write_text("")
    assert not build(folder, caplog)


def test_two_builds_follow_each_other(folder, caplog):
    inside, seen = threading.Event(), []

    def second():
        with building.building(NAME):
            seen.append(inside.is_set())

    with building.building(NAME):
        thread = threading.Thread(target=second)
        thread.start()
        inside.set()
    thread.join(60)
    assert seen == [True]


def test_deepspeed_builds_inside_of_it():
    class Builder:
        name = NAME

        def jit_load(self, verbose=True):
            return self.name, verbose

    building.guard(Builder)
    guarded = Builder.jit_load
    building.guard(Builder)
    assert Builder.jit_load is guarded
    assert Builder().jit_load(False) == (NAME, False)
    assert begin.__globals__["guard"] is building.guard


def test_the_builders_of_deepspeed_have_what_is_guarded():
    from deepspeed.ops.op_builder import builder
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    for kind in (CPUAdamBuilder, ShareMemCommBuilder):
        assert kind.jit_load is builder.OpBuilder.jit_load
    assert ShareMemCommBuilder.NAME == NAME
