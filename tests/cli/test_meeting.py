"""Several machines of `fnaccel test`: they begin each check together, whatever became of the last one."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest

from fnaccel.cli.selftest import meeting
from fnaccel.cli.selftest.meeting import Meeting
from fnaccel.cli.selftest.results import CheckFailedError
from fnaccel.errors import LaunchError
from fnaccel.launch.network import free_port

OTHER_MACHINE = """
import sys
from fnaccel.cli.selftest.meeting import Meeting
meeting = Meeting(2, 0, "127.0.0.1", int(sys.argv[1]))
meeting.begin()
print("met", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(meeting, "JOB_PATIENCE", 1.0)
    return free_port()


def machines(port: int, nodes: int = 2, come: int = 2) -> list[Meeting]:
    return [Meeting(nodes, number, "127.0.0.1", port) for number in range(come)]


def together(*calls: Any) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        futures: list[Future[Any]] = [threads.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def test_ports_of_jobs_differ_and_are_free(port):
    first, second = machines(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))  # as the near end of a connection
        together(first.begin, second.begin)
        begun, joined = together(first.next_port, second.next_port)
        again = together(first.next_port, second.next_port)
    assert begun == joined > port + 1
    assert again[0] == again[1] > begun


@pytest.mark.parametrize("absent", [0, 1])
def test_a_check_that_one_machine_leaves_out_ends_alone(port, absent):
    both = machines(port)
    together(both[0].begin, both[1].begin)
    if absent == 0:
        with pytest.raises(CheckFailedError, match="the first machine does not run this check"):
            both[1].next_port()
    else:
        assert both[0].next_port() > port
    assert together(both[0].begin, both[1].begin) == [None, None]
    begun, joined = together(both[0].next_port, both[1].next_port)
    assert begun == joined


def test_a_machine_that_does_not_come_is_waited_for_once(port, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 1.0)
    (only,) = machines(port, come=1)
    with pytest.raises(CheckFailedError, match=r"1 of 2 machines came within 1 s"):
        only.begin()
    monkeypatch.setattr(meeting, "PATIENCE", 1000.0)
    with pytest.raises(CheckFailedError, match=r"1 of 2 machines came within 1 s"):
        only.begin()


def test_too_many_machines(port):
    three = machines(port, come=3)
    outcomes = together(*(machine.begin for machine in three))
    assert "3 machines came, and --nnodes is 2" in map(str, outcomes)


def test_the_first_machine_leaves_last(port):
    both = machines(port)
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(both[0].leave)
        with pytest.raises(FutureTimeoutError):
            left.result(0.5)
        both[1].leave()
        left.result(10.0)


@pytest.mark.long
def test_a_first_machine_that_has_ended_is_named(port):
    command = [sys.executable, "-c", OTHER_MACHINE, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        second = Meeting(2, 1, "127.0.0.1", port)
        second.begin()
        assert first.stdout.readline() == "met\n"
        first.kill()
    for call in (second.next_port, second.begin, second.begin):
        with pytest.raises(CheckFailedError, match="the first machine has ended"):
            call()


def test_a_port_that_is_taken_is_refused(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(LaunchError, match=rf"127.0.0.1:{port} can't be listened on") as caught,
    ):
        Meeting(2, 0, "127.0.0.1", port)
    assert caught.value.where == "fnaccel test --nnodes 2"
