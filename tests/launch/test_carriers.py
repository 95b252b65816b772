"""Carriers as pure functions: from a command line to commands and texts. Nothing is started here."""

from __future__ import annotations

import shlex

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fnaccel.cli import launch as command
from fnaccel.cli.launch import read, read_order
from fnaccel.cli.main import main
from fnaccel.errors import LaunchError
from fnaccel.launch.carrier import choose, plan
from fnaccel.launch.carriers.command_line import options_of, program_of
from fnaccel.launch.carriers.environment import carried
from fnaccel.launch.carriers.mpirun import flavor
from fnaccel.launch.job import Job
from fnaccel.launch.presets import find_cards, nccl_variables
from fnaccel.launch.request import Request
from fnaccel.launch.sections import HostsRecipe, TpuVmRecipe

OPEN_MPI, HYDRA = "mpirun (Open MPI) 4.1.4", "HYDRA build details:\n    Version: 4.0.2"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    (tmp_path / "t.py").write_text("print('ran')")
    return tmp_path


def planned(line, **facts):
    order = read_order(shlex.split(line))
    request = attrs.evolve(order.request, python="python", folder="/data", environ={}, **facts)
    return plan(request, order.carrier)


@pytest.mark.parametrize(
    ("line", "carrier"),
    [
        ("t.py", "local"),
        ("--nnodes 2 --master-addr a t.py", "elastic"),
        ("--hosts a,b t.py", "ssh"),
        ("--hosts a,b --carrier pdsh t.py", "pdsh"),
        ("--hosts a,b --carrier mpirun -n 2 t.py", "mpirun"),
        ("--set launch.slurm.partition=gpu t.py", "slurm"),
        ("--tpu-name vm --tpu-zone z t.py", "tpu"),
        ("--set launch.sagemaker.role=r t.py", "sagemaker"),
        ("--set launch.slurm.partition=gpu --set launch.sagemaker.role=r --carrier slurm t.py", "slurm"),
    ],
)
def test_the_fields_imply_the_carrier(line, carrier):
    assert read_order(["--cpu", *shlex.split(line)]).carrier == carrier


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--carrier slrum t.py", "did you mean 'slurm'"),
        ("--set launch.slurm.partition=a --hosts b t.py", "options of several carriers: ssh, slurm"),
        ("--carrier local --nnodes 2 t.py", "the carrier local, and 2 machines"),
        ("--carrier ssh t.py", "no hosts to start on"),
        ("--hosts a,b --nnodes 3 t.py", "3 machines, and 2 hosts"),
        ("--hosts a,b --nnodes 3 --carrier mpirun -n 1 t.py", "3 machines, and 2 hosts"),
        ("--set launch.sagemaker.image=i t.py", "a training job needs a role"),
        ("--carrier ssh --hosts a --include b t.py", "b, which is no host"),
        ("--carrier mpirun --hosts a,b t.py", "number of ranks on each host is unknown"),
        ("--carrier mpirun --max-restarts 2 t.py", "--max-restarts can't be used with the carrier mpirun"),
        ("--carrier tpu t.py", "no name of a TPU VM"),
        ("--tpu-name mine t.py", "in no zone"),
        ("--tpu-zone z t.py", "--tpu-zone without --tpu-name"),
        ("--carrier slurm --set launch.slurm.srun=rank t.py", "number of ranks on a node is unknown"),
        ("--carrier slurm --set launch.slurm.srun=each t.py", "srun: each"),
        ("--rdzv-conf timeout=3 --nnodes 2 --master-addr a t.py", "no key 'timeout'"),
        ("--rdzv-conf join_timeout=3 t.py", "--rdzv-conf, and one machine"),
        ("--rdzv-conf join_timeout=x --nnodes 2 --master-addr a t.py", "seconds above 0"),
        ("--numa --cpu-affinity t.py", "--numa and --cpu-affinity together"),
        ("--monitor-interval 0 t.py", "a look each 0 seconds"),
        ("--no-python -m t", "--no-python and -m together"),
        ("--nccl gamer t.py", "nccl='gamer' is no preset"),
    ],
)
def test_mistakes_are_one_message_before_anything_starts(line, says, capsys):
    assert main(["launch", "--dry-run", "--cpu", *shlex.split(line)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n  where: ") == said.count("\n  fix: ") == 1


EVERY = Job(
    script="my train.py", args=("--lr", "0.1", "-n", "a b"), ranks=4, machines=3, min_machines=2, machine=1,
    address="h", port=5, cpu=True, affinity=True, threads=3, grace=0.5, restarts=2, watchdog=7.5,
    env={"A": "x y", "B": ""}, role="r", rdzv={"join_timeout": 5}, monitor_interval=0.5, tee="logs", quiet=True, debug=True,
    nccl="consumer",
    overrides={"strategy": "ddp(2) * fsdp(2)", "optimizer.lr": 1e-4, "precision": "bf16", "checkpoint.directory": "1",
               "optimizer.options": {"a": [1, None, True]}, "transforms": []},
)  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        EVERY,
        Job(module="pkg.train", args=("-m",), ranks=2, min_ranks=1, restarts=1, gpus="0,1", tee=None),
        Job(script="t.py", ranks=1, tpu=True),
        Job(script="run.sh", ranks=1, python=False, numa=True),
    ],
)
def test_a_command_line_gives_back_its_job(job, monkeypatch):
    monkeypatch.setattr("fnaccel.launch.accelerators.count_accelerators", lambda environ: 4)
    monkeypatch.setenv("FNACCEL_SET", "launch.carrier=slurm")
    (command.Path("fnaccel.yaml")).write_text("strategy: zero\nlaunch: {slurm: {partition: gpu}}")
    monkeypatch.delenv("FNACCEL_SET")
    words = options_of(job) + program_of(job)
    assert read(words) == attrs.evolve(job, carrier="elastic" if job.several else "local")


