"""Options of `fnaccel launch` to a `Job`; nothing is started here."""

from __future__ import annotations

import pytest

from fnaccel.cli.launch import read
from fnaccel.cli.main import main
from fnaccel.cli.overriding import parse_value
from fnaccel.launch.job import Job


def test_the_options_of_a_job():
    flags = "-n 2 --threads 3 --timeout-grace 0.5 --nnodes 4 --node-rank 1 --master-addr a --master-port 5"
    restarts = ["--max-restarts", "3", "--min-ranks", "1"]
    assert read([*flags.split(), *restarts, "--cpu", "train.py", "--lr", "1"]) == Job(
        script="train.py", args=("--lr", "1"), ranks=2, threads=3, grace=0.5, machines=4, machine=1,
        address="a", port=5, cpu=True, restarts=3, min_ranks=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "fewest", "most", "machine"),
    [
        ("--nnodes 4", 4, 4, None),
        ("--nnodes 2:4", 2, 4, None),
        ("--nnodes 1:4 --node-rank 0", 1, 4, 0),
        ("--nnodes 1", 1, 1, None),
        ("--nnodes 1:1", 1, 1, None),
    ],
)
def test_how_many_machines(flags, fewest, most, machine):
    address = ["--master-addr", "a"] if most > 1 else []
    job = read([*flags.split(), *address, "--cpu", "t.py"])
    assert (job.least_machines, job.machines, job.machine) == (fewest, most, machine)
    assert job.several == (most > 1)


@pytest.mark.parametrize(
    ("arguments", "script", "module", "args"),
    [
        (["t.py"], "t.py", None, ()),
        (["-n", "1", "t.py", "-n", "2"], "t.py", None, ("-n", "2")),
        (["t.py", "--nproc=2", "-m", "x"], "t.py", None, ("--nproc=2", "-m", "x")),
        (["t.py", "--", "a"], "t.py", None, ("--", "a")),
        (["-m", "a.b"], None, "a.b", ()),
        (["--cpu", "-m", "a.b", "-m", "c", "t.py", "--cpu"], None, "a.b", ("-m", "c", "t.py", "--cpu")),
        (["-m", "a.b", "--help"], None, "a.b", ("--help",)),
        (["t.py", "--help"], "t.py", None, ("--help",)),
    ],
)
def test_what_follows_the_program_is_its_own(arguments, script, module, args):
    job = read(arguments)
    assert (job.script, job.module, job.args) == (script, module, args)


def test_processes_are_as_many_as_accelerators_by_default(monkeypatch):
    monkeypatch.setattr("fnaccel.launch.accelerators.count_accelerators", lambda environ: 4)
    assert read(["t.py"]).processes == 4
    assert read(["--cpu", "t.py"]).processes == 1
    assert read(["-n", "2", "t.py"]).processes == 2
    assert read(["-n", "8", "--cpu", "t.py"]).processes == 8
    monkeypatch.setattr("fnaccel.launch.accelerators.count_accelerators", lambda environ: 0)
    assert read(["t.py"]).processes == 1
    assert read(["-n", "8", "t.py"]).processes == 8


