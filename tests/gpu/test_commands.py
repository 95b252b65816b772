"""Commands on a machine with a CUDA device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, "-m", "fnaccel", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_env():
    code, said = run("env")
    assert code == 0, said
    assert "NVIDIA" in said


def test_selftest():
    code, said = run("test", "-n", 1)
    assert code == 0, said


@pytest.mark.parametrize(
    "flags",
    [[], ["--precision", "bf16"], ["--precision", "fp16"], ["--strategy", "fsdp", "--precision", "bf16"],
     ["--strategy", "ddp", "--compile", "step"]],
    ids=" ".join,
)  # fmt: skip
def test_the_main_example(tmp_path, flags):
    code, said = run(
        "launch", "-n", 1, *flags, "examples/train_gpt.py", "--steps", 60, "--json", tmp_path / "out.json", "--quiet",
        "--report", tmp_path / "report.html", "--dir", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, said
    assert "Unexpected exception" not in said  # of torch as it logs what it compiled
    losses = json.loads((tmp_path / "out.json").read_text())["losses"]
    assert losses[-1] < 3.2 < losses[0]
    assert "cuda" in said or "NVIDIA" in (tmp_path / "report.html").read_text()


def test_two_ranks_on_one_device_are_refused_by_name():
    code, said = run("launch", "-n", 2, "examples/train_gpt.py", "--steps", 2, "--quiet")
    assert code != 0
    assert "Traceback" not in said.split("error")[0]
    assert "1" in said
    assert "2" in said
