"""`fa.notebook_launch` and `fa.debug_launch`, in a real notebook kernel and outside of one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import ArgumentError, LaunchError
from fnaccel.launch import accelerator_use
from fnaccel.launch.network import free_port
from tests.launch.kernel import Notebook

pytestmark = [
    pytest.mark.long,
    pytest.mark.launcher,
    # jupyter_client 8 leaves an event loop open, which is collected at some time
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SETUP = """
import fnaccel as fa, torch, os
from torch import nn
from sklearn.datasets import load_digits

digits = load_digits()
rows = torch.utils.data.TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
logs = open("notebook.log", "w")
_ = logs.write("written once")

def loss_fn(model, batch):
    x, y = batch
    return fa.Mean(nn.functional.cross_entropy(model(x), y, reduction="sum"), weight=len(y))

def train(strategy, steps):
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(lambda: nn.Linear(64, 10), strategy), optimizer=fa.adamw(1e-2))
        state = train_step.init(seed=0)
        loader = fa.shard(torch.utils.data.DataLoader(rows, batch_size=32))
        for state, metrics in fa.scan(train_step, state, loader, steps=steps, progress=True):
            pass
        print(f"rank {world.rank} of {world.size} has ended")
        return world.rank, float(metrics["loss"])
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    opened = Notebook(tmp_path_factory.mktemp("notebook"))
    assert opened.run(SETUP).error == ""
    yield opened
    opened.close()


def test_a_cell_trains_on_two_ranks(notebook):
    cell = notebook.run("fa.notebook_launch(train, ('ddp', 5), processes=2, cpu=True)")
    assert "rank 0 of 2 has ended\n" in cell.stdout
    assert "rank 1 of 2 has ended\n" in cell.stdout
    assert "5/5" in cell.stderr
    (first, loss), (second, same) = eval(cell.value)
    assert (first, second) == (0, 1)
    assert loss == same
    one = notebook.run("train('local', 5)")
    assert eval(one.value)[1] == pytest.approx(loss, rel=1e-6)


def test_a_failure_ends_the_cell_and_the_next_launch_works(notebook):
    cell = notebook.run("""
        def broken():
            with fa.start() as world:
                if world.rank == 1:
                    raise ValueError("no such column")
                fa.reduce(torch.ones(1), "sum")

        fa.notebook_launch(broken, processes=2, cpu=True)
    """)
    assert 'raise ValueError("no such column")' in cell.stderr
    assert cell.error.startswith("LaunchError: rank 1 raised ValueError: no such column")
    cell = notebook.run("logs.flush(); fa.debug_launch(lambda: os.environ['RANK'])")
    assert cell.value == "['0', '1']"
    assert (notebook.folder / "notebook.log").read_text() == "written once"


