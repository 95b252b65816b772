"""`fnaccel config show`, `validate` and `default`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fnaccel.cli.config import default
from fnaccel.cli.config.checking import mistakes_of
from fnaccel.cli.launch import read
from fnaccel.cli.main import main
from fnaccel.config import from_yaml
from fnaccel.config.questions import Machine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    return tmp_path


def test_each_value_has_its_source(folder, capsys, monkeypatch):
    (folder / "fnaccel.yaml").write_text("strategy: ddp\nprecision: bf16\nlaunch: {ranks: 2, threads: 1}")
    monkeypatch.setenv("FNACCEL_SET", "precision=fp16 launch.env.A=1 launch.ranks=3")
    assert main(["config", "show", "--set", "launch.ranks=4", "--clip-norm", "1", "--json"]) == 0
    rows = {row["key"]: (row["value"], row["source"]) for row in json.loads(capsys.readouterr().out)}
    assert rows["strategy"] == ("ddp", "fnaccel.yaml")
    assert rows["precision"] == ("fp16", "FNACCEL_SET")
    assert rows["launch.env"] == ({"A": "1"}, "FNACCEL_SET")
    assert rows["launch.ranks"] == (4, "flag")
    assert rows["launch.threads"] == (1, "fnaccel.yaml")
    assert rows["clip_norm"] == (1.0, "flag")
    assert rows["optimizer.lr"] == (0.001, "default")


def test_the_table_has_a_line_for_each_field(folder, capsys):
    assert main(["config", "show", "--strategy", "fsdp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["strategy", "flag", "fsdp"]
    assert ["launch.watchdog", "default", "120.0"] in [line.split() for line in lines]


def test_records_are_shown_by_field(folder, capsys):
    """They were printed as `TpuVmRecipe(...)`, in 200 columns, and as such a text in JSON."""
    (folder / "fnaccel.yaml").write_text(
        "launch: {tpu_vm: {name: [a], zone: b}}\noptimizer: {by_pattern: {'*bias': {name: sgd, lr: 0.1}}}"
    )
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Recipe(" not in "".join(lines)
    assert ["launch.tpu_vm.zone", "fnaccel.yaml", "b"] in [line.split() for line in lines]
    assert max(len(line) for line in lines if line.startswith("launch")) < 80
    assert main(["config", "show", "--json"]) == 0
    rows = {row["key"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["optimizer.by_pattern"]["*bias"]["name"] == "sgd"
    assert rows["launch.sagemaker.spot"] is False


def test_validate_lists_all_mistakes(folder, capsys):
    (folder / "r.yaml").write_text(
        "strategy: fdsp\nprecision: bf61\nacumulate: 2\nclip_norm: small\n"
        "optimizer: {name: adamv, by_model: {a: {name: sdg, lrr: 1}}}\nrun: {steps: 0}\n"
        "data: {windw: 1, prefetch: many}\ntracking: 3\nlaunch: {port: 70000}\n"
    )
    assert main(["config", "validate", "r.yaml"]) == 2
    said = capsys.readouterr().err
    for words in (
        *(
            "'acumulate'",
            "'lrr'",
            "'windw'",
            "recipe.clip_norm",
            "data.prefetch",
            "steps=0",
            "tracking holds int",
        ),
        *("called 'fdsp'", "called 'bf61'", "called 'adamv'", "called 'sdg'", "70000 is no port"),
    ):
        assert said.count(words) == 1, words
    assert said.count("\n  where: ") == said.count("\n  fix: ") == 12
    mistakes = []
    assert from_yaml("r.yaml", mistakes).launch.port == 70000
    assert len(mistakes) == 7


def test_a_file_without_mistakes(folder, capsys):
    (folder / "r.yaml").write_text(
        "strategy: fsdp\noptimizer: {schedule: cosine, schedule_options: {total: 3 epochs}}\n"
        "launch: {machines: 2, address: a, ranks: 8, gpus: 0}\ntracking: {trackers: jsonl}\n"
    )
    assert main(["config", "validate", "r.yaml"]) == 0
    assert capsys.readouterr().out == "r.yaml is a recipe\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("strategy: fdsp", "did you mean 'fsdp'?"),
        ("precision: bf61", "did you mean 'bf16'?"),
        ("stratgy: ddp", "no key 'stratgy'"),
        ("optimizer: {name: adamv}", "no optimizer is called 'adamv'"),
        ("tracking: {trackers: jsnl}", "jsonl"),
        ("compile_options: {mode: max-autotune}", "has no effect"),
        ("launch: {ranks: 0}", "0 processes were asked for"),
        ("launch: {machines: 2}", "2 machines need --master-addr"),
        ("launch: {min_ranks: 1}", "no restarts"),
        ("launch: {port: 70000}", "70000 is no port"),
        ("launch: {tpu: true, cpu: true}", "--tpu and --cpu together"),
        ("launch: {env: {RANK: 1}}", "RANK can't be set"),
    ],
)
def test_mistakes_that_validate_finds(folder, capsys, text, says):
    (folder / "r.yaml").write_text(text)
    assert main(["config", "validate", "r.yaml"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n  where: ") == said.count("\n  fix: ") == 1


def test_no_file_and_no_such_action(folder, capsys):
    assert main(["config", "validate", "none.yaml"]) == 2
    assert "no file none.yaml" in capsys.readouterr().err
    assert main(["config", "shw"]) == 2
    assert "did you mean 'show'?" in capsys.readouterr().err


def test_default_writes_a_file_once(folder, capsys, monkeypatch):
    monkeypatch.setattr(default, "this_machine", Machine)
    assert main(["config", "default"]) == 0
    text = (folder / "fnaccel.yaml").read_text()
    assert text in capsys.readouterr().out
    job = read(["t.py"])
    assert (job.processes, job.cpu) == (1, True)
    assert main(["config", "default"]) == 2
    assert "there is a file fnaccel.yaml already" in capsys.readouterr().err
    assert (folder / "fnaccel.yaml").read_text() == text


@pytest.mark.parametrize("words", [
    ["import", "accelerate.yaml", "-o", "imported.yaml"],
    ["validate", "wrong.yaml"],
    ["-o", "asked.yaml", "--answers", "answers.yaml"],
    ["default"],
    ["update", "gpt.yaml"],
])  # fmt: skip
def test_no_action_waits_for_torch_to_read_a_file(folder, words):
    """torch and what it brings take seconds to import. No driver of an accelerator is here to be asked.

    `validate` says what it finds in the file first, and then looks for more with torch.
    """
    (folder / "accelerate.yaml").write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16"
    )
    (folder / "wrong.yaml").write_text("acumulate: 2")
    (folder / "gpt.yaml").write_text("strategy: fsdp\nprecision: bf16")
    (folder / "answers.yaml").write_text("seed: 3")
    (folder / "dev").mkdir()
    code = (
        "import sys; from pathlib import Path; sys.modules['torch'] = None\n"
        "from fnaccel.cli.config import machine\n"
        "machine.this_machine.__defaults__ = (Path('dev'),)\n"
        f"from fnaccel.cli.main import main; sys.exit(main(['config', *{words}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    first, _, later = done.stderr.partition("Traceback")
    assert bool(later) == ("wrong.yaml" in words)
    assert done.returncode == (1 if "wrong.yaml" in words else 0)
    assert ("no key 'acumulate'" in first) == ("wrong.yaml" in words)


@pytest.mark.parametrize(
    ("count", "bf16", "plan", "precision"),
    [(0, False, "local", "fp32"), (1, True, "local", "bf16"), (8, True, "ddp", "bf16")],
)
def test_defaults_for_machines(count, bf16, plan, precision):
    recipe = from_yaml(default.default_text(count, bf16=bf16))
    assert (recipe.strategy, recipe.precision, recipe.launch.ranks) == (plan, precision, max(1, count))
    assert mistakes_of(recipe) == []
