"""examples/jobs/ray_job.py, run for real on two workers of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="make test-services installs ray")

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = """
import os, sys, torch, fnaccel as fa
recipe = fa.config.recipe()
with fa.start(device="cpu") as world:
    total = fa.reduce(torch.tensor([10.0 ** world.rank]))
with open(os.path.join(os.environ["PLACE"], f"rank{world.rank}"), "w") as file:  # Ray changes what print writes
    file.write(f"{world.size} {total.item()} {recipe.strategy} {sys.argv[1]}")
"""


def test_two_workers(tmp_path):
    (tmp_path / "t.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    environ = {
        **os.environ, "PYTHONPATH": root, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0", "RAY_STORAGE": str(tmp_path / "ray"), "FNACCEL_SET": "strategy=ddp", "PLACE": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, f"{root}/examples/jobs/ray_job.py", "2", "t.py", "it's"],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2 11.0 ddp it's"] * 2
