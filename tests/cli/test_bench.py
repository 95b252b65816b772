"""`fnaccel bench`: its arithmetic, its mistakes, and a few runs; time itself is never tested."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.cli.bench import read, run_isolated, table
from fnaccel.cli.benching.answer import Failed, Measured, Task, answer_in, write_answer
from fnaccel.cli.benching.measuring import Memory, Subject, find_subject, first_batch, measure, rows_of_rank
from fnaccel.cli.benching.verdict import (
    document,
    judge,
    pays_back_after,
    recommend,
    recommend_strategy,
    tolerance_of,
)
from fnaccel.cli.main import main
from fnaccel.config.references import load
from fnaccel.errors import ArgumentError, ConfigError
from fnaccel.step.step import as_step
from tests.tiny_models import Net, batch_of, loss_fn, program

ROOT = Path(__file__).parents[2]
EAGER = Measured(first=0.1, seconds=0.010, peak=10.0, losses=(4.0, 2.0))
FAILED = Failed(kind="CapabilityError", what="fsdp() can't do it", text="CapabilityError: all of it")
SUBJECT = """
import os, signal, torch
from torch import nn
import fnaccel as fa

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 3)
    def forward(self, x):
        return torch.tanh(self.mix(x))

def net():
    return nn.Sequential(*(Block() for _ in range(2)))

def flat():
    return nn.Linear(3, 3)

def loss_fn(model, batch):
    print("kept to itself")
    return fa.Mean((model(batch) - 1).square().sum(), weight=len(batch))

def broken(model, batch):
    raise TypeError("no such thing\\nand more")

def killed(model, batch):
    os.kill(os.getpid(), signal.SIGKILL)

