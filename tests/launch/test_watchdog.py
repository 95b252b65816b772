"""Ranks that do not go on: the job ends, and the rank is named, with the stacks of all that can write them.

No time is asserted. A job that waits for its process group's timeout (600 s) counts as hung.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fnaccel.launch.network import free_port
from tests.launch.conftest import LIMIT

pytestmark = pytest.mark.launcher
QUICK = {"fnaccel.launch.watchdog.WRITING": 0.5}
SCRIPT = """
    import os, signal, sys, time
    import attrs
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    import fnaccel as fa

    fault, faulty = sys.argv[1], int(sys.argv[2])

    class Rows(Dataset):
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            if fault == "data" and world.rank == faulty and index >= 100:
                time.sleep(1000)  # blocks
            return torch.full((4,), 1 / (1 + index)), torch.ones(2)

    def loss_fn(model, batch):
        return fa.Mean((model(batch[0]) - batch[1]).square().sum(), weight=len(batch[0]))

    def make():
        model = fa.distribute(lambda: nn.Linear(4, 2), sys.argv[3])
        return fa.train_step(loss_fn, model=model, optimizer=fa.sgd(1e-3))

    with fa.start(device="cpu", watchdog=2) as world:
        train_step, another = make(), make()
        state, other_state = train_step.init(), another.init()
        for number, batch in enumerate(fa.shard(DataLoader(Rows(), batch_size=8))):
            if number == 3 and world.rank == faulty and os.environ.get("FNACCEL_RESTART_COUNT", "0") == "0":
                if fault == "apart":
                    state = train_step.adopt(attrs.evolve(fa.snapshot(state), step=100))
                if fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "another":
                    other_state, _ = another(other_state, batch)
                if fault == "more":
                    state, _ = train_step(state, batch)
                if fault == "sleep":
                    time.sleep(1000)  # code of the script
            state, _ = train_step(state, batch)
            if fault == "apart":
                time.sleep(0.1)
            if fault == "more" and number == 20:
                break
            if number == 5 and fault == "stop" and os.environ.get("FNACCEL_RESTART_COUNT") == "1":
                break
