"""Exporting a checkpoint holds a few megabytes of it, not the model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fnaccel as fa

pytestmark = pytest.mark.long

_PROGRAM = """
import resource, sys
import torch
import fnaccel as fa
fa.interchange.export_hf(sys.argv[1] + "/small", sys.argv[1] + "/first")  # what is imported on the way
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fa.interchange.export_hf(sys.argv[1] + "/out", sys.argv[1] + "/own", dtype="bf16")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_export_of_a_checkpoint_streams(tmp_path):
    """Four tensors of 64 MiB grow the process by less than one of them."""
    with fa.start(device="cpu"):
        fa.save(tmp_path / "first", {"a": torch.ones(4)})
        fa.save(tmp_path / "own", {f"t{i}": torch.ones(4096, 4096) for i in range(4)})
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, tmp_path], capture_output=True, text=True, check=True, timeout=120
    )
    grown = int(ran.stdout) / 1024  # kilobytes on Linux
    assert grown < 64 if sys.platform == "linux" else grown >= 0