batch = torch.randn(5, 3)
"""

SLEEPS = """
def sleeps(model, batch):
    import pathlib, time
    pathlib.Path("part").write_text(str(os.getpid()))
    pathlib.Path("part").rename("pid")
    time.sleep(200)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "subject.py").write_text(SUBJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def bench(*flags, loss="loss_fn", model="net"):
    return main(
        [
            "bench",
            f"subject:{loss}",
            "--model",
            f"subject:{model}",
            "--batch",
            "subject:batch",
            "--cpu",
            *flags,
        ]
    )


# what is recommended


def other(first=14.1, seconds=0.005, **changes):
    return attrs.evolve(EAGER, first=first, seconds=seconds, **changes)


@pytest.mark.parametrize(
    ("answers", "scope", "why"),
    [
        ({"step": other()}, "step", "2.0x eager; its first call of 14 s is paid back after 2,800 steps"),
        ({"step": other(cache_hits=1)}, "step", "2.0x eager; its first call of 14 s (with a warm compile cache) is paid back after 2,800 steps"),
        ({"block": other(first=0.104)}, "block", "2.0x eager; its first call of 0.10 s is paid back after 1 step"),
        ({"block": other(first=0.1)}, "block", "2.0x eager, from the first call on"),
        ({"block": other(seconds=0.0096)}, "eager", "no scope is faster by 5% (block runs at 1.04x)"),
        ({"block": other(seconds=0.02)}, "eager", "no scope is faster by 5% (block runs at 0.50x)"),
        ({"step": other(losses=(4.0, 2.1))}, "eager", "no other scope can be used"),
        ({"step": FAILED}, "eager", "no other scope can be used"),
        # about as fast: what compiles sooner; clearly faster: that
        ({"block": other(first=5.1, seconds=0.0052), "step": other()}, "block", "1.9x eager; its first call of 5.1 s is paid back after 1,000 steps"),
        ({"block": other(first=5.1, seconds=0.0054), "step": other()}, "step", "2.0x eager; its first call of 14 s is paid back after 2,800 steps"),
        # the fastest is worth it, and what compiles sooner is not
        ({"block": other(first=0.2, seconds=0.0096), "loss": other(first=1.1, seconds=0.0094)}, "loss", "1.06x eager; its first call of 1.1 s is paid back after 1,700 steps"),
        ({"block": other(first=0.2, seconds=0.0099), "loss": other(seconds=0.0096)}, "eager", "no scope is faster by 5% (loss runs at 1.04x)"),
        ({"loss": FAILED, "block": other(losses=(9.0, 9.0)), "step": other()}, "step", "2.0x eager; its first call of 14 s is paid back after 2,800 steps"),
        ({"eager": FAILED, "step": other()}, "step", "the fastest, though eager failed and nothing was compared"),
        ({"eager": FAILED, "step": FAILED}, None, "none ran"),
    ],
)  # fmt: skip
def test_what_is_recommended(answers, scope, why):
    verdict = recommend(judge({"eager": EAGER} | answers, 1e-3))
    assert (verdict.name, verdict.why) == (scope, why)
    assert (verdict.pays_back_after is not None) == ("paid back" in why)


@pytest.mark.parametrize(
    ("first", "seconds", "steps"),
    [
        (14.1, 0.009, 14_000),
        (14.1, 0.00999, 1_400_000),
        (0.101, 0.005, 1),
        (0.34, 0.0, 24),
        (0.1, 0.001, None),
        (0.0, 0.001, None),
    ],
)
def test_after_how_many_steps_a_first_call_is_paid_back(first, seconds, steps):
    assert pays_back_after(EAGER, other(first, seconds)) == steps


def test_dropout_is_not_called_a_difference():
    drawn = attrs.evolve(EAGER, draws=True)
    row = judge({"eager": drawn, "step": other(losses=(4.0, 2.1))}, 1e-3)[1]
    assert not row.differs
    assert not row.compared
    assert "dropout" in row.note
    verdict = recommend(judge({"eager": drawn, "step": other(losses=(4.0, 2.1))}, 1e-3))
    assert verdict.name == "step"
    assert verdict.why.endswith("; compare its losses yourself")
    assert recommend(judge({"eager": drawn, "step": other()}, 1e-3)).why.endswith(" steps")  # they are equal


@pytest.mark.parametrize(
    ("losses", "precision", "differs"),
    [
        ((4.0, 2.0), "fp32", False), ((4.0, 2.003), "fp32", False), ((4.0, 2.005), "fp32", True),
        ((4.0, 2.1), "bf16", False), ((4.0, 2.3), "bf16", True), ((4.0, float("nan")), "fp32", True),
        ((4.0, float("inf")), "fp16", True), ((4.0,), "fp32", True),
    ],
)  # fmt: skip
def test_losses_are_compared_to_the_precision(losses, precision, differs):
    assert (
        judge({"eager": EAGER, "step": other(losses=losses)}, tolerance_of(precision))[1].differs is differs
    )


def test_losses_that_are_nan_in_both_are_equal_and_said():
    nan = (4.0, float("nan"))
    rows = judge({"eager": attrs.evolve(EAGER, losses=nan), "step": other(losses=nan)}, 1e-3)
    assert not rows[1].differs
    assert all(row.note == "the loss is not finite" for row in rows)


# how it is shown


def test_the_table():
    answers = {
        "eager": EAGER,
        "block": other(first=1.26, seconds=0.2, losses=(4.0, 2.2), cache_hits=1, cache_misses=1),
        "loss": attrs.evolve(FAILED, what="w" * 90),
        "step": other(seconds=0.000333, cache_hits=2),
    }
    rows = judge(answers, 1e-3)
    assert table(rows).splitlines() == [
        "scope  first step s  ms/step  steps/s  against eager  peak MiB  note",
        "eager          0.10     10.0      100          1.00x        10",
        "block           1.3      200     5.00          0.05x        10  losses differ from eager's by 5.0%; compile cache was partly warm",
        f"loss              -        -        -              -         -  {'w' * 77}...",
        "step             14     0.33    3,003         30.03x        10  compile cache was warm",
    ]
    found = json.loads(json.dumps(document(rows, recommend(rows))))
    assert [row["name"] for row in found["rows"]] == list(answers)
    assert found["rows"][2]["error"] == {"kind": "CapabilityError", "text": "CapabilityError: all of it"}
    assert found["rows"][3]["step_seconds"] == 0.000333
    assert found["recommended"] == "step"


# what goes in


def test_the_options():
    asked = "t:f --model t:M --batch t:b --strategy ddp(2) --precision bf16 --accumulate 4 --clip-norm 1.0"
    found = read(
        [
            *asked.split(),
            *["--optimizer", "sgd", "--steps", "3", "--scopes", "step,block,step", "-n", "2", "--cpu"],
        ]
    )
    assert (found.loss, found.model, found.batch) == ("t:f", "t:M", "t:b")
    assert found.scopes == ("eager", "step", "block")
    assert (found.steps, found.ranks, found.cpu, found.cold, found.json) == (3, 2, True, False, False)
    assert found.recipe == fa.config.Recipe(
        strategy="ddp(2)",
        precision="bf16",
        accumulate=4,
        clip_norm=1.0,
        optimizer=fa.config.OptimizerRecipe(name="sgd"),
    )
    assert read(["f", "--model", "t:M", "--batch", "t:b"]).scopes == ("eager", "block", "loss", "step")


def test_options_go_over_a_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "precision: bf16\nremat: true\ncompile: step\noptimizer: {name: sgd, lr: 0.5}\n"
    )
    asked = [
        "t:f",
        "--model",
        "t:M",
        "--batch",
        "t:b",
        "--config",
        str(tmp_path / "r.yaml"),
        "--precision",
        "fp32",
    ]
    assert read(asked).recipe == fa.config.Recipe(
        remat=True, optimizer=fa.config.OptimizerRecipe(name="sgd", lr=0.5)
    )


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        ("--steps 0", "0 steps can't be timed", "1, or more"),
        ("--steps many", "invalid int value: 'many'", "--help"),
        ("--scopes eager,blok", "no scope is called 'blok'", "did you mean 'block'?"),
        ("--strategy fdsp", "no strategy is called 'fdsp'", "did you mean 'fsdp'?"),
        ("--strategy ddp(2)", "the world has 1", "degree"),
        ("--precision bf61", "no precision is called 'bf61'", "did you mean 'bf16'?"),
        ("--accumulate 0", "accumulate=0", "accumulate is 1 or more"),
        ("-n 0", "0 ranks can't train", "-n 1"),
        ("--config missing.yaml", "no file missing.yaml", "check the path"),
        ("--stratgy ddp", "unrecognized arguments: --stratgy", "--help"),
    ],
)
def test_bad_options_are_one_message_before_anything_runs(flags, what, fix, capsys, monkeypatch):
    monkeypatch.setattr("fnaccel.cli.bench.run_isolated", None)
    assert bench(*flags.split()) == 2
    said = capsys.readouterr().err
    assert what in said
    assert fix in said.split("fix: ", 1)[1]
    assert said.count("\n  where: ") == said.count("\n  fix: ") == 1


