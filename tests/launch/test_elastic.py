"""Several machines that may be fewer, or more later; machines that go silent; strangers on the job's port."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from fnaccel.launch.network import free_port
from tests.launch.conftest import LIMIT, gone
from tests.launch.test_in_step import attempts
from tests.launch.test_restarts import TRAIN, WAIT

pytestmark = [pytest.mark.long, pytest.mark.launcher]

QUICK = {
    "fnaccel.launch.elastic.FIRST_CALL": 1.5,
    "fnaccel.launch.elastic.LAST_CALL": 0.5,
    "fnaccel.launch.elastic.LINGER": 1.0,
}
MEET = """
    import os, fnaccel as fa
    for _ in range(2):  # a world that ends, and another one
        with fa.start(device="cpu") as world:
            world.barrier()
    print(world.rank, world.size, os.environ["GROUP_RANK"], flush=True)
"""

SLEEP = """
    import os, time
    with open(f"pid{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(100)
"""


@pytest.fixture
def machine(launcher):
    """Starts the launcher of one machine, with one rank; all of them are on this one."""
    port = free_port()

    def start(script, *arguments, nodes="1:2", restarts=0, constants=None, flags=()):
        return launcher.start(
            "-n", 1, "--cpu", "--nnodes", nodes, "--master-addr", "127.0.0.1", "--master-port", port,
            "--max-restarts", restarts, *flags, script, *arguments, constants=QUICK | (constants or {}),
        )  # fmt: skip

    start.port = port
    return start


def done(launcher):
    size, first, losses, _ = json.loads((launcher.folder / "done.json").read_text())
    return size, first + len(losses)


@pytest.mark.long
def test_a_job_goes_on_with_the_machines_that_are_left(launcher, machine):
    arguments = (launcher.write(TRAIN), json.dumps({"0": [0, 2, WAIT]}), 4)
    started = [machine(*arguments, restarts=1, flags=("--node-rank", number)) for number in range(2)]
    launcher.wait_for("ready")
    os.kill(started[1].pid, signal.SIGKILL)
    ended = started[0].wait()
    assert ended.code == 0, ended
    assert attempts(ended) == ["fnaccel launch: attempt 2 of 2, with 1 rank on 1 machine"]
    assert done(launcher) == (1, 4)
    assert all(gone(int(path.read_text())) for path in launcher.folder.glob("pid*"))


def test_fewer_machines_than_the_least_number_end(launcher, machine):
    script, options = launcher.write(SLEEP), {"nodes": "2:3", "restarts": 1}
    started = [machine(script, **options, flags=("--node-rank", number)) for number in range(2)]
    launcher.wait_for("pid0", "pid1")
    os.kill(started[1].pid, signal.SIGKILL)
    ended = started[0].wait()
    assert (ended.code, attempts(ended)) == (1, []), ended
    assert "lost: the launcher of machine 1" in ended.err
    assert gone(int((launcher.folder / "pid0").read_text()))


@pytest.mark.long
def test_a_machine_that_comes_later_is_let_in(launcher, machine):
    arguments = (launcher.write(TRAIN), json.dumps({"0": [0, 2, WAIT]}), 5)
    started = [machine(*arguments)]
    launcher.wait_for("ready")
    started.append(machine(*arguments))
    ended = [each.wait() for each in started]
    assert [each.code for each in ended] == [0, 0], ended
    for each in ended:
        assert attempts(each) == ["fnaccel launch: attempt 1 of 1, with 2 ranks on 2 machines"]
    assert "stopped so that another machine can join" in ended[0].err
    assert done(launcher) == (2, 5)
    assert json.loads((launcher.folder / "done.json").read_text())[1] == 3, "it went on where it was saved"


def test_machines_without_a_number_find_the_one_that_keeps_the_store(launcher, machine):
    script = launcher.write(MEET)
    ended = [each.wait() for each in [machine(script, nodes="3") for _ in range(3)]]
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 3, ended
    assert sorted(each.out for each in ended) == ["0 3 0\n", "1 3 1\n", "2 3 2\n"]


def test_the_same_number_twice_is_an_error(launcher, machine):
    script = launcher.write(MEET)
    started = [machine(script, nodes="3", flags=("--node-rank", number)) for number in (0, 1, 1)]
    for ended in [each.wait() for each in started]:
        assert (ended.code, ended.out) == (2, "")
        assert "the same --node-rank: [0, 1, 1]\n  where: fnaccel launch --nnodes 3 --node-rank" in ended.err


def test_a_signal_to_one_launcher_ends_ranks_that_do_not_talk(launcher, machine):
    script = launcher.write(SLEEP)
    started = [machine(script, nodes="2", restarts=1, flags=("--node-rank", number)) for number in range(2)]
    launcher.wait_for("pid0", "pid1")
    os.kill(started[1].pid, signal.SIGTERM)
    ended = [each.wait() for each in started]
    assert [(each.code, attempts(each)) for each in ended] == [(143, [])] * 2, ended
    assert all(gone(int(path.read_text())) for path in launcher.folder.glob("pid*"))


@pytest.mark.long
@pytest.mark.parametrize("silent", [0, 1])
def test_a_machine_that_goes_silent_ends_the_job(launcher, machine, silent):
    """As one that lost its power does: nothing is closed, and nothing answers."""
    script, constants = launcher.write(SLEEP), {"fnaccel.launch.elastic.LOST": 3.0}
    started = [
        machine(script, nodes="2", constants=constants, flags=("--node-rank", number)) for number in range(2)
    ]
    launcher.wait_for("pid0", "pid1")
    stopped = [started[silent].pid, *children(started[silent].pid)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        ended = started[1 - silent].wait()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
    assert ended.code == 1
    assert ("does not answer" if silent == 0 else "lost: the launcher of machine 1") in ended.err
    assert gone(int((launcher.folder / f"pid{1 - silent}").read_text()))


STEPS = 240
SLOW = """
    import json, os, time, torch, fnaccel as fa
    from torch.utils.data import DataLoader, TensorDataset

    def loss(m, b): return fa.Mean((m(b[0]) - b[1]).square().sum(), weight=len(b[0]))

    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    with fa.start(device="cpu") as world:
        with open(f"pid{world.rank}", "w") as file:
            file.write(str(os.getpid()))
        step = fa.train_step(
            loss, model=fa.distribute(lambda: torch.nn.Linear(3, 1), "ddp"), optimizer=fa.adamw(0.1)
        )
        state = fa.resume_or_init("run", step, seed=1)
        first, losses, wait = state.step, [], float(os.environ.get("WAIT", "0.05"))
        for state, metrics in fa.scan(step, state, fa.shard(loader), steps=240, save=fa.Autosave("run", every=1)):
            losses.append(metrics["loss"].item())
            time.sleep(wait)
            if state.step >= 5:
                open("ready", "w").write("x")
        if world.is_main:
            with open("done.json", "w") as file:
                json.dump([world.size, first, losses, None], file)
"""


@pytest.mark.long
@pytest.mark.parametrize("until", ["it is given up", "the other ranks have ended"])
def test_a_machine_that_freezes_comes_back(launcher, machine, until):
    """As a laptop that sleeps, or a virtual machine that is moved. It is given up after 3 s."""
    script, constants = launcher.write(SLOW), {"fnaccel.launch.elastic.LOST": 3.0}
    # the ranks of the other machine end 10.5 s after that, if they can't save
    restarts = int(until == "the other ranks have ended")
    started = [
        machine(script, restarts=restarts, constants=constants, flags=("--node-rank", number))
        for number in range(2)
    ]
    launcher.wait_for("ready")
    frozen = [started[1].pid, *children(started[1].pid)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    if restarts:
        launcher.wait_for(started[0].err.name)  # it says how its rank ended
    else:
        time.sleep(7)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    ended = [each.wait() for each in started]
    assert [each.code for each in ended] == [0, 0], ended
    assert attempts(ended[1]) == [
        f"fnaccel launch: attempt {restarts + 1} of {restarts + 1}, with 2 ranks on 2 machines"
    ], "the return uses up no restart"
    assert done(launcher) == (2, STEPS)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


TALK = """
    import time, torch, fnaccel as fa
    from pathlib import Path
    from fnaccel.world.connections import listening_ports
    with fa.start(device="cpu") as world:
        Path(f"ports{world.rank}").write_text(" ".join(map(str, [0, *listening_ports()])))
        # all ranks leave after the same step, also if one sees the file a moment before another
        while fa.reduce(torch.tensor(float(Path("enough").exists()))).item() == 0:
            time.sleep(0.01)
            world.barrier()
    with fa.start(device="cpu") as world:  # those who come now come to the store too
        world.barrier()
    print("fine", flush=True)
"""
QUERY = b"\x00\xce\xf7\x85\x3c"  # what a client of PyTorch's store sends first
GARBAGE = [
    *(random.Random(seed).randbytes(size) for seed, size in enumerate((1, 64, 70_000))),
    b"GET / HTTP/1.1\r\nHost: job\r\n\r\n",
    b"\x00" * 1000,
    *(QUERY + bytes([query]) + b"\xff" * 64 for query in range(1, 25)),
]


class Strangers:
    """Connections to a port that nobody of the job has opened; all stay open."""

    def __init__(self):
        self.connections = []
        self.stop = threading.Event()
        self.threads = []

    def connect(self, port):
        self.connections.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        return self.connections[-1]

    def garbage(self, port):
        for data in GARBAGE:
            with contextlib.suppress(OSError):  # it hangs up before all is sent
                self.connect(port).sendall(data)

    def idle(self, port):
        for _ in range(50):
            self.connect(port)

    def slow(self, port):
        """A query of which a byte comes now and then."""
        connection = self.connect(port)
        connection.sendall(QUERY + b"\x01" + (100).to_bytes(8, "little"))
        thread = threading.Thread(target=self._trickle, args=(connection,))
        thread.start()
        self.threads.append(thread)

    def _trickle(self, connection):
        with contextlib.suppress(OSError):
            while not self.stop.wait(0.2):
                connection.sendall(b"k")

    def leave(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def strangers():
    made = Strangers()
    yield made
    made.leave()


@pytest.mark.parametrize("kind", ["garbage", "idle", "slow"])
def test_strangers_on_the_ports_of_a_job(launcher, machine, strangers, kind):
    script = launcher.write(TALK)
    started = [machine(script, nodes="2", flags=("--node-rank", 0))]
    wait_until_open(machine.port)
    getattr(strangers, kind)(machine.port)  # before the other machine comes
    started.append(machine(script, nodes="2", flags=("--node-rank", 1)))
    ports = {int(port) for text in launcher.wait_for("ports0", "ports1") for port in text.split()} - {0}
    assert len(ports) >= 2, "each rank listens for the other"
    for port in (machine.port, *ports):
        getattr(strangers, kind)(port)
    time.sleep(0.3)  # some of its steps
    (launcher.folder / "enough").write_text("x")
    ended = [each.wait() for each in started]
    assert [(each.code, each.out, each.err) for each in ended] == [(0, "fine\n", "")] * 2, ended


def wait_until_open(port):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.02)
    pytest.fail("nothing listens")
