"""Pages for users of other libraries begin with a script of that library: it runs, if the library is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.docs.names import ROOT
from tests.docs.test_docs import blocks

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
GUIDES = {
    "from-ddp": ("torch", TORCHRUN, r"held-out loss ([\d.]+)"),
    "from-lightning": ("lightning", (), r"val_loss\D+([\d.]+)"),
    "from-trainer": ("transformers", (), r"'eval_loss': ([\d.]+)"),
}
"""The package of a page's script, how Python starts the script, and the loss in its output."""


@pytest.mark.long
@pytest.mark.launcher
@pytest.mark.parametrize("page", GUIDES)
def test_the_script_to_port_runs(page, tmp_path):
    package, start, loss = GUIDES[page]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    scripts = [code for _, flags, code, _ in blocks(ROOT / "docs" / f"{page}.md") if flags == "no-run"]
    assert len(scripts) == 1
    (tmp_path / "train.py").write_text(scripts[0])
    done = subprocess.run(
        [sys.executable, *start, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 0 < float(re.findall(loss, done.stdout)[-1]) < 0.6
