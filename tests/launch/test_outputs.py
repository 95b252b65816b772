"""What ranks print, and how the launcher runs them: --tee, --quiet, --debug, --no-python, --role, --numa."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fnaccel.launch import tee
from fnaccel.launch.affinity import nodes
from fnaccel.launch.numa import choose_node, gpu_nodes

pytestmark = pytest.mark.launcher

FAILS = """
    import os, sys
    print("out", os.environ["RANK"])
    print("err", os.environ["RANK"], file=sys.stderr)
    os.system("echo child $RANK")
    if os.environ["RANK"] == "1":
        raise ValueError("the first fault")
"""


@pytest.mark.long
def test_tee_writes_each_rank_to_a_file_and_shows_it(launcher):
    ended = launcher("-n", 2, "--cpu", "--tee", "logs", launcher.write(FAILS))
    assert ended.code == 1
    logs = [(launcher.folder / "logs" / f"rank{rank}.log").read_text() for rank in range(2)]
    for rank, log in enumerate(logs):
        assert {f"out {rank}", f"err {rank}", f"child {rank}"} <= set(log.splitlines())
        assert f"out {1 - rank}" not in log
        assert f"out {rank}" in ended.out
        assert f"err {rank}" in ended.err
    assert "ValueError: the first fault" in logs[1]
    assert "ValueError" not in logs[0]
    # the traceback of the rank that failed first is the last thing
    assert ended.err.rstrip().splitlines()[-1].startswith("rank 1 of 2 on ")
    assert ended.err.index("ValueError: the first fault") > ended.err.index("err 1")


@pytest.mark.long
def test_tee_appends_the_attempts_and_loses_no_output(launcher):
    script = """
        import os, sys
        for line in range(5_000):
            print(os.environ["FNACCEL_RESTART_COUNT"], line)
        sys.stdout.flush()
        os._exit(int(os.environ["FNACCEL_RESTART_COUNT"] == "0"))
    """
    ended = launcher("-n", 1, "--cpu", "--max-restarts", 1, "--tee", "logs", launcher.write(script))
    assert ended.code == 0, ended.err
    expected = [f"{attempt} {line}" for attempt in range(2) for line in range(5_000)]
    assert (launcher.folder / "logs" / "rank0.log").read_text().splitlines() == expected
    assert ended.out.splitlines() == expected


@pytest.mark.long
def test_tee_does_not_wait_for_a_process_that_a_rank_left(launcher):
    script = """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        print(child.pid, flush=True)
    """
    ended = launcher("--cpu", "--tee", "logs", launcher.write(script))
    assert ended.code == 0
    os.kill(int(ended.out), 9)


@pytest.mark.long
def test_tee_says_that_a_folder_cannot_be_made(launcher):
    (launcher.folder / "logs").write_text("a file")
    ended = launcher("--cpu", "--tee", "logs", launcher.write("pass"))
    assert ended.code == 2
    assert "LaunchError: the folder logs can't be written: File exists" in ended.err


def test_quiet_prints_failures_only(launcher):
    (launcher.folder / "fnaccel.yaml").write_text("launch: {cpu: true}")
    script = launcher.write("raise SystemExit(3)")
    loud = launcher("--max-restarts", 1, script)
    quiet = launcher("--max-restarts", 1, "--quiet", script)
    assert loud.code == quiet.code == 3
    assert "fnaccel.yaml is the recipe" in loud.err
    assert "attempt 2 of 2" in loud.err
    assert "fnaccel.yaml" not in quiet.err
    assert "attempt 2" not in quiet.err
    assert "ended with exit code 3" in quiet.err


def test_debug_turns_the_checks_of_collectives_on(launcher):
    script = """
        import faulthandler, os, torch.distributed as dist
        print(dist.get_debug_level().name, os.environ["TORCH_SHOW_CPP_STACKTRACES"], faulthandler.is_enabled())
    """
    assert launcher("--cpu", "--debug", launcher.write(script)).out.split() == ["INFO", "1", "True"]
    ended = launcher("--cpu", launcher.write(script.replace('["TORCH_SHOW_CPP_STACKTRACES"]', '.get("A")')))
    assert ended.out.split() == ["OFF", "None", "False"]


TRAINS = """
    import torch, fnaccel as fa

    torch.distributed.set_debug_level_from_env()  # torch was imported before the fork

    def loss_fn(model, batch):
        return fa.Mean(model(batch).square().sum(), weight=len(batch))

    with fa.start(device="cpu") as world:
        model = fa.distribute(lambda: torch.nn.Linear(4, 1), "ddp")
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(0.1))
        state = train_step.init(seed=0)
        for _ in range(2):
            state, metrics = train_step(state, torch.ones(2, 4))
        print(f"{metrics['loss'].item():.6f}")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ("--debug", {}),
        pytest.param("", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, marks=pytest.mark.long),
        pytest.param("--cpu-affinity --threads 2 --nccl consumer --tee logs", {}, marks=pytest.mark.long),
        ("--numa", {}),
    ],
)
def test_each_flag_that_changes_torch_trains_the_same(launcher, flags, variables):
    ended = launcher("--cpu", "-n", 2, *flags.split(), launcher.write(TRAINS), env=variables)
    assert ended.code == 0, ended.err
    assert len(ended.out.split()) == 2
    assert {*ended.out.split()} == {*launcher("--cpu", launcher.write(TRAINS)).out.split()}
    if variables:
        assert ended.err.count("DETAIL is set to INFO") == 1


