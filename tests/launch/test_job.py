"""What can't be started is an error before anything is; the environment of a rank is a pure function."""

from __future__ import annotations

import importlib.machinery
import os
import socket
import sys

import attrs
import pytest
import torch

from fnaccel.errors import LaunchError
from fnaccel.launch.accelerators import count_accelerators
from fnaccel.launch.job import Job, check
from fnaccel.launch.network import check_port, free_port, interface_to, reserved_port
from fnaccel.launch.variables import variables
from fnaccel.world.world import detect

HERE = Job(script=__file__)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"processes": 0}, "0 processes were asked for"),
        ({"processes": -1}, "-1 processes were asked for"),
        ({"processes": 1_000_000}, "1000000 processes were asked for, and this machine has"),
        ({"threads": 0}, "compute with 0 threads"),
        ({"grace": -1.0}, "-1 seconds is in the past"),
        ({"restarts": -1}, "-1 restarts"),
        ({"min_ranks": 1}, "no restarts"),
        ({"min_ranks": 0, "restarts": 1}, "can't go on as 0"),
        ({"min_ranks": 2, "restarts": 1}, "1 ranks can't go on as 2"),
        ({"min_ranks": 1, "restarts": 1, "machines": 2}, "--nnodes MIN:MAX"),
        ({"machines": 0}, "0 machines"),
        ({"machines": 2, "min_machines": 3}, "3:2 machines"),
        ({"machines": 2, "min_machines": 0}, "0:2 machines"),
        ({"machines": 2, "machine": 2}, "no machine 2 among 2"),
        ({"machine": 1}, "no machine 1 among 1"),
        ({"script": None}, "nothing to run"),
        ({"script": "missing.py"}, "no file missing.py"),
        ({"script": os.path.dirname(__file__)}, "is a folder"),  # noqa: PTH120
        ({"module": "no_such_module.inner"}, "no module 'no_such_module.inner'"),
        ({"env": {"": "x"}}, "'' can't be the name of an environment variable"),
        ({"env": {"A=B": "x"}}, "'A=B' can't be the name"),
        ({"env": {"A": "a\0b"}}, "the environment variable A can't be"),
        ({"port": 0}, "0 is no port"),
        ({"port": 70_000}, "70000 is no port"),
    ],
)
def test_what_cannot_be_started(change, message):
    with pytest.raises(LaunchError, match=message) as raised:
        check(attrs.evolve(HERE, **change))
    assert raised.value.fix


def test_what_can(tmp_path, monkeypatch):
    check(HERE)
    check(attrs.evolve(HERE, script=None, module="fnaccel"))
    check(attrs.evolve(HERE, processes=3, machines=2, machine=1, threads=1, grace=0.0, port=free_port()))
    (tmp_path / "only_here.py").touch()
    monkeypatch.chdir(tmp_path)
    check(Job(module="only_here"))
    assert not (tmp_path / "__pycache__").exists()


def test_machines_that_may_be_fewer():
    check(attrs.evolve(HERE, machines=4, min_machines=1, machine=None))
    several = given(attrs.evolve(HERE, machines=1, machine=0), restarts=2, several=True)
    assert several["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert several["TORCHELASTIC_RESTART_COUNT"] == several["FNACCEL_RESTART_COUNT"] == "2"
    assert not [name for name in given(environ=several) if name.startswith("TORCHELASTIC")]


def test_a_module_that_only_a_finder_of_its_own_knows(monkeypatch):
    """As those of an editable install are."""

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            return importlib.machinery.ModuleSpec(name, None) if name == "installed_elsewhere" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    check(Job(module="installed_elsewhere.inner"))


def test_a_taken_port_is_an_error_where_rank_0_would_listen():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} can't be listened on"):
            check(attrs.evolve(HERE, port=port))
        check(attrs.evolve(HERE, port=port, machines=2, machine=1))
    check_port(port)


def test_free_ports_differ_and_are_free():
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert free_port() != server.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is reserved elsewhere")
def test_a_reserved_port_is_given_to_nobody_else():
    with reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for address in ("127.0.0.1", ""):  # what rank 0 does, by itself or in torch's store
            with socket.create_server((address, port)):
                pass
    check_port(port)


def test_the_interface_to_an_address():
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no.such.host.invalid") is None


def given(job=HERE, local_rank=0, **options):
    return variables(job, local_rank, **{"port": 1234, "environ": {}, "cores": 8, **options})


def test_variables_of_several_machines():
    job = attrs.evolve(HERE, processes=2, machines=3, machine=1, address="node0")
    found = given(job, 1, interface="eth0")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["GLOO_SOCKET_IFNAME"]) == (
        "node0",
        "1234",
        "eth0",
    )
    ranks = detect(found)
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == (3, 6, 1, 2)
    assert (ranks.machine, ranks.machines, ranks.source) == (1, 3, "fnaccel launch")
    assert (
        given(job, environ={"GLOO_SOCKET_IFNAME": "mine"}, interface="eth0")["GLOO_SOCKET_IFNAME"] == "mine"
    )


@pytest.mark.parametrize(
    ("change", "environ", "threads"),
    [
        ({}, {}, None),
        ({"processes": 2}, {}, "4"),
        ({"processes": 3}, {}, "2"),
        ({"processes": 16}, {}, "1"),
        ({"processes": 2}, {"OMP_NUM_THREADS": "3"}, "3"),
        ({"processes": 2, "threads": 5}, {"OMP_NUM_THREADS": "3"}, "5"),
        ({"threads": 1}, {}, "1"),
    ],
)
def test_threads_of_a_rank(change, environ, threads):
    assert given(attrs.evolve(HERE, **change), environ=environ).get("OMP_NUM_THREADS") == threads


def test_only_what_was_asked_for_is_set():
    found = given(environ={"PATH": "/bin", "FNACCEL_DEVICE": "cuda:1", "FNACCEL_OVERRIDES": "{}"})
    assert (found["PATH"], found["FNACCEL_DEVICE"]) == ("/bin", "cuda:1")
    assert "FNACCEL_OVERRIDES" not in found
    assert found["FNACCEL_RESTART_COUNT"] == "0"
    assert given(restarts=2, environ={"FNACCEL_RESTART_COUNT": "7"})["FNACCEL_RESTART_COUNT"] == "2"
    assert "GLOO_SOCKET_IFNAME" not in found
    assert (
        given(attrs.evolve(HERE, overrides={"strategy": "ddp"}))["FNACCEL_OVERRIDES"] == '{"strategy": "ddp"}'
    )


def test_accelerators_are_counted_in_another_process(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    asked = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: asked.append(1) or 4)
    assert count_accelerators() == 4
    assert asked == []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert count_accelerators() == 0