def test_overrides_are_dotted_fields_the_last_one_wins(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("strategy: local\naccumulate: 1\noptimizer:\n  lr: 0.5\n  options: {weight_decay: 0.1}\n")
    flags = ["--strategy", "fsdp", "--set", "optimizer.lr=1e-4", "--set", "data.seed=3", "--accumulate", "2"]
    assert read(["--config", str(file), *flags, "t.py"]).overrides == {
        "strategy": "fsdp",
        "accumulate": 2,
        "optimizer.lr": 1e-4,
        "optimizer.options": {"weight_decay": 0.1},
        "data.seed": 3,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("3", 3), ("true", True), ("True", True), ("null", None), ("None", None),
        ("bf16", "bf16"), ("a=b", "a=b"), ('{"x": [1]}', {"x": [1]}), ("('a',)", ("a",)),
        ("ddp(2)", "ddp(2)"), ("", ""),
    ],
)  # fmt: skip
def test_values(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        ("-n 0 tests/conftest.py", "LaunchError: 0 processes", "-n 1"),
        ("-n two t.py", "invalid int value: 'two'", "--help"),
        ("", "nothing to run", "fnaccel launch train.py"),
        ("-m", "-m needs the name", "--help"),
        ("missing.py", "no file missing.py", "check the path"),
        ("-m no_such_module", "no module 'no_such_module'", "check its name"),
        ("--stratgy ddp t.py", "no option --stratgy", "did you mean '--strategy'?"),
        ("--strategy fdsp t.py", "no strategy is called 'fdsp'", "did you mean 'fsdp'?"),
        ("--precision bf61 t.py", "no precision is called 'bf61'", "did you mean 'bf16'?"),
        ("--compile blocks t.py", "compile='blocks' is no scope", "auto, block, loss, step"),
        ("--accumulate 0 t.py", "accumulate=0", "accumulate is 1 or more"),
        ("--set lr t.py", "'lr' sets nothing", "--set optimizer.lr"),
        ("--set optimizer.lrr=1 t.py", "no key 'lrr'", "did you mean 'lr'?"),
        ("--set optimiser.lr=1 t.py", "no part 'optimiser'", "did you mean 'optimizer'?"),
        ("--set optimizer.lr=fast t.py", "wrong kind", "Recipe"),
        ("--config missing.yaml t.py", "no file missing.yaml", "check the path"),
        ("--nnodes 2 t.py", "2 machines need --master-addr", "address of the first machine"),
        ("--nnodes 2 --node-rank 0 t.py", "2 machines need --master-addr", "--master-addr"),
        ("--nnodes two --master-addr a t.py", "'two' is no number of machines", "--nnodes 2:4"),
        ("--nnodes 2: --master-addr a t.py", "'2:' is no number of machines", "--nnodes 2:4"),
        ("--nnodes 1:2:3 --master-addr a t.py", "'1:2:3' is no number of machines", "--nnodes 2:4"),
        ("--nnodes 3:2 --master-addr a t.py", "3:2 machines were asked for", "1 <= MIN <= MAX"),
        ("--nnodes 0:2 --master-addr a t.py", "0:2 machines were asked for", "1 <= MIN <= MAX"),
        (
            "--nnodes 2 --master-addr a --max-restarts 1 --min-ranks 1 t.py",
            "--min-ranks is for one machine",
            "--nnodes MIN:MAX",
        ),
        ("--nnodes 2 --node-rank 2 --master-addr a t.py", "no machine 2 among 2", "--node-rank from 0 to 1"),
        ("--node-rank 1 t.py", "--node-rank without --nnodes", "--nnodes 2"),
        ("--master-addr a t.py", "--master-addr without --nnodes", "--nnodes 2"),
        ("--nnodes 0 t.py", "0 machines", "--nnodes 1"),
        ("--min-ranks 1 tests/conftest.py", "no restarts", "--max-restarts 3"),
    ],
)
def test_bad_arguments_are_one_message_before_anything_starts(arguments, what, fix, capsys):
    assert main(["launch", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert fix in said.split("fix: ", 1)[1]
    assert said.count("\n  where: ") == said.count("\n  fix: ") == 1


def test_more_processes_than_accelerators(monkeypatch, capsys):
    monkeypatch.setattr("fnaccel.launch.accelerators.count_accelerators", lambda environ: 1)
    assert main(["launch", "-n", "2", "t.py"]) == 2
    assert "2 processes need an accelerator each, and there are 1" in capsys.readouterr().err


def test_flags_of_the_compiler_attention_and_fp8():
    text = "--compile step --compile-backend aot_eager --compile-mode max-autotune --attention flash"
    job = read([*text.split(), "--fp8-backend", "torchao", "--fp8-recipe", "rowwise", "t.py"])
    assert job.overrides == {
        "compile": "step",
        "attention": "flash",
        "compile_options.backend": "aot_eager",
        "compile_options.mode": "max-autotune",
        "fp8.backend": "torchao",
        "fp8.recipe": "rowwise",
    }