@pytest.mark.long
def test_a_program_that_is_not_python(launcher):
    path = launcher.folder / launcher.write(
        '#!/bin/sh\necho "$RANK of $WORLD_SIZE: $1"\nexit $RANK\n', "go.sh"
    )
    path.chmod(0o755)
    ended = launcher("-n", 2, "--cpu", "--no-python", "./go.sh", "a b")
    assert sorted(ended.out.splitlines()) == ["0 of 2: a b", "1 of 2: a b"]
    assert ended.code == 1
    assert "rank 1 of 2" in ended.err
    ended = launcher("--cpu", "--no-python", sys.executable, "-c", "import os; print(os.environ['RANK'])")
    assert (ended.code, ended.out) == (0, "0\n")
    ended = launcher("--cpu", "--no-python", "no-such-program")
    assert ended.code == 2
    assert "no program no-such-program" in ended.err


@pytest.mark.long
def test_two_ranks_of_a_program_that_meet(launcher):
    script = launcher.write("""
        import torch, fnaccel as fa
        with fa.start(device="cpu") as world:
            print(fa.reduce(torch.ones(())).item(), world.source)
    """)
    ended = launcher("-n", 2, "--cpu", "--no-python", sys.executable, script)
    assert (ended.code, ended.out.splitlines()) == (0, ["2.0 fnaccel launch"] * 2), ended.err


def test_a_role(launcher):
    script = 'import os; print(os.environ["ROLE_NAME"], os.environ["ROLE_RANK"]); raise SystemExit(1)'
    ended = launcher("--cpu", "--role", "trainer", launcher.write(script))
    assert ended.out == "trainer 0\n"
    assert "rank 0 of 1 (trainer) on" in ended.err


@pytest.mark.parametrize(
    ("rank", "ranks", "of_gpus", "cores"),
    [
        (0, 2, [], (0, 1, 2, 3)),
        (1, 2, [], (4, 5, 6, 7)),
        (3, 4, [], (4, 5, 6, 7)),
        (0, 1, [], (0, 1, 2, 3)),
        (0, 2, [1, 1], (4, 5, 6, 7)),
        (1, 2, [1, 0], (0, 1, 2, 3)),
        (0, 1, [-1], tuple(range(8))),
        (0, 1, [5], tuple(range(8))),
    ],
)
def test_a_rank_gets_the_node_of_its_gpu(rank, ranks, of_gpus, cores):
    assert choose_node(rank, ranks, range(8), [range(4), range(4, 8)], of_gpus) == cores
    assert choose_node(rank, ranks, range(8), [], of_gpus) == tuple(range(8))


def test_nodes_of_gpus(tmp_path):
    gpus, devices = tmp_path / "gpus", tmp_path / "devices"
    for name, node in (("0000:0A:00.0", 1), ("0000:04:00.0", 0), ("0000:FF:00.0", None)):
        (gpus / name).mkdir(parents=True)
        (devices / name.lower()).mkdir(parents=True)
        if node is not None:
            (devices / name.lower() / "numa_node").write_text(f"{node}\n")
    assert gpu_nodes(None, gpus=gpus, devices=devices) == [0, 1, -1]
    assert gpu_nodes("1,0", gpus=gpus, devices=devices) == [1, 0]
    assert gpu_nodes("GPU-12ab", gpus=gpus, devices=devices) == [0, 1, -1]
    assert gpu_nodes("7", gpus=gpus, devices=devices) == []
    assert gpu_nodes(None, gpus=tmp_path / "none", devices=devices) == []


def test_numa_keeps_a_rank_on_its_cores(launcher):
    script = launcher.write("import os; print(sorted(os.sched_getaffinity(0)))")
    ended = launcher("--cpu", "--numa", script)
    expected = choose_node(0, 1, os.sched_getaffinity(0), nodes(), [])
    assert ended.out == f"{list(expected)}\n"


@pytest.mark.long
@pytest.mark.parametrize("blocked", [{signal.SIGCHLD}, {signal.SIGCHLD, signal.SIGTERM}])
def test_a_launcher_that_begins_with_blocked_signals(launcher, blocked):
    script = launcher.write(
        "import os, signal\n"  # one write a line: two ranks share the pipe
        "os.write(1, b'%r\\n' % (signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    )
    done = subprocess.run(
        [sys.executable, "-m", "fnaccel", "launch", "-n", "2", "--cpu", script], cwd=launcher.folder, timeout=60,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, blocked), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n" * 2


def test_a_log_on_a_full_disk_is_said_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tee, "output_file", lambda *_: "/dev/full")
    (copier,) = tee.start_copiers(str(tmp_path), [0])
    for _ in range(3):
        os.write(copier.out, b"a line\n")
        time.sleep(0.05)
    tee.finish([copier])
    shown = capfd.readouterr()
    assert shown.out == "a line\n" * 3
    assert shown.err == "fnaccel launch --tee: output is missing in a log: No space left on device\n"
