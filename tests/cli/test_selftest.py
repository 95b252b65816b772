"""`fnaccel test`: each check passes here, and fails if its fault is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.cli.selftest import communication, machine, training
from fnaccel.cli.selftest.results import CheckFailedError, NotAvailableError, judged
from fnaccel.cli.selftest.running import Ranks
from fnaccel.launch.network import free_port

pytestmark = pytest.mark.launcher
TWO = Ranks(processes=2, cpu=True)


@pytest.mark.long
def test_all_checks_of_two_ranks(capsys):
    code = main(["test", "-n", "2", "--cpu", "--strategies", "ddp, fsdp, tensor(2), context(2)", "--json"])
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == 0
    assert {row["status"] for row in rows.values()} == {"pass", "not available"}
    passed = [name for name, row in rows.items() if row["status"] == "pass"]
    assert passed == [
        "kernel", "ports", "collectives", "strategy ddp", "strategy fsdp", "strategy tensor(2)", "strategy context(2)", "checkpoint",
    ]  # fmt: skip
    assert "16 MB all-reduced" in rows["collectives"]["detail"]
    assert "saved by 2, restored by 1" in rows["checkpoint"]["detail"]


@pytest.mark.long
def test_a_strategy_that_does_not_fit_fails_alone(capsys):
    code = main(["test", "-n", "2", "--cpu", "--strategies", "ddp(3), ddp", "--verbose"])
    printed = capsys.readouterr()
    assert code == 1
    assert "strategy ddp(3)                   fail" in printed.out
    assert "strategy ddp                      pass" in printed.out
    assert "1 failed" in printed.out
    assert "AxisProductError: ddp(3) is 3" in printed.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["-n", "0"], "0 ranks can't be checked"),
        (["--nnodes", "0"], "0 machines can't be checked"),
        (["--nnodes", "2"], "2 machines need an address"),
        (["--folder", "nowhere"], "there is no folder nowhere"),
        (["--strategies", "ddp("], "is no strategy"),
    ],
)
def test_mistakes(words, what, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["test", "--cpu", *words]) == 2
    printed = capsys.readouterr()
    assert what in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_ctrl_c_ends_the_checks_and_the_ranks(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "fnaccel", "test", "-n", "2", "--cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("kernel")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "stopped"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.long
def test_several_machines(tmp_path):
    command = [
        sys.executable, "-m", "fnaccel", "test", "-n", "1", "--cpu", "--nnodes", "2", "--strategies", "ddp",
        "--folder", str(tmp_path), "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--json",
    ]  # fmt: skip
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    machines = [
        subprocess.Popen(
            [*command, "--node-rank", str(number)], stdout=subprocess.PIPE, text=True, env=environ
        )
        for number in range(2)
    ]
    try:
        for process in machines:
            rows = {row["check"]: row for row in json.loads(process.communicate(timeout=200)[0])}
            failed = {check: row for check, row in rows.items() if row["status"] == "fail"}
            assert not failed
            assert process.returncode == 0
            assert rows["strategy ddp"]["status"] == rows["checkpoint"]["status"] == "pass"
    finally:
        for process in machines:
            process.kill()
            process.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("system", "release", "status"),
    [
        ("Linux", "6.1.0-18-amd64", "pass"),
        ("Linux", "5.5.0", "pass"),
        ("Linux", "4.15.0-213-generic", "fail"),
        ("Darwin", "23.1.0", "not available"),
    ],
)
def test_kernels(system, release, status):
    assert judged("kernel", lambda: machine.check_kernel(system, release)).status == status


def test_wrong_values_are_found(monkeypatch):
    right = fa.gather
    monkeypatch.setattr(fa, "gather", lambda value: right(value).flip(0))
    with pytest.raises(CheckFailedError, match=r"wrong values from gather$"):
        communication.check_collectives(TWO)


def test_a_port_that_is_closed_is_found(monkeypatch):
    def refuse(address, timeout):
        raise OSError(113, "No route to host")

    monkeypatch.setattr("fnaccel.cli.selftest.machine.socket.create_connection", refuse)
    with pytest.raises(CheckFailedError, match=r"does not reach .* at 127.0.0.1:\d+: No route to host"):
        machine.check_ports(TWO)


def test_cards_that_are_apart_are_found(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "on_ranks", lambda ranks, fn: [(3, [(0, 2)])])
    with pytest.raises(CheckFailedError, match="no peer-to-peer between cards 0-2"):
        machine.check_cards(Ranks(processes=1))
    monkeypatch.setattr(machine, "on_ranks", lambda ranks, fn: [(1, [])])
    with pytest.raises(NotAvailableError, match=r"1 card$"):
        machine.check_cards(Ranks(processes=1))


def test_a_checkpoint_that_loses_the_optimizer_is_found(monkeypatch):
    monkeypatch.setattr(fa, "resume_or_init", lambda folder, train_step: train_step.init(seed=0))
    expected = training.reference(cpu=True)
    with pytest.raises(CheckFailedError, match=r"losses .*, and one process has"):
        training.check_checkpoint(TWO, expected, None)
