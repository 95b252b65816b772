"""ZeRO-Infinity: parameters and optimizer slots on a disk. `make test-nvme` runs this.

DeepSpeed compiles its asynchronous reads and writes first (minutes, once for each machine; needs libaio-dev), so it is not
among the tests of every change.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from fnaccel.testing import RankPools
from tests.strategies.deepspeed.training import run_offloaded, run_with

PLACES = [
    {"offload_optimizer": "nvme"},
    {"offload_optimizer": "nvme", "offload_params": "nvme"},
    {"offload_optimizer": "cpu", "offload_params": "nvme"},
]


@pytest.fixture(scope="module")
def patient():
    code = "from deepspeed.ops.op_builder import AsyncIOBuilder as B; B().load(verbose=False)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1_500)
    with RankPools(timeout=250) as pools:
        yield pools


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("places", PLACES, ids=lambda places: ", ".join(map("=".join, places.items())))
def test_the_numbers_are_those_of_ddp(patient, tmp_path, ranks, places):
    expected = patient.run(ranks, run_with, "ddp", {})[0]
    for losses, params in patient.run(ranks, run_with, 3, {**places, "nvme_path": str(tmp_path)}):
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert params == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("places", PLACES[:2], ids=["optimizer", "both"])
def test_state_on_a_disk(patient, tmp_path, ranks, places):
    """Save what lies on a disk, restore it in another engine, and go on."""
    options = {**places, "nvme_path": str(tmp_path / "swap")}
    for wrong in patient.run(ranks, run_offloaded, tmp_path / "saved", options):
        assert wrong == []
