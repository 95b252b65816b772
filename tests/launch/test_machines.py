"""Two machines: two network namespaces with a cable between them, and a launcher in each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

from tests.launch.conftest import LIMIT, buffered

pytestmark = [pytest.mark.long, pytest.mark.launcher, pytest.mark.netns]

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


WORK = """
import time, torch, fnaccel as fa
from pathlib import Path
with fa.start(device="cpu") as world:
    Path(f"rank{world.rank}of{world.size}").touch()
    while fa.reduce(torch.tensor(float(Path("enough").exists()))).item() == 0:
        time.sleep(0.02)
print("finished", world.rank, world.size, flush=True)
"""


def wait_for(folder, *names):
    end = time.monotonic() + LIMIT
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end, [path.name for path in folder.iterdir()]
        time.sleep(0.05)
    for name in names:
        (folder / name).unlink()


@pytest.mark.long  # a machine counts as lost after 15 seconds
def test_a_machine_that_is_killed_is_replaced(machines, tmp_path):
    (tmp_path / "work.py").write_text(WORK)

    def begin(name):
        flags = ["--nnodes", "1:2", "--master-addr", "10.77.0.1", "--max-restarts", "2", "-n", "1", "--cpu"]
        launch = [sys.executable, "-m", "fnaccel", "launch", *flags, "work.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            ["ip", "netns", "exec", name, *launch],
            cwd=tmp_path,
            env=buffered(),
            start_new_session=True,
            **pipes,
        )

    (first, _), (second, _) = machines
    started = [begin(first), begin(second)]
    try:
        wait_for(tmp_path, "rank0of2", "rank1of2")
        os.killpg(started[1].pid, signal.SIGKILL)  # the machine is gone: its launcher and its ranks
        started[1].communicate(timeout=LIMIT)
        wait_for(tmp_path, "rank0of1")
        started[1] = begin(second)
        wait_for(tmp_path, "rank0of2", "rank1of2")
        (tmp_path / "enough").write_text("x")
        said = [one.communicate(timeout=LIMIT) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [one.returncode for one in started] == [0, 0], said
    assert sorted(out for out, _ in said) == ["finished 0 2\n", "finished 1 2\n"]
    assert "attempt 2 of 3, with 1 rank on 1 machine" in said[0][1]
    assert "attempt 2 of 3, with 2 ranks on 2 machines" in said[0][1], (
        "a machine that joins uses up no restart"
    )