@given(
    st.one_of(
        st.text(st.characters(codec="ascii", exclude_characters="\0")), st.integers(), st.booleans(), st.none(),
        st.floats(allow_nan=False), st.lists(st.text(max_size=3), max_size=2),
    )
)  # fmt: skip
def test_a_value_is_read_as_it_was_written(value):
    from fnaccel.cli.overriding import parse_value

    options = options_of(Job(script="t.py", overrides={"optimizer.options.x": value}))
    name, _, text = options[-1].partition("=")
    back = parse_value(text)
    assert (name, back, type(back)) == ("optimizer.options.x", value, type(value))


def test_local_shows_the_variables_of_each_rank():
    result = planned("--cpu -n 2 --env A=1 --strategy ddp --role trainer t.py --lr 1", port=4321)
    first, second = result.commands
    assert first.words == ("python", "t.py", "--lr", "1")
    assert (first.env["RANK"], second.env["RANK"]) == ("0", "1")
    assert first.env["MASTER_PORT"] == second.env["MASTER_PORT"] == "4321"
    assert first.env["FNACCEL_OVERRIDES"] == '{"strategy": "ddp"}'
    assert (first.env["A"], first.env["ROLE_NAME"], first.env["FNACCEL_DEVICE"]) == ("1", "trainer", "cpu")


def test_elastic_shows_the_command_of_each_machine():
    line = "--cpu --nnodes 2:3 --master-addr 10.0.0.1 -n 4 --max-restarts 2 t.py"
    texts = [one.text for one in planned(line).commands]
    assert texts == [
        "python -m fnaccel launch --no-config --carrier elastic -n 4 --nnodes 2:3 "
        f"--node-rank {number} --master-addr 10.0.0.1 --cpu --max-restarts 2 t.py"
        for number in range(3)
    ]
    assert len(planned(line.replace("--cpu", "--cpu --node-rank 1")).commands) == 1


