"""Other users of the machine write into the store of a job: no code runs, and errors name what they wrote."""

from __future__ import annotations

import base64
import datetime
import pickle
import time

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from fnaccel.launch.network import free_port
from fnaccel.launch.rendezvous import is_state
from tests.launch.conftest import gone
from tests.launch.test_elastic import MEET, QUICK, SLEEP, wait_until_open

pytestmark = pytest.mark.launcher


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def state(**fields):
    made = dynamic_rendezvous._RendezvousState()
    node = dynamic_rendezvous._NodeDesc("host", 1, 2)
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - as torch writes it
    made.participants, made.wait_list, made.last_heartbeats, made.deadline = (
        {node: 0},
        {node},
        {node: now},
        now,
    )
    vars(made).update(fields)
    return made


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_passes(protocol):
    assert is_state(pickle.dumps(state(), protocol))
    assert is_state(pickle.dumps(dynamic_rendezvous._RendezvousState(), protocol))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_else_passes(tmp_path, protocol):
    attack = Attack(tmp_path / "written")
    values = [attack, state(participants=attack), state(round=attack), state(more=attack), [state()], None, 1]
    values += [
        state(closed=None),
        state(wait_list=[]),
        state(participants={1: 1}),
        state(last_heartbeats=set()),
    ]
    for value in values:
        assert not is_state(pickle.dumps(value, protocol))
    data = pickle.dumps(state(), protocol)
    for end in range(len(data)):
        assert not is_state(data[:end])
    # attributes of what may be built, by a dotted name
    for path in ("datetime.__init__.__globals__", "datetime.now", "timezone.utc"):
        assert not is_state(b"\x80\x04\x8c\x08datetime\x8c" + bytes([len(path)]) + path.encode() + b"\x93.")
    assert not (tmp_path / "written").exists()


@pytest.mark.long_except(r"state")
@pytest.mark.parametrize("key", ["state", "base64"])
def test_a_stranger_writes_into_the_store_of_launchers(launcher, key):
    port, script = free_port(), launcher.write(MEET)
    started = launcher.start(
        "-n", 1, "--cpu", "--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", port,
        script, constants=QUICK,
    )  # fmt: skip
    wait_until_open(port)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.wait(["fnaccel/job"])
    attack = base64.b64encode(pickle.dumps(Attack(launcher.folder / "written"))).decode()
    keys = {"state": ("torch.rendezvous.fnaccel.0", attack), "base64": ("torch.rendezvous.fnaccel.0", "a")}
    store.wait(["torch.rendezvous.fnaccel.0"])
    time.sleep(0.5)
    store.set(*keys[key])
    ended = started.wait()
    assert (ended.code, ended.out) == (2, "")
    assert "no launcher has written b" in ended.err
    assert f"into the store at 127.0.0.1:{port}" in ended.err
    assert not (launcher.folder / "written").exists()


@pytest.mark.long
def test_garbage_while_ranks_run_ends_them_with_its_name(launcher):
    port, script = free_port(), launcher.write(SLEEP)
    started = [
        launcher.start(
            "-n", 1, "--cpu", "--nnodes", "1:2", "--node-rank", 0, "--master-addr", "127.0.0.1",
            "--master-port", port, script, constants=QUICK,
        )
    ]  # fmt: skip
    launcher.wait_for("pid0")
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set(
        "torch.rendezvous.fnaccel.0", "a"
    )
    ended = started[0].wait()
    assert ended.code == 1
    assert "no launcher has written b'no base64' into the store" in ended.err
    assert gone(int((launcher.folder / "pid0").read_text()))
