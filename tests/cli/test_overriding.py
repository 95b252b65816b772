"""`fnaccel launch` from a recipe: the file, FNACCEL_SET and options, and which of them wins."""

from __future__ import annotations

import pytest

from fnaccel.cli.launch import read
from fnaccel.cli.main import main
from fnaccel.launch.variables import variables

FILE = """
strategy: ddp
run: {steps: 4}
launch:
  ranks: 3
  cpu: true
  restarts: 2
  min_ranks: 1
  affinity: true
  threads: 2
  grace: 5
  watchdog: 7
  machine: 0
  env: {A: one, B: two}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    (tmp_path / "t.py").write_text("print('ran')")
    (tmp_path / "r.yaml").write_text(FILE)
    return tmp_path


def test_a_file_describes_the_job(folder):
    job = read(["--config", "r.yaml", "t.py"])
    assert (job.processes, job.cpu, job.restarts, job.min_ranks) == (3, True, 2, 1)
    assert (job.affinity, job.threads, job.grace, job.watchdog) == (True, 2, 5.0, 7.0)
    assert job.env == {"A": "one", "B": "two"}
    assert job.overrides == {"strategy": "ddp", "run.steps": 4}, "the launcher itself uses `launch`"


def test_several_machines_in_a_file(folder):
    (folder / "m.yaml").write_text(
        "launch: {machines: 4, min_machines: 2, address: a, port: 5, machine: 1, cpu: true}"
    )
    job = read(["--config", "m.yaml", "t.py"])
    assert (job.least_machines, job.machines, job.machine, job.address, job.port) == (2, 4, 1, "a", 5)
    job = read(["--config", "m.yaml", "--nnodes", "3", "--node-rank", "2", "t.py"])
    assert (job.least_machines, job.machines, job.machine) == (3, 3, 2)


def test_options_go_over_the_file(folder):
    flags = "-n 2 --max-restarts 5 --watchdog 9 --env B=2=3 --env C= --threads 1 --set launch.affinity=false"
    job = read(["--config", "r.yaml", *flags.split(), "t.py"])
    assert (job.processes, job.restarts, job.watchdog, job.threads, job.affinity) == (2, 5, 9.0, 1, False)
    assert job.env == {"A": "one", "B": "2=3", "C": ""}
    assert read(["--config", "r.yaml", "--set", "launch.env={}", "t.py"]).env == {}


def test_the_set_variable_is_between_the_file_and_the_options(folder, monkeypatch):
    monkeypatch.setenv("FNACCEL_SET", "launch.ranks=4 launch.threads=3 strategy=fsdp launch.env.A=1")
    job = read(["--config", "r.yaml", "--threads", "1", "t.py"])
    assert (job.processes, job.threads, job.env) == (4, 1, {"A": "1", "B": "two"})
    assert job.overrides["strategy"] == "fsdp"
    assert read(["--config", "r.yaml", "--strategy", "local", "t.py"]).overrides["strategy"] == "local"


def test_the_ranks_get_the_variables_of_the_recipe(folder):
    job = read(["--cpu", "--env", "OMP_NUM_THREADS=3", "--env", "A=1", "-n", "2", "t.py"])
    found = variables(job, 0, port=1, environ={"A": "0", "FNACCEL_SET": "launch.ranks=2"}, cores=8)
    assert (found["OMP_NUM_THREADS"], found["A"]) == ("3", "1")
    assert "FNACCEL_SET" not in found, "it would go over the options again"


def test_gpus_are_counted_and_shown_to_the_ranks(folder, monkeypatch):
    seen = []

    def count(environ):
        seen.append(environ)
        return len(environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))

    monkeypatch.setattr("fnaccel.launch.accelerators.count_accelerators", count)
    job = read(["--gpus", "1,3", "t.py"])
    assert (job.processes, job.gpus, seen) == (2, "1,3", [{"CUDA_VISIBLE_DEVICES": "1,3"}])
    assert variables(job, 0, port=1, environ={})["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert read(["--set", "launch.gpus=0,2,3", "t.py"]).processes == 3
    assert read(["t.py"]).processes == 4


def test_the_file_of_the_folder_is_used_and_named(folder, capfd, monkeypatch):
    (folder / "fnaccel.yaml").write_text("launch: {ranks: 2, cpu: true}")
    assert read(["t.py"]).processes == 2
    (folder / "none.yaml").write_text("")
    assert read(["--config", "none.yaml", "--cpu", "t.py"]).processes == 1
    inner = folder / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    monkeypatch.setenv("HOME", str(folder))
    assert read(["--cpu", "t.py"]).processes == 1, "no file of another folder"


@pytest.mark.parametrize(
    ("arguments", "says", "where"),
    [
        ("--set launch.rank=2", "no key 'rank'", "ranks"),
        ("--set launch.ranks=two", "recipe.launch.ranks", "options"),
        ("--set launch.ranks=0", "0 processes were asked for", "-n 1"),
        ("--set launch.machines=2", "2 machines need --master-addr", "--master-addr"),
        ("--set launch.min_machines=2", "2:1 machines were asked for", "MIN <= MAX"),
        ("--env A", "'A' sets nothing", "--env NCCL_DEBUG=INFO"),
        ("--env RANK=3", "RANK can't be set by --env", "--master-addr"),
        ("--cpu --gpus 0", "--gpus 0, and --cpu", "one of the two"),
        ("--gpus 0", "no GPU of this machine is among 0", "nvidia-smi -L"),
        ("--config bad.yaml", "LaunchRecipe has no key 'rank'", "bad.yaml"),
    ],
)
def test_mistakes_are_one_message(folder, arguments, says, where, capsys, monkeypatch):
    monkeypatch.setattr("fnaccel.launch.accelerators.count_accelerators", lambda environ: 0)
    (folder / "bad.yaml").write_text("launch: {rank: 2}")
    assert main(["launch", *arguments.split(), "t.py"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert where in said
    assert said.count("\n  where: ") == said.count("\n  fix: ") == 1


def test_a_mistake_in_the_set_variable_names_it(folder, capsys, monkeypatch):
    monkeypatch.setenv("FNACCEL_SET", "optimizer.lrr=1")
    assert main(["launch", "t.py"]) == 2
    said = capsys.readouterr().err
    assert "no key 'lrr'" in said
    assert "where: FNACCEL_SET" in said