def test_a_dry_run_starts_nothing(capsys, folder):
    assert main(["launch", "--dry-run", "--cpu", "-n", "2", "missing.py"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# local: 2 ranks on this machine")
    assert "RANK=1" in out
    assert out.rstrip().endswith("missing.py &\nwait")
    assert main(["launch", "--dry-run", "--carrier", "slurm", "t.py"]) == 0
    assert not (folder / "fnaccel-job.sh").exists()
    assert "#SBATCH --nodes=1" in capsys.readouterr().out


def test_open_mpi(folder):
    result = planned("--carrier mpirun --cpu -n 2 --threads 2 --strategy ddp --env A=1 t.py", mpi=OPEN_MPI)
    (one,) = result.commands
    assert one.env == {
        "A": "1", "FNACCEL_OVERRIDES": '{"strategy": "ddp"}', "FNACCEL_DEVICE": "cpu", "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    assert " ".join(one.words) == (
        "mpirun -np 2 --bind-to none -x A -x FNACCEL_DEVICE -x FNACCEL_OVERRIDES -x OMP_NUM_THREADS python -u t.py"
    )
    (folder / "h").write_text("a slots=4\nb slots=4\n")
    (one,) = planned("--carrier mpirun --hostfile h --numa t.py", mpi=OPEN_MPI).commands
    words = "mpirun -np 8 --hostfile h --map-by ppr:4:node --bind-to numa -x MASTER_ADDR -x MASTER_PORT python -u t.py"
    assert " ".join(one.words) == words
    assert (one.env["MASTER_ADDR"], one.env["MASTER_PORT"]) == ("a", "29500")
    (one,) = planned("--carrier mpirun --hostfile h --exclude a -n 2 t.py", mpi=OPEN_MPI).commands
    assert one.words[:5] == ("mpirun", "-np", "2", "--host", "b:2")


def test_mpich_and_intel_mpi():
    (one,) = planned("--carrier mpirun --hosts a,me@b -n 2 --cpu-affinity t.py", mpi=HYDRA).commands
    assert " ".join(one.words) == "mpirun -n 4 -ppn 2 -hosts a,b -bind-to core python -u t.py"
    assert flavor("Intel(R) MPI Library for Linux* OS, Version 2021.8") == "mpich"
    assert flavor("") == "openmpi"


def test_ssh_has_one_launcher_for_each_host():
    first, second = planned(
        "--hosts a:4,b:4 --include a:0,2@b:1,3 --max-restarts 1 --master-port 5 t.py x"
    ).commands
    assert first.words[:-1] == ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "a")
    expected = (
        "python -m fnaccel launch --end-with-input --no-config --carrier elastic -n 2 --nnodes 2 --node-rank {} --master-addr a "
        "--master-port 5 --max-restarts 1 --gpus {} t.py x"
    )
    assert first.words[-1] == "cd /data && exec " + expected.format(0, "0,2")
    assert second.words[-1] == "cd /data && exec " + expected.format(1, "1,3")


def test_one_host_is_one_machine():
    (one,) = planned("--hosts me@a -n 2 t.py").commands
    assert "--carrier local -n 2 t.py" in one.words[-1]
    assert "--nnodes" not in one.words[-1]


def test_what_other_hosts_get():
    environ = {
        "NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "OMP_NUM_THREADS": "1", "HF_HOME": "/h", "CCL_WORKER_COUNT": "1",
        "HF_TOKEN": "secret", "WANDB_API_KEY": "secret", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_SOCKET_IFNAME": "eth0", "FNACCEL_SET": "x=1", "PATH": "/bin", "FILE_A": "b",
    }  # fmt: skip
    assert sorted(carried(environ)) == [
        "CCL_WORKER_COUNT",
        "HF_HOME",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
    ]


def test_pdsh_numbers_the_hosts():
    (one,) = planned("--carrier pdsh --hosts a,b -n 2 --env A=50% t.py").commands
    assert one.words[:7] == ("pdsh", "-S", "-b", "-f", "1024", "-w", "a,b")
    assert "--node-rank %n --master-addr a --env A=50%% t.py" in one.words[-1]
    assert one.env == {"PDSH_RCMD_TYPE": "ssh"}
    with pytest.raises(LaunchError, match="pdsh runs one command on all hosts"):
        planned("--carrier pdsh --hosts a:2,b:4 --include a@b:2,3 t.py")


def test_a_tpu_vm_from_afar(folder):
    (folder / "fnaccel.yaml").write_text("precision: bf16")
    command.os.environ["FNACCEL_SET"] = "optimizer.lr=0.5"
    try:
        line = (
            "--tpu-name mine --tpu-zone=us-central2-b --tpu-sudo --tpu-folder 'my code' train.py --tpu-name a"
        )
        (one,) = planned(line).commands
    finally:
        del command.os.environ["FNACCEL_SET"]
    assert one.words[:-1] == (
        "gcloud", "compute", "tpus", "tpu-vm", "ssh", "mine", "--zone", "us-central2-b", "--worker", "all", "--command",
    )  # fmt: skip
    assert one.words[-1] == (
        "cd 'my code' && sudo fnaccel launch --no-config --carrier local --tpu --set precision=bf16 "
        "--set optimizer.lr=0.5 train.py --tpu-name a"
    )


def test_a_pod_has_no_number_of_machines():
    request = Request(job=Job(script="t.py", machines=2, tpu_vm=TpuVmRecipe(name="a", zone="z")))
    with pytest.raises(LaunchError, match="--nnodes can't be used with the carrier tpu"):
        plan(request, "tpu")


@pytest.mark.parametrize(
    ("folder_there", "place"),
    [("~", "~"), ("~/my code", "~/'my code'"), ("~/", "~/"), ("~other/x", "'~other/x'"), ("/a/b", "/a/b")],
)
def test_only_the_vm_knows_its_home(folder_there, place):
    request = Request(job=Job(script="t.py", tpu_vm=TpuVmRecipe(name="a", zone="z", folder=folder_there)))
    assert plan(request, "tpu").commands[0].words[-1].startswith(f"cd {place} && fnaccel launch ")


def test_a_pod_is_set_up_first(folder):
    (folder / "set_up.sh").write_text("# data\ngsutil cp gs://a b\n\nls\n")
    vm = TpuVmRecipe(
        name="pod1,pod2", zone="z", workers=1, install="fnaccel 'torch_xla>=2.9'", command_file="set_up.sh",
        commands=["echo hello"], env={"A": "x y"}, sudo=True,
    )  # fmt: skip
    result = plan(Request(job=Job(module="pkg", tpu_vm=vm)), "tpu")
    assert [one.label for one in result.commands] == ["pod1", "pod2"]
    assert result.together
    words = result.commands[1].words
    assert (words[5], words[9]) == ("pod2", "1")
    assert words[-1].split(" && ") == [
        "export A='x y'",
        "sudo -E pip install fnaccel 'torch_xla>=2.9'",
        "gsutil cp gs://a b",
        "ls",
        "echo hello",
        "sudo -E fnaccel launch --no-config --carrier local --env 'A=x y' --tpu -m pkg",
    ]
    with pytest.raises(LaunchError, match="there is no file"):
        plan(Request(job=Job(tpu_vm=TpuVmRecipe(name="a", zone="z", command_file="none.sh"))), "tpu")


def test_choose_by_hand():
    job = Job(script="t.py", hosts=HostsRecipe(names="a"))
    assert choose(job) == "ssh"
    assert choose(attrs.evolve(job, carrier="pdsh")) == "pdsh"


def test_nccl_on_consumer_cards(tmp_path):
    cards = ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"]
    off = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    assert nccl_variables(None, cards=cards, driver="545.23.08") == off
    assert nccl_variables(None, cards=cards, driver="550.54.15") == {}
    assert nccl_variables(None, cards=cards[:1], driver="545.23.08") == {}
    assert nccl_variables(None, cards=["NVIDIA H100 80GB HBM3"] * 8, driver="535.1") == {}
    assert nccl_variables("default", cards=cards, driver="545.23") == {}
    assert nccl_variables("consumer", cards=[]) == off
    for number, name in ((1, "NVIDIA GeForce RTX 4090"), (0, "NVIDIA GeForce RTX 4080")):
        path = tmp_path / "gpus" / f"0000:0{number}:00.0"
        path.mkdir(parents=True)
        (path / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 1\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  545.23.08  Mon Nov\nGCC"
    )
    assert find_cards(tmp_path) == (["NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4090"], "545.23.08")
    assert find_cards(tmp_path / "none") == ([], "")
