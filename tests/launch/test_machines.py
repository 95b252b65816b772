"""Two machines: two network namespaces with a cable between them, and a launcher in each."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid

import pytest

from tests.launch.conftest import LIMIT, buffered

pytestmark = [pytest.mark.launcher, pytest.mark.netns]

SCRIPT = """
import os, torch, fnaccel as fa
with fa.start(device="cpu") as world:
    total = fa.reduce(torch.tensor([10.0 ** world.rank]))
    if world.rank == 0:  # nothing else runs in this network namespace
        lines = open("/proc/net/tcp").readlines()[1:] + open("/proc/net/tcp6").readlines()[1:]
        listening = [line.split()[1].split(":")[0] for line in lines if line.split()[3] == "0A"]
        with open("listening", "w") as file:
            print(*listening, file=file)
    print(world.machine, world.machines, world.local_rank, total.item(), os.environ["GLOO_SOCKET_IFNAME"])
"""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


@pytest.fixture
def machines():
    """(namespace, interface) of two machines; the first one has the address 10.77.0.1."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no `ip` program (Debian: iproute2)")
    mark = uuid.uuid4().hex[:6]
    names = [f"fn{mark}{side}" for side in "ab"]
    cables = [f"v{mark}{side}" for side in "ab"]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", cable, "up")
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:  # and the cables with them
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.parametrize("named", [False, True], ids=["interface found", "interface named"])
def test_ranks_of_two_machines_meet(machines, tmp_path, named):
    (tmp_path / "meet.py").write_text(SCRIPT)
    started = []
    for number, (name, cable) in enumerate(machines):
        environ = buffered()
        environ.pop("GLOO_SOCKET_IFNAME", None)
        if named:
            environ["GLOO_SOCKET_IFNAME"] = cable
        command = [
            *("ip", "netns", "exec", name, sys.executable, "-m", "fnaccel", "launch", "-n", "2"),
            *("--nnodes", "2", "--node-rank", str(number), "--master-addr", "10.77.0.1", "meet.py"),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes))
    try:
        said = [one.communicate(timeout=LIMIT) for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0, 0], said
    listening = (tmp_path / "listening").read_text().split()
    assert len(listening) >= 3, "the store and two ranks"
    assert set(listening) == {"01004D0A"}, "10.77.0.1, and no other interface"
    for number, ((_, cable), (out, _)) in enumerate(zip(machines, said, strict=True)):
        expected = [f"{number} 2 {local} 1111.0 {cable}" for local in range(2)]
        assert sorted(out.splitlines()) == expected
