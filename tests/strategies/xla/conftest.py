"""XLA in processes of its own: the number of virtual devices is fixed when its client begins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


def environ(devices):
    return {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


@pytest.fixture(scope="session")
def on_xla(tmp_path_factory):
    """`on_xla(devices, job)`: what a function of `tests.strategies.xla.jobs` returned in a process with so many devices.

    All jobs of one number of devices run in one process, once.
    """
    done = {}

    def run(devices, job):
        if devices not in done:
            folder = tmp_path_factory.mktemp(f"xla{devices}")
            ended = subprocess.run(
                [sys.executable, "-m", "tests.strategies.xla.jobs", str(folder)],
                capture_output=True, text=True, check=False, env=environ(devices), timeout=1200,
            )  # fmt: skip
            assert ended.returncode == 0, ended.stderr[-3000:]
            done[devices] = torch.load(folder / "results.pt", weights_only=True)
        found = done[devices][job]
        assert "error" not in found, found["error"]
        return found

    return run
