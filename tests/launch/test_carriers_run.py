"""Carriers that start something: hosts through a stand-in `ssh`, a cluster through a stand-in `sbatch`, real mpirun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fnaccel.launch.network import free_port
from tests.launch.conftest import LIMIT, buffered

pytestmark = [pytest.mark.launcher, pytest.mark.long]

SSH = """#!/bin/sh
# ssh -o A -o B HOST LINE: what sshd would do, on this machine. `down` can't be reached
while true; do case "$1" in -o) shift 2;; -*) shift;; *) break;; esac; done
if [ "$1" = down ]; then echo "ssh: connect to host down" >&2; exit 255; fi
shift
cd /
exec env -i PATH="$PATH" HOME="$HOME" OMP_NUM_THREADS=1 sh -c "$*"
"""
MEET = """
import os, sys, torch, fnaccel as fa
recipe = fa.config.recipe()
with fa.start(device="cpu") as world:
    total = fa.reduce(torch.tensor([10.0 ** world.rank]))
words = [world.rank, world.machines, total.item(), recipe.strategy, os.getcwd(), *sys.argv[1:]]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: lines of two ranks do not mix
"""
WAIT = """
import os, signal, sys, time
def stop(*_):
    os.write(1, f"told {os.environ['RANK']}\\n".encode())
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open(f"ready{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(100)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a script and a stand-in `ssh` on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs / "ssh", SSH)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def ended(process):
    """The output of a launch that ends by itself."""
    try:
        return process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()


def begin(*arguments):
    command = [sys.executable, "-m", "fnaccel", "launch", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command, env=buffered(), stdin=subprocess.DEVNULL, start_new_session=True, **pipes
    )


def launched(*arguments):
    process = begin(*arguments)
    out, err = ended(process)
    return process.returncode, out, err


def on_hosts(names="a,b", *more, ranks=1):
    flags = ["--cpu", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    return ["--hosts", names, "-n", ranks, *flags, *more]


def until(*paths):
    end = time.monotonic() + LIMIT
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < end, [path.name for path in paths if not path.exists()]
        time.sleep(0.02)


@pytest.mark.parametrize("carrier", ["ssh", "pdsh"])
def test_ranks_of_two_hosts_meet(place, carrier):
    if carrier == "pdsh" and shutil.which("pdsh") is None:
        pytest.skip("there is no `pdsh` program (Debian: pdsh)")
    (place / "meet.py").write_text(MEET)
    folder = str(place)
    code, out, err = launched(
        "--carrier", carrier, *on_hosts(ranks=2), "--strategy", "ddp", "meet.py", "it's", "100%"
    )
    assert code == 0, err
    expected = [f"{host}: {rank} 2 1111.0 ddp {folder} it's 100%" for rank, host in enumerate("aabb")]
    assert sorted(out.splitlines()) == expected


def test_a_host_that_fails_ends_the_job_with_its_code(place):
    (place / "t.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': os._exit(7)\ntime.sleep(100)\n"
    )
    begun = time.monotonic()
    code, _, err = launched(*on_hosts(), "t.py")
    assert code == 7, err
    assert "b: LaunchError: rank 1 of 2" in err
    assert time.monotonic() - begun < LIMIT


def test_a_host_that_cannot_be_reached(place):
    (place / "t.py").write_text(MEET)
    code, _, err = launched(*on_hosts("a,down"), "t.py")
    assert code == 255
    assert "down: ssh: connect to host down" in err
    assert "fnaccel launch: down: ssh can't reach it" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_ranks_of_all_hosts_save(place, number):
    (place / "wait.py").write_text(WAIT)
    process = begin(*on_hosts(), "wait.py")
    until(place / "ready0", place / "ready1")
    process.send_signal(number)
    out, err = ended(process)
    assert process.returncode == 75, err
    assert sorted(out.splitlines()) == ["a: told 0", "b: told 1"]


def test_hosts_end_when_this_machine_is_killed(place):
    (place / "wait.py").write_text(WAIT)
    process = begin(*on_hosts(), "wait.py")
    ready = [place / "ready0", place / "ready1"]
    until(*ready)
    process.kill()
    ended(process)
    end = time.monotonic() + LIMIT
    while any(Path(f"/proc/{path.read_text()}").exists() for path in ready):
        assert time.monotonic() < end
        time.sleep(0.05)


SBATCH = """#!/bin/sh
# what slurmctld would do on a machine of two nodes
echo "Submitted batch job 7"
grep -c "^#SBATCH" "$1" > directives
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST="n[0-1]"
exec setsid bash "$1" > job.log 2>&1
"""
SCONTROL = """#!/bin/sh
case "$1" in show) echo 127.0.0.1; echo n1;; requeue) echo "$2" > requeued;; esac
"""
SRUN = """#!/bin/bash
# one task for each node, or two tasks for `env`, with the variables of real srun
shift
count=$FAKE_TASKS
trap 'kill -USR1 $(jobs -p)' USR1
trap 'kill -TERM $(jobs -p)' TERM
for number in $(seq 0 $((count - 1))); do
    SLURM_NODEID=$number SLURM_PROCID=$number SLURM_LOCALID=$number SLURM_STEP_NUM_TASKS=$count \\
    SLURM_NTASKS_PER_NODE=$count "$@" & tasks[$number]=$!
done
worst=0
for task in "${tasks[@]}"; do
    wait "$task"; code=$?
    while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done
    [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
"""


@pytest.fixture
def cluster(place, monkeypatch):
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        program(place / "bin" / name, text)
    monkeypatch.setenv("FAKE_TASKS", "2")
    return place


def test_a_job_script_is_submitted_and_runs(cluster):
    (cluster / "meet.py").write_text(MEET)
    (cluster / "gpt.yaml").write_text(
        "strategy: ddp\nlaunch: {ranks: 2, machines: 2, cpu: true, port: PORT, slurm: {partition: gpu,"
        " setup: [export HELLO=1]}}".replace("PORT", str(free_port()))
    )
    code, out, err = launched("--config", "gpt.yaml", "meet.py", "it's")
    assert (code, out) == (0, "Submitted batch job 7\n"), err
    log = (cluster / "job.log").read_text()
    lines = sorted(line for line in log.splitlines() if line[:2] in ("0 ", "1 ", "2 ", "3 "))
    assert lines == [f"{rank} 2 1111.0 ddp {cluster} it's" for rank in range(4)], log
    script = (cluster / "fnaccel-job.sh").read_text()
    for line in ("--partition=gpu", "--nodes=2", "--ntasks-per-node=1", "--signal=B:USR1@120", "--requeue"):
        assert f"#SBATCH {line}\n" in script
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    assert "export HELLO=1\n" in script
    assert not (cluster / "requeued").exists()


def test_srun_starts_the_ranks_themselves(cluster):
    (cluster / "meet.py").write_text(MEET)
    flags = [
        "--set",
        "launch.slurm.srun=rank",
        "--cpu",
        "-n",
        2,
        "--master-port",
        free_port(),
        "--strategy",
        "ddp",
    ]
    code, _, err = launched("--carrier", "slurm", *flags, "meet.py")
    log = (cluster / "job.log").read_text()
    assert code == 0, err + log
    lines = sorted(line for line in log.splitlines() if line[:2] in ("0 ", "1 "))
    assert lines == [f"{rank} 1 11.0 ddp {cluster}" for rank in range(2)]


def test_a_preempted_job_goes_back_into_the_queue(cluster, monkeypatch):
    monkeypatch.setenv("FAKE_TASKS", "1")
    (cluster / "wait.py").write_text(WAIT.replace("SIGTERM", "SIGUSR1"))
    process = begin("--carrier", "slurm", "--cpu", "-n", 2, "wait.py")
    until(cluster / "ready0", cluster / "ready1")
    # SLURM signals the batch shell only
    (shell,) = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if b"fnaccel-job.sh" in command_line(path) and command_line(path).startswith(b"bash")
        and (path / "cwd").readlink() == cluster
    ]  # fmt: skip
    os.kill(shell, signal.SIGUSR1)
    ended(process)
    assert process.returncode == 75, (cluster / "job.log").read_text()
    assert (cluster / "requeued").read_text() == "7\n"
    assert sorted((cluster / "job.log").read_text().splitlines())[-2:] == ["told 0", "told 1"]


def command_line(path):
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


def test_the_job_script_is_bash(cluster):
    script = "fnaccel-job.sh"
    program(cluster / "bin" / "sbatch", "#!/bin/sh\n")
    (cluster / "t.py").write_text("")
    launched("--carrier", "slurm", "--nnodes", "2:4", "-n", 8, "--env", "A=it's $HOME", "t.py")
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    text = (cluster / script).read_text()
    assert "#SBATCH --nodes=2-4\n#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert '--nnodes 2:4 --node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR"' in text


def test_mpirun(place, monkeypatch):
    if shutil.which("mpirun") is None:
        pytest.skip("there is no `mpirun` program (Debian: openmpi-bin)")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    (place / "meet.py").write_text(MEET)
    flags = [
        "--cpu",
        "-n",
        2,
        "--threads",
        1,
        "--strategy",
        "ddp",
        "--set",
        'run={"seed": 3}',
        "--env",
        "A=1,2;3 4",
    ]
    code, out, err = launched("--carrier", "mpirun", *flags, "meet.py", "it's")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"{rank} 1 11.0 ddp {place} it's" for rank in range(2)]
    (place / "a.py").write_text("import os, sys; os.write(1, os.environb[b'A'] + b'\\n'); sys.exit(3)")
    code, out, err = launched("--carrier", "mpirun", *flags, "a.py")
    assert (code, set(out.splitlines())) == (3, {"1,2;3 4"}), err
    (place / "hosts").write_text(f"{socket.gethostname()} slots=2\n")
    code, out, err = launched("--carrier", "mpirun", "--cpu", "--hostfile", "hosts", "meet.py")
    assert code == 0, err
    assert len(out.splitlines()) == 2


def test_the_commands_of_a_dry_run_can_be_pasted(place):
    (place / "meet.py").write_text(MEET)
    code, text, err = launched("--dry-run", "--cpu", "--strategy", "ddp", "-n", 2, "meet.py", "it's")
    assert code == 0, err
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert sorted(done.stdout.splitlines()) == [f"{rank} 1 11.0 ddp {place} it's" for rank in range(2)]


def test_a_program_that_is_not_there(place, monkeypatch):
    (place / "t.py").write_text("")
    monkeypatch.setenv("PATH", str(place))
    for carrier, hint in (("mpirun", "openmpi-bin"), ("slurm", "--dry-run")):
        code, _, err = launched("--carrier", carrier, "--cpu", "t.py")
        assert code == 2
        assert "is not installed" in err
        assert hint in err