def test_what_is_missing_is_named(capsys):
    assert main(["bench"]) == 2
    assert "required: LOSS, --model, --batch" in capsys.readouterr().err


def test_more_ranks_than_accelerators(monkeypatch):
    monkeypatch.setattr("fnaccel.cli.bench.count_accelerators", lambda: 1)
    with pytest.raises(ArgumentError, match="2 ranks need an accelerator each, and there are 1"):
        read(["f", "--model", "t:M", "--batch", "t:b", "-n", "2", "--strategy", "ddp"])


def test_a_batch_is_named_in_several_ways():
    x = torch.ones(4, 2)
    loader = DataLoader([{"x": row} for row in x], batch_size=3)
    for source in (x, lambda: x, iter([x]), (one for one in [x])):
        assert first_batch(source, "here") is x
    for source in (loader, lambda: loader):
        assert torch.equal(first_batch(source, "here")["x"], x[:3])
    assert first_batch([x, {"y": x}], "here")[1]["y"] is x
    for source in (None, "text", [], {"n": 1}, lambda: None, DataLoader(["a"]), 3):
        with pytest.raises(ArgumentError, match="no tensor in this batch") as raised:
            first_batch(source, "here")
        assert raised.value.where == "here"


@pytest.mark.parametrize("fail", [ValueError("no"), SystemExit(2)], ids=repr)
def test_what_the_user_s_own_code_raises_says_where(fail):
    def batch():
        raise fail

    with pytest.raises(ConfigError, match=r"raised ValueError: no|ended the process, with code 2") as raised:
        first_batch(batch, "here")
    assert raised.value.where == "here"


def task(**changes):
    given = {
        "loss": "subject:loss_fn",
        "model": "subject:net",
        "batch": "subject:batch",
        "recipe": "",
        "scope": "eager",
        "steps": 1,
    }
    return Task(**given | changes)