def test_an_interrupt_ends_the_ranks(notebook):
    def interrupt():
        deadline = time.monotonic() + 60
        asleep = [notebook.folder / f"asleep{rank}" for rank in range(2)]
        while not all(path.exists() for path in asleep) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(notebook.kernel.provisioner.pgid, signal.SIGINT)  # as Jupyter's button does

    thread = threading.Thread(target=interrupt)
    thread.start()
    cell = notebook.run("""
        import pathlib, time
        def sleep():
            with fa.start() as world:
                pathlib.Path(f"asleep{world.rank}").write_text(str(os.getpid()))
                time.sleep(100)

        fa.notebook_launch(sleep, processes=2, cpu=True)
    """)
    thread.join()
    assert cell.error.startswith("KeyboardInterrupt")
    for rank in range(2):
        pid = int((notebook.folder / f"asleep{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def rank_and_row(factor):
    with fa.start() as world:
        return world.rank * torch.full((2,), float(factor))


def test_results_come_by_rank():
    results = fa.debug_launch(rank_and_row, (3,), processes=3)
    assert [row.tolist() for row in results] == [[0, 0], [3, 3], [6, 6]]


def test_a_failed_attempt_is_repeated():
    def fails_once():
        with fa.start() as world:
            if os.environ["FNACCEL_RESTART_COUNT"] == "0":
                raise ValueError("the first time")
            return world.size

    assert fa.notebook_launch(fails_once, processes=2, cpu=True, max_restarts=1) == [2, 2]
    with pytest.raises(LaunchError, match="raised ValueError: the first time"):
        fa.notebook_launch(fails_once, processes=2, cpu=True)


def test_a_killed_rank_is_named(capfd):
    def dies():
        os.kill(os.getpid(), 9)

    with pytest.raises(LaunchError, match="exit code 137"):
        fa.notebook_launch(dies, processes=1, cpu=True)
    assert "rank 0 of 1" in capfd.readouterr().err


TOLD = """
import os, signal, time
import fnaccel as fa

def waits():
    with fa.start() as world:
        if world.is_main:
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)

fa.notebook_launch(waits, processes=2, cpu=True)
print("went on")
"""


def test_a_signal_to_the_caller_ends_the_ranks_and_the_caller(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TOLD], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("fn", "args", "match"), [("train", (), "'train' can't be called"), (int, 5, "args=5 is no sequence")]
)
def test_wrong_arguments(fn, args, match):
    with pytest.raises(ArgumentError, match=match):
        fa.debug_launch(fn, args)


def test_a_result_that_cannot_be_pickled_is_named():
    with pytest.raises(LaunchError, match="returned a generator that can't be pickled"):
        fa.debug_launch(lambda: (row for row in [1]), processes=1)


def leave_alone():
    if os.environ["RANK"] == "0":
        sys.exit(0)
    return "one"


def test_a_rank_that_exits_has_no_result():
    with pytest.raises(LaunchError, match=r"only 1 of 2 ranks returned \(1\)"):
        fa.debug_launch(leave_alone)


def test_a_rank_never_leaves_its_fork(monkeypatch, capfd):
    """Above its frames is the code of the caller, which would run twice."""
    caller = os.getpid()
    monkeypatch.setattr("fnaccel.launch.forking.variables", lambda *_, **__: 1 / 0)
    with pytest.raises(LaunchError):
        fa.debug_launch(int)
    assert os.getpid() == caller
    assert capfd.readouterr().err.count("ZeroDivisionError: division by zero") == 2


def test_variables_reach_the_ranks():
    read = lambda: os.environ["COLOUR"]  # noqa: E731
    assert fa.notebook_launch(read, processes=2, cpu=True, env={"COLOUR": "red"}) == ["red", "red"]


MACHINE = """
import sys
import fnaccel as fa

def place(text):
    with fa.start() as world:
        return text, world.rank, world.size

number, port = map(int, sys.argv[1:])
print(fa.notebook_launch(place, ("here",), 2, nodes=2, node_rank=number, address="127.0.0.1", port=port, cpu=True))
"""


@pytest.mark.long
def test_two_machines(tmp_path):
    script = tmp_path / "machine.py"
    script.write_text(MACHINE)
    port = free_port()
    machines = [
        subprocess.Popen(
            [sys.executable, str(script), str(number), str(port)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for number in range(2)
    ]  # fmt: skip
    outputs = [machine.communicate(timeout=120)[0].strip() for machine in machines]
    assert outputs == ["[('here', 0, 4), ('here', 1, 4)]", "[('here', 2, 4), ('here', 3, 4)]"]


@pytest.mark.long
def test_a_machine_that_does_not_come_is_waited_for_as_long_as_asked():
    options = {"nodes": 2, "node_rank": 0, "address": "127.0.0.1", "port": free_port(), "cpu": True}
    with pytest.raises(LaunchError, match=r"1 of 2 machines came within 0\.5 s"):
        fa.notebook_launch(int, processes=1, rdzv={"join_timeout": 0.5}, **options)


def test_a_used_accelerator_is_named(monkeypatch):
    noted = []
    monkeypatch.setattr("fnaccel._torch.on_cuda_start", noted.append)
    monkeypatch.setattr(accelerator_use, "_first_lines", [])
    accelerator_use.watch()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    noted[0]()  # the line that torch would call it from
    with pytest.raises(LaunchError, match=r"CUDA, first by `noted\[0\]\(\).*line \d+ of test_notebook.py"):
        fa.debug_launch(int)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"node_rank": 1}, "node_rank without nodes"),
        ({"nodes": 2}, "2 machines need an address"),
        ({"processes": 0}, "0 processes"),
        ({"env": {"RANK": "1"}}, "RANK can't be set"),
        ({"rdzv": {"join": 1}}, "no key 'join'"),
    ],
)
def test_mistakes(options, match):
    with pytest.raises(LaunchError, match=match):
        fa.notebook_launch(int, **{"processes": 1, "cpu": True, **options})


def test_a_running_world_is_refused(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError, match="is a rank already"):
            fa.debug_launch(int)
    finally:
        torch.distributed.destroy_process_group()


def test_other_threads_are_refused():
    caught = []

    def call():
        try:
            fa.debug_launch(int)
        except LaunchError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call, name="subshell")
    thread.start()
    thread.join()
    assert "this is the thread subshell" in caught[0]


def test_threads_that_a_fork_loses_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with pytest.raises(LaunchError, match="computes with 8 threads"):
        fa.notebook_launch(int, processes=1, cpu=True, threads=2)


def test_a_report_that_a_full_disk_has_cut_off_counts_as_none(monkeypatch, capfd):
    """The error of the rank is shown, in the place of an error about its report."""
    write = Path.write_bytes

    def full(self, data):
        write(self, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    def fails():
        raise KeyError("of the user")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(LaunchError, match="the ranks ended with exit code 1"):
        fa.debug_launch(fails, processes=1)
    said = capfd.readouterr().err
    assert "KeyError: 'of the user'" in said
    assert "No space" not in said
