"""Cores of ranks: the arithmetic over NUMA nodes that are not here, and real ranks that read theirs back."""

from __future__ import annotations

import itertools
import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fnaccel.cli.launch import read
from fnaccel.errors import LaunchError
from fnaccel.launch import affinity
from fnaccel.launch.affinity import nodes, parse, share
from fnaccel.launch.job import Job, check
from fnaccel.launch.variables import variables


@pytest.mark.parametrize(
    ("processes", "allowed", "grouped", "wanted"),
    [
        (2, range(4), [range(4)], [(0, 1), (2, 3)]),
        (2, range(5), [], [(0, 1, 2), (3, 4)]),
        (3, range(8), [range(4), range(4, 8)], [(0, 1), (2, 3), (4, 5, 6, 7)]),
        (1, range(8), [range(4), range(4, 8)], [(0, 1, 2, 3)]),
        (2, (1, 2, 6), [range(4), range(4, 8)], [(1, 2), (6,)]),
        (2, (4, 5), [range(4), range(4, 8)], [(4,), (5,)]),  # a mask that leaves one node out
    ],
)
def test_cores_are_shared_by_node(processes, allowed, grouped, wanted):
    assert share(processes, allowed, grouped) == wanted


@pytest.mark.parametrize(("processes", "grouped"), [(5, [range(4)]), (4, [range(1), range(1, 4)])])
def test_a_rank_without_a_core_is_an_error(processes, grouped):
    with pytest.raises(LaunchError, match="can't have cores of their own") as raised:
        share(processes, range(4), grouped)
    most = int(raised.value.fix.split()[1])
    assert len(share(most, range(4), grouped)) == most


@given(st.integers(1, 16), st.lists(st.integers(1, 12), max_size=4))
def test_no_core_is_given_twice_and_none_spans_nodes(processes, sizes):
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    grouped = [range(a, b) for a, b in itertools.pairwise(ends)]
    allowed = range(max(sum(sizes), 12))
    try:
        found = share(processes, allowed, grouped)
    except LaunchError:
        assert processes > min(sizes or [len(allowed)])
        return
    assert len(found) == processes
    every = [core for cores in found for core in cores]
    assert len(every) == len(set(every))
    for cores in found:
        assert cores == tuple(range(cores[0], cores[-1] + 1))
        assert not grouped or any(set(cores) <= set(node) for node in grouped)


def test_nodes_are_read_as_the_kernel_writes_them(tmp_path):
    for name, text in (("node10", "8\n"), ("node2", "0-1,4-5\n"), ("node3", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)
    assert nodes(tmp_path) == [[0, 1, 4, 5], [8]]
    assert nodes(tmp_path / "none") == []
    assert parse("3") == [3]


def test_the_option_and_its_check(monkeypatch):
    assert read(["--cpu", "--cpu-affinity", "t.py"]).affinity
    with pytest.raises(LaunchError, match="can't have cores"):
        check(Job(script=__file__, ranks=100, affinity=True))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(LaunchError, match="this system can't keep"):
        check(Job(script=__file__, affinity=True))


def test_threads_are_as_many_as_cores_unless_said(monkeypatch):
    monkeypatch.setattr(affinity, "cores_of", lambda local_rank, processes: (4, 5, 6))
    job = Job(script=__file__, affinity=True)
    assert variables(job, 0, port=1, environ={"OMP_NUM_THREADS": "9"})["OMP_NUM_THREADS"] == "3"
    assert (
        variables(Job(script=__file__, affinity=True, threads=2), 0, port=1, environ={})["OMP_NUM_THREADS"]
        == "2"
    )


LOOK = """
    import json, os, threading
    import torch
    found = {"main": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
             "omp": os.environ["OMP_NUM_THREADS"]}
    def inner():
        found["thread"] = sorted(os.sched_getaffinity(0))
    started = threading.Thread(target=inner)
    started.start()
    started.join()
    with open(f"rank{os.environ['RANK']}", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.launcher
@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_ranks_compute_on_their_own_cores(launcher):
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2:
        pytest.skip("needs two cores")
    ended = launcher("-n", 2, "--cpu", "--cpu-affinity", launcher.write(LOOK))
    assert ended.code == 0, ended.err
    wanted = share(2, here, nodes())
    for rank, cores in enumerate(wanted):
        seen = json.loads((launcher.folder / f"rank{rank}").read_text())
        assert seen["main"] == seen["thread"] == list(cores)
        assert seen["threads"] == len(cores)
        assert seen["omp"] == str(len(cores))
    assert sorted(os.sched_getaffinity(0)) == here