def test_a_file_names_a_module(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    deep = folder / "a:b"
    deep.mkdir()
    (deep / "deep_subject.py").write_text("import deep_neighbour\nvalue = deep_neighbour.value\n")
    (deep / "deep_neighbour.py").write_text("value = 3\n")
    try:
        assert load("a:b/deep_subject.py:value", "here") == 3
        assert load(f"{deep}/deep_subject.py:value", "here") == 3
        (folder / "deep_subject.py").write_text("value = 4\n")
        for reference, what in {
            "missing.py:value": "there is no file missing.py",
            "deep_subject.py:value": "another module is called 'deep_subject'",
            "deep_subject.py": "no name follows the module",
            f"{deep}/deep_subject.py:other": "has no attribute 'other'",
            "tests": "no name follows the module",
        }.items():
            with pytest.raises(ConfigError, match=what):
                load(reference, "here")
    finally:
        for name in ("deep_subject", "deep_neighbour"):
            sys.modules.pop(name, None)


def test_a_step_that_compiles_already_is_refused(monkeypatch):
    monkeypatch.setattr("tests.tiny_models.compiled_step", fa.compile(loss_fn, "block"), raising=False)
    monkeypatch.setattr("tests.tiny_models.some_batch", batch_of(3), raising=False)
    asked = task(
        loss="tests.tiny_models:compiled_step",
        model="tests.tiny_models:Net",
        batch="tests.tiny_models:some_batch",
    )
    with fa.start(device="cpu"):
        with pytest.raises(ArgumentError, match="says how it is compiled"):
            find_subject(asked)
        found = find_subject(attrs.evolve(asked, loss="tests.tiny_models:loss_fn"))
    assert found.step == as_step(loss_fn, "here")
    assert found.model is Net


def rows_of_a_rank(strategy):
    with fa.start(device="cpu"):
        train_step = program(strategy=strategy)
        return rows_of_rank(batch_of(3), train_step.mesh)[0][:, 0].tolist()


def test_ranks_share_a_batch(pools):
    rows = batch_of(3)[0][:, 0].tolist()
    assert pools.run(2, rows_of_a_rank, "ddp") == [rows[:2], rows[2:]]
    assert pools.run(2, rows_of_a_rank, "context(2)") == [rows, rows]


# the measurement


def test_dropout_is_found_whether_it_is_a_module_or_a_function():
    def drops(model, batch):
        return loss_fn(model, (torch.nn.functional.dropout(batch[0]), batch[1]))

    with fa.start(device="cpu") as world:
        for model, loss, draws in [
            (Net, loss_fn, False),
            (lambda: nn.Sequential(nn.Dropout(0.1), Net()), loss_fn, True),
            (lambda: nn.Sequential(nn.Dropout(0.0), Net()), loss_fn, False),
            (Net, drops, True),
        ]:
            subject = Subject(
                step=as_step(loss, "here"), model=model, batch=batch_of(5), recipe=fa.config.Recipe()
            )
            found = measure(subject, "eager", 1, world)
            assert found.draws is draws
            assert len(found.losses) == 4
            assert found.losses[0] > found.losses[-1] or draws


def test_memory_counts_from_where_it_is_watched():
    gc.collect()
    watched = Memory(torch.device("cpu"))
    held = torch.ones(2**27)  # 512 MiB: what earlier tests left, and this process frees meanwhile, is less
    peak = watched.peak()
    del held
    assert peak > 400
    assert watched.peak() > 400


def test_the_answer_is_the_failure_that_came_first(tmp_path):
    assert answer_in(tmp_path) is None
    write_answer(tmp_path, EAGER, 0)
    assert answer_in(tmp_path) == EAGER
    write_answer(tmp_path, attrs.evolve(FAILED, follows=True), 0)
    write_answer(tmp_path, FAILED, 1)
    assert answer_in(tmp_path) == FAILED


@pytest.mark.long
@pytest.mark.launcher
def test_a_run(folder, capfd):
    assert bench("--steps", "2", "--scopes", "eager,block") == 0
    said = capfd.readouterr()
    assert said.err == "fnaccel bench: eager (1 of 2)\nfnaccel bench: block (2 of 2)\n"
    title, _, head, eager, block, _, recommended = said.out.splitlines()
    assert title == "subject:loss_fn: local on 1 rank (cpu), fp32, adamw, 2 steps timed"
    assert head.startswith("scope  first step s")
    assert re.match(r"eager +[\d.]+ +[\d.]+ +[\d,.]+ +1\.00x +\d+$", eager)
    assert re.match(r"block +[\d.]+ +[\d.]+ +[\d,.]+ +[\d.]+x +\d+", block)
    assert "differ" not in block
    assert re.match(r"recommended: (eager|block), ", recommended)


@pytest.mark.long
@pytest.mark.launcher
def test_rows_as_json(folder, capfd):
    assert bench("--steps", "2", "--scopes", "eager,block", "--json") == 0
    rows = json.loads(capfd.readouterr().out)["rows"]
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-5)
    assert rows[1]["cache_hits"] + rows[1]["cache_misses"] > 0


