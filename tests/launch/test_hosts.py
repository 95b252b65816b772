"""Host files, names and DeepSpeed's filters to a list of hosts."""

from __future__ import annotations

import pytest

from fnaccel.errors import ConfigError, LaunchError
from fnaccel.launch.carriers.hosts import Host, parse_filter, parse_host, ranks_of_each, read_hosts
from fnaccel.launch.sections import HostsRecipe

FOUR = "w0:4,w1:4,w2:4"


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("gpu1", Host(name="gpu1")),
        ("gpu1 slots=4", Host(name="gpu1", slots=4)),
        ("  gpu1\tslots=4  # old", Host(name="gpu1", slots=4)),
        ("gpu1:8", Host(name="gpu1", slots=8)),
        ("me@10.0.0.1 slots=2 max_slots=4", Host(name="me@10.0.0.1", slots=2)),
        ("gpu1 max-slots=4", Host(name="gpu1")),
        ("# gpu1", None),
        ("", None),
    ],
)
def test_a_line_of_a_host_file(line, host):
    assert parse_host(line, "f") == host


@pytest.mark.parametrize("line", ["gpu1 4", "gpu1 slots=x", "a b", "gpu1 slots=0", "gpu1:0"])
def test_other_lines_are_errors(line):
    with pytest.raises(LaunchError):
        parse_host(line, "hosts.txt")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, [("w0", 4, None), ("w1", 4, None), ("w2", 4, None)]),
        ({"include": "w1"}, [("w1", 4, None)]),
        ({"include": "w2@w0:1,3"}, [("w0", 2, (1, 3)), ("w2", 4, None)]),
        ({"include": "w0:0-2"}, [("w0", 3, (0, 1, 2))]),
        ({"exclude": "w1"}, [("w0", 4, None), ("w2", 4, None)]),
        ({"exclude": "w1:0@w0"}, [("w1", 3, (1, 2, 3)), ("w2", 4, None)]),
        ({"exclude": "w1:0,1,2,3"}, [("w0", 4, None), ("w2", 4, None)]),
    ],
)
def test_filters(chosen, expected):
    hosts = read_hosts(HostsRecipe(names=FOUR, **chosen))
    assert [(host.name, host.slots, host.gpus) for host in hosts] == expected


def test_a_file_and_names_together(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("# all\nw1 slots=2\n\nw2 slots=2\n")
    hosts = read_hosts(HostsRecipe(names="w0:2", file=str(path)))
    assert [host.name for host in hosts] == ["w0", "w1", "w2"]
    assert ranks_of_each(hosts, None) == 2
    assert ranks_of_each(hosts, 1) == 1


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({}, "no hosts to start on"),
        ({"names": "a,a"}, "a is named twice"),
        ({"names": FOUR, "include": "w3"}, "names w3, which is no host"),
        ({"names": FOUR, "include": "w0:4"}, "names slot 4, and w0 has the slots 0 to 3"),
        ({"names": "w0", "exclude": "w0:0"}, "unknown number of slots"),
        ({"names": FOUR, "exclude": "w0@w1@w2"}, "no hosts to start on"),
        ({"names": FOUR, "include": "w0:a"}, "chooses no hosts"),
        ({"file": "missing.txt"}, "no host file missing.txt"),
    ],
)
def test_mistakes(recipe, says):
    with pytest.raises(LaunchError, match=says):
        read_hosts(HostsRecipe(**recipe))


def test_hosts_get_as_many_ranks_each():
    hosts = read_hosts(HostsRecipe(names="a:4,b:2"))
    assert ranks_of_each(hosts, 2) == 2
    with pytest.raises(LaunchError, match="different numbers of slots: 2, 4") as raised:
        ranks_of_each(hosts, None)
    assert "-n 2" in raised.value.fix
    with pytest.raises(LaunchError, match="b has 2 slots"):
        ranks_of_each(hosts, 3)
    assert ranks_of_each([Host(name="a")], None) is None


def test_the_grammar_of_deepspeed():
    """The examples of DeepSpeed's own parser."""
    assert parse_filter("worker-0@worker-1:0,2") == {"worker-0": (), "worker-1": (0, 2)}
    assert parse_filter("worker-1:0") == {"worker-1": (0,)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"names": ","}, "',' names nothing"),
        ({"include": "a"}, "there are none"),
        ({"exclude": "a"}, "there are none"),
    ],
)
def test_hosts_that_name_nothing_are_not_this_machine(options, says):
    with pytest.raises(ConfigError, match=says):
        HostsRecipe(**options)
    assert HostsRecipe(names="").names == ()