"""
STACK = "rank {}, most recent call last:\n"
FAULTS = {
    "stop": ("rank {} was stopped ", "no stack, its process is stopped"),
    "data": ("rank {} has waited ", "time.sleep(1000)  # blocks"),
    "another": ("rank {} runs step 0", "other_state, _ = another(other_state, batch)"),
    "sleep": ("rank {} has been in code of the script for ", "time.sleep(1000)  # code of the script"),
    "apart": ("ranks have been steps apart for ", "train_step(state, batch)"),
}


def see(text, fault, faulty, size):
    """See that a report names the rank, and has the stacks of all ranks that can write them."""
    said, shown = (part.format(faulty) for part in FAULTS[fault])
    assert said in text, text
    assert shown in text, text
    assert "\n  where: rank " in text
    assert "newest call of all ranks\n" in text
    writing = [rank for rank in range(size) if fault != "stop" or rank != faulty]
    assert [rank for rank in writing if STACK.format(rank) not in text] == []
    assert text.count("PeerLostError") == 1
    assert "ended the job with exit code 76" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "faulty", "size", "strategy"),
    [
        ("stop", 1, 2, "ddp"),
        ("stop", 0, 2, "fsdp"),
        ("data", 0, 2, "ddp"),
        ("another", 1, 2, "ddp"),
        ("apart", 1, 2, "ddp"),
        ("sleep", 1, 2, "ddp"),
        ("stop", 2, 4, "ddp"),
        ("stop", 0, 4, "ddp"),  # it keeps the store: ranks could not collect the stacks there
        ("data", 3, 4, "fsdp"),
        ("another", 1, 4, "ddp"),
        ("apart", 2, 4, "ddp"),
        ("data", 1, 2, "local_sgd(every=4)"),
        ("data", 0, 2, "local_sgd(every=4, metrics='boundary')"),
        ("stop", 1, 2, "diloco(every=4, metrics='boundary')"),
    ],
)
def test_a_rank_is_named(launcher, fault, faulty, size, strategy):
    script = launcher.write(SCRIPT)
    ended = launcher("-n", size, "--watchdog", 1.5, script, fault, faulty, strategy, constants=QUICK)
    assert ended.code == 76, ended.err
    see(ended.err, fault, faulty, size)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_rank_that_takes_a_step_more_is_named(launcher, size):
    ended = launcher("-n", size, "--watchdog", 1.5, launcher.write(SCRIPT), "more", 1, "ddp", constants=QUICK)
    assert ended.code == 1
    differ = r"RankMismatchError: ranks have different batches: rank 0 is at epoch 0, sample (\d+); rank 1 is at epoch 0, sample (\d+)"
    places = re.search(differ, ended.err)
    assert places is not None, ended.err
    assert places[1] != places[2]


@pytest.mark.long
def test_a_restart_follows(launcher):
    arguments = ["-n", 2, "--watchdog", 1.5, "--max-restarts", 1, launcher.write(SCRIPT), "stop", 1, "ddp"]
    ended = launcher(*arguments, constants=QUICK)
    assert ended.code == 0, ended.err
    see(ended.err, "stop", 1, 2)
    assert "attempt 2 of 2" in ended.err


def test_ctrl_c_ends_a_job_with_a_stopped_rank(launcher):
    script = launcher.write("""
        import os, signal, fnaccel as fa
        with fa.start(device="cpu") as world:
            if world.rank == 1:
                open("there", "w").write("yes")
                os.kill(os.getpid(), signal.SIGSTOP)
            world.barrier()
    """)
    started = launcher.start("-n", 2, "--timeout-grace", 1, script)
    launcher.wait_for("there")
    os.kill(started.pid, signal.SIGINT)
    assert started.wait().code == 130


PATIENT = """
    import sys, time, warnings
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import fnaccel as fa
    from fnaccel.world.progress_marks import NOW, _listeners, within

    LONG = 2.5  # the limit is 1 s
    slow_once = []

    def loss_fn(model, batch):
        if not slow_once and world.rank == 1:  # a first step that is slow on one rank
            slow_once.append(time.sleep(LONG))
        return fa.Mean((model(batch[0]) - batch[1]).square().sum(), weight=len(batch[0]))

    with fa.start(device="cpu") as world:
        assert len(_listeners) == 1
        model = fa.distribute(lambda: nn.Linear(4, 2), "ddp")
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(1e-3))
        state = train_step.init()
        rows = TensorDataset(torch.ones(96, 4), torch.ones(96, 2))
        for number, batch in enumerate(fa.shard(DataLoader(rows, batch_size=8, num_workers=1))):
            if number == 2 and world.rank == 0:  # evaluates alone
                time.sleep(LONG)
            for at, phase in ((4, "compile"), (6, "save")):
                if number == at and world.rank == 1:
                    with within(phase):
                        time.sleep(LONG)
            state, metrics = train_step(state, batch)
        time.sleep(LONG)  # no rank waits
        print("end", world.rank, NOW.step)
"""


@pytest.mark.long
def test_slow_ranks_are_no_alarm(launcher):
    ended = launcher("-n", 2, "--watchdog", 1, launcher.write(PATIENT), constants=QUICK)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert sorted(ended.out.splitlines()) == ["end 0 12", "end 1 12"]


ALONE = """
    import os, sys, time
    import torch
    from torch import nn
    import fnaccel as fa
    from fnaccel.world.progress_marks import _listeners

    def loss_fn(model, x):
        time.sleep(1.5 * number)
        return fa.Mean(model(x).square().sum(), weight=len(x))

    print("listeners", len(_listeners))
    number = int(os.environ["RANK"])
    if sys.argv[1] == "trains":  # each rank in a world of its own
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    with fa.start(device="cpu") as world:
        if sys.argv[1] == "trains":  # at its own speed
            train_step = fa.train_step(
                loss_fn, model=fa.distribute(lambda: nn.Linear(4, 2), "local"), optimizer=fa.sgd(1e-3)
            )
            state = train_step.init()
            for _ in range(2 if number else 60):
                state, _ = train_step(state, torch.ones(4, 4))
        time.sleep(2)
        print("end")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "what", "listeners"), [(0.5, "trains", 1), (0.5, "only sleeps", 1), (0, "only sleeps", 0)]
)
def test_ranks_that_wait_for_nobody_are_no_alarm(launcher, limit, what, listeners):
    ended = launcher("-n", 2, "--watchdog", limit, launcher.write(ALONE), what, constants=QUICK)
    assert ended.code == 0, ended.err
    assert ended.out.count("end\n") == 2
    assert ended.out.count(f"listeners {listeners}\n") == 2