@pytest.mark.long
@pytest.mark.launcher
def test_strategies_are_compared(folder, capfd):
    assert bench("--steps", "2", "-n", "2", "--strategies", "local, ddp, fsdp, context(2)") == 0
    title, _, head, *rows, _, recommended = capfd.readouterr().out.splitlines()
    assert title == "subject:loss_fn: eager on 2 ranks (cpu), fp32, adamw, 2 steps timed"
    assert head.split()[0] == "strategy"
    assert "against local" in head
    assert [row.split()[0] for row in rows] == ["local", "ddp", "fsdp", "context(2)"]
    assert all(re.search(r" [\d.]+x +\d+$", row) for row in rows[:3]), rows
    assert re.match(r"recommended: (local|ddp|fsdp), the fastest", recommended)


def test_the_strategy_to_use():
    slow = attrs.evolve(EAGER, seconds=0.04, peak=5.0)
    wrong = attrs.evolve(EAGER, seconds=0.001, losses=(9.0, 9.0))
    rows = judge({"ddp": EAGER, "fsdp": slow, "tensor(2)": wrong, "hsdp": FAILED}, 1e-3, "ddp")
    assert [row.note for row in rows[2:]] == ["losses differ from ddp's by 175.0%", "fsdp() can't do it"]
    verdict = recommend_strategy(rows)
    assert verdict.name == "ddp"
    assert verdict.why == "the fastest. If memory is short: fsdp, 0.50x the memory of a rank at 4.0x the time"
    assert recommend_strategy(rows[2:]).name is None
    assert judge({"ddp": FAILED, "fsdp": slow}, 1e-3, "ddp")[1].note == "losses not compared: ddp failed"


@pytest.mark.long
@pytest.mark.launcher
def test_a_scope_that_fails_is_a_row_on_two_ranks_too(folder, capfd):
    assert bench("--steps", "1", "--scopes", "block", "--strategy", "ddp", "-n", "2", model="flat") == 0
    out = capfd.readouterr().out
    assert "ddp on 2 ranks (cpu)" in out
    assert re.search(r"^block( +-){5}  compile\(scope='block'\) found no blocks", out, re.MULTILINE)
    assert out.endswith("recommended: eager, no other scope can be used\n")


@pytest.mark.long
@pytest.mark.launcher
def test_where_all_fail_eager_s_error_is_shown(folder, capfd):
    assert bench("--scopes", "eager", loss="broken") == 1
    said = capfd.readouterr()
    assert re.search(r"^eager( +-){5}  TypeError: no such thing$", said.out, re.MULTILINE)
    assert said.err.endswith("TypeError: no such thing\nand more\n")
    assert "Traceback" in said.err
    assert "recommended" not in said.out


@pytest.mark.launcher
def test_a_reference_that_names_nothing_ends_it_at_once(folder, capfd):
    assert bench(loss="missing") == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("fnaccel bench: eager (1 of 4)\nConfigError: 'subject:missing' names nothing")
    assert "where: fnaccel bench LOSS\n  fix: " in said.err


@pytest.mark.launcher
def test_processes_that_are_killed_say_by_what(folder):
    found = run_isolated(task(loss="subject:killed"), ranks=1, cpu=True, cold=False)
    assert found.what == "ended by SIGKILL (memory ran out, if nobody sent it)"
    assert "was ended by SIGKILL" in found.text


@pytest.mark.long
@pytest.mark.launcher
def test_a_signal_ends_what_was_started(folder):
    (folder / "subject.py").write_text(SUBJECT + SLEEPS)
    flags = ["--model", "subject:net", "--batch", "subject:batch", "--cpu"]
    command = [sys.executable, "-m", "fnaccel", "bench", "subject:sleeps", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as started:
        while not (folder / "pid").is_file():
            assert started.poll() is None
            time.sleep(0.05)
        started.terminate()
        assert started.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


@pytest.mark.parametrize("page", ["docs/running.md", "examples/train_gpt.py"])
def test_the_command_that_is_shown_is_one(page, monkeypatch):
    text = (ROOT / page).read_text().replace("\\\n", " ")
    shown = re.search(r"^ *fnaccel bench (examples/train_gpt.py:.*)$", text, re.MULTILINE)
    assert shown
    found = read(shlex.split(shown[1]))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    batch = first_batch(load(found.batch, "here"), "here")
    model, loss = load(found.model, "here"), load(found.loss, "here")
    with torch.no_grad():
        assert torch.isfinite(loss(model(), batch).total)
