"""`fnaccel config` asks: by arrows in a real terminal, by lines, and by a file of answers."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pexpect
import pytest

from fnaccel.cli.main import main
from fnaccel.config import from_yaml

DOWN, ENTER = "\x1b[B", "\r"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    return tmp_path


def start(folder, monkeypatch, *options, arrows=True):
    """`fnaccel config` in a terminal of its own."""
    if not arrows:  # a package of that name that is not there
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")
        (folder / "sitecustomize.py").write_text("import sys\nsys.modules['questionary'] = None\n")
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # pexpect answers no questions about the cursor
    return pexpect.spawn(
        sys.executable, ["-m", "fnaccel", "config", *options], cwd=str(folder), encoding="utf-8", timeout=60,
        dimensions=(40, 140),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.launcher
def test_arrow_keys(folder, monkeypatch):
    terminal = start(folder, monkeypatch)
    terminal.expect("Where do the runs start")
    terminal.send(DOWN + ENTER)  # the same command on several machines
    terminal.expect("How many machines")
    terminal.send(ENTER)
    terminal.expect("address")
    terminal.send("10.0.0.1" + ENTER)
    terminal.expect("compute on")
    terminal.send(DOWN + ENTER)  # the CPU
    terminal.expect("How many ranks")
    terminal.send("\x7f2" + ENTER)
    terminal.expect("share the model")
    terminal.send(DOWN + ENTER)  # fsdp
    for text in ("precision", "micro-batches", "norm", "torch.compile", "Recompute", "folder", "Trackers"):
        terminal.expect(text)
        terminal.send(ENTER)
    for text in ("started again", "seed"):
        terminal.expect(text)
        terminal.send(ENTER)
    terminal.expect("On each machine: fnaccel launch train.py")
    terminal.expect(pexpect.EOF)
    recipe = from_yaml(folder / "fnaccel.yaml")
    assert (recipe.strategy, recipe.launch.ranks, recipe.launch.machines) == ("fsdp", 2, 2)
    assert (recipe.launch.address, recipe.launch.cpu) == ("10.0.0.1", True)


@pytest.mark.launcher
@pytest.mark.parametrize("arrows", [True, False])
def test_ctrl_c_writes_nothing(folder, monkeypatch, arrows):
    terminal = start(folder, monkeypatch, arrows=arrows)
    terminal.expect("Where do the runs start")
    terminal.send(ENTER)
    terminal.expect("How many ranks")
    terminal.sendcontrol("c")
    terminal.expect("nothing was written")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    assert not (folder / "fnaccel.yaml").exists()


@pytest.mark.launcher
def test_a_file_is_replaced_only_if_the_user_says_so(folder, monkeypatch):
    (folder / "fnaccel.yaml").write_text("strategy: ddp\n")
    terminal = start(folder, monkeypatch, arrows=False)
    terminal.expect("fnaccel.yaml exists. Replace it")
    terminal.send("\n")
    terminal.expect("nothing was written")
    terminal.expect(pexpect.EOF)
    assert (folder / "fnaccel.yaml").read_text() == "strategy: ddp\n"
    terminal = start(folder, monkeypatch, arrows=False)
    terminal.send("y\n")
    for _ in range(12):
        terminal.send("\n")
    terminal.expect("wrote fnaccel.yaml")
    terminal.expect(pexpect.EOF)
    assert from_yaml(folder / "fnaccel.yaml").strategy == "local"


def test_lines_without_a_terminal(folder, monkeypatch, capsys):
    lines = ["1", "3", "fsdp?", "fsdp", "", "2", "1.5", "", "", "", "", "1", "7"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["config"]) == 0
    printed = capsys.readouterr()
    assert "  2. fsdp: parameters, gradients and optimizer are shared (ZeRO 3)" in printed.out
    assert "'fsdp?' is no answer to: How do the ranks share the model?" in printed.err
    recipe = from_yaml(folder / "fnaccel.yaml")
    assert (recipe.strategy, recipe.accumulate, recipe.clip_norm) == ("fsdp", 2, 1.5)
    assert (recipe.launch.ranks, recipe.launch.restarts, recipe.run.seed) == (3, 1, 7)


def test_an_input_that_ends(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    assert main(["config"]) == 2
    assert "the input ends before: How many ranks" in capsys.readouterr().err
    assert not (folder / "fnaccel.yaml").exists()


def test_a_file_of_answers(folder, capsys):
    (folder / "answers.yaml").write_text("where: slurm\nmachines: 2\npartition: gpu\ndevice: cpu\nranks: 2\n")
    assert main(["config", "--answers", "answers.yaml", "-o", "slurm.yaml"]) == 0
    assert "fnaccel launch --config slurm.yaml train.py" in capsys.readouterr().out
    launch = from_yaml(folder / "slurm.yaml").launch
    assert (launch.carrier, launch.machines, launch.slurm["partition"]) == ("slurm", 2, "gpu")
    assert main(["config", "--answers", "answers.yaml", "-o", "slurm.yaml"]) == 2
    assert "there is a file slurm.yaml already" in capsys.readouterr().err
    assert main(["config", "--answers", "answers.yaml", "-o", "slurm.yaml", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("strategie: ddp", "nobody asks for strategie after these answers"),
        ("where: here\nmachines: 2", "nobody asks for machines"),
        ("ranks: zero", "'zero' is no answer to: How many ranks"),
        ("- 1", "holds a list, not answers by name"),
        ("a: [1", "answers.yaml is not YAML"),
    ],
)
def test_answers_that_do_not_fit(folder, capsys, text, what):
    (folder / "answers.yaml").write_text(text)
    assert main(["config", "--answers", "answers.yaml"]) == 2
    assert what in capsys.readouterr().err
    assert not (folder / "fnaccel.yaml").exists()