def environ():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "size"), [("stop", 4), ("data", 2), ("another", 2), ("sleep", 2), ("apart", 4)]
)
def test_under_torchrun(launcher, fault, size):
    script = launcher.write(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    ended = subprocess.run(
        [*torchrun, script, fault, "1", "ddp"],
        cwd=launcher.folder, env=environ(), capture_output=True, text=True, timeout=2 * LIMIT, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    text = ended.stderr[ended.stderr.index("PeerLostError") :].partition("torch/distributed/elastic")[0]
    see(text, fault, 1, size)


def without_a_launcher(launcher, script, *arguments):
    """Two ranks as mpirun and srun start them: their exit codes, and what they wrote to stderr."""
    common = {
        **environ(),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": str(free_port()),
        "MASTER_ADDR": "127.0.0.1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, launcher.write(script), *arguments], cwd=launcher.folder,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], texts


@pytest.mark.long
@pytest.mark.parametrize("faulty", [0, 1])
def test_without_a_launcher_that_keeps_the_store(launcher, faulty):
    """As mpirun and srun: rank 0 keeps the store, and nobody reads it if rank 0 is stopped."""
    codes, texts = without_a_launcher(launcher, SCRIPT, "stop", str(faulty), "ddp")
    assert codes == [-9 if rank == faulty else 76 for rank in range(2)]
    see(texts[1 - faulty], "stop", faulty, 2)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [7, 12])
def test_a_rank_is_named_after_the_store_was_stopped_for_a_while(launcher, seconds):
    """The watchers lose the store for some seconds, and watch on when its rank goes on."""
    rest = """if number == 1 and world.rank == 0:
                import subprocess
                subprocess.Popen(["sh", "-c", f"sleep SECONDS; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "apart":
                time.sleep""".replace("SECONDS", str(seconds))
    script = SCRIPT.replace("watchdog=2", "watchdog=15")
    script = script.replace('if fault == "apart":\n                time.sleep', rest)
    codes, texts = without_a_launcher(launcher, script, "another", "1", "ddp")
    assert codes == [76, 76], "\n".join(texts)
    see(next(text for text in texts if "newest call" in text), "another", 1, 2)


@pytest.mark.long
def test_a_rank_of_another_machine_is_named(launcher):
    script, port = launcher.write(SCRIPT), free_port()
    machines = [
        launcher.start(
            "--nnodes", 2, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port,
            "-n", 1, "--watchdog", 2, script, "stop", 1, "ddp",
        )
        for number in range(2)
    ]  # fmt: skip
    ends = [machine.wait() for machine in machines]
    assert [ended.code for ended in ends] == [76, 76]
    see(ends[0].err, "stop", 1, 2)


SLOW = """
    import sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    import fnaccel as fa

    slow, seconds = sys.argv[1], float(sys.argv[2])

    class Rows(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, index):
            if slow == "item" and world.rank == 1 and index >= 16:
                time.sleep(seconds)
            return torch.full((4,), 1 / (1 + index))

    def begin(worker):
        if slow == "workers" and epoch == 1 and world.rank == 1:
            time.sleep(seconds)

    def backend(graph, inputs):
        if world.rank == 1 and epoch == 1:
            time.sleep(seconds)
        return graph.forward

    compiled = torch.compile(lambda x: x.square().sum(), backend=backend, dynamic=False)

    def loss_fn(model, batch):
        if slow == "compile" and epoch == 1:  # another shape: it compiles again
            return fa.Mean(compiled(model(batch)[:-1]), weight=len(batch))
        return fa.Mean(compiled(model(batch)), weight=len(batch))

    epoch = 0
    with fa.start(device="cpu") as world:
        model = fa.distribute(lambda: nn.Linear(4, 2), "ddp")
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(1e-3))
        state = train_step.init()
        loader = DataLoader(Rows(), batch_size=8, num_workers=slow == "workers", worker_init_fn=begin)
        shards = fa.shard(loader)
        for epoch in range(2):
            for batch in shards:
                state, _ = train_step(state, batch)
    print("ended at", state.step)
"""


@pytest.mark.long
@pytest.mark.parametrize(("slow", "seconds"), [("compile", 6.0), ("item", 0.9), ("workers", 3.5)])
def test_no_alarm_for_what_is_slow_on_one_rank(launcher, slow, seconds):
    ended = launcher("-n", 2, "--watchdog", 1, launcher.write(SLOW), slow, seconds, constants=QUICK)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "ended at 6\n" * 2
