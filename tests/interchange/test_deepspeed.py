"""DeepSpeed's checkpoints: real ones where it is installed, and the call of its converter everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import CheckpointError, MissingBackendError
from fnaccel.interchange.sources.detect import detect, opened
from tests.checkpoint.training import gathered

CASES = [(2, "fp32"), (3, "bf16")]
CASES += [
    pytest.param(*case, marks=pytest.mark.long)
    for case in ((0, "fp32"), (1, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"))
]


def net(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(7, 5), norm(5), nn.Linear(5, 3, bias=False))


def loss(model, batch):
    return model(batch).square().mean()


def adopted(layout, path, factory=net):
    step = fa.train_step(loss, model=fa.distribute(factory, layout), optimizer=fa.adamw(1e-2))
    return gathered(fa.interchange.adopt(path, like=step.init(seed=4), trust_pickle=True))


@pytest.mark.long
@pytest.mark.launcher
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_what_two_ranks_of_zero_saved(tmp_path, stage, precision):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: real checkpoints of it are not read")
    program = Path(__file__).with_name("write_deepspeed.py")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(program, str(stage), precision, tmp_path / "ds"),
        ],
        check=True,
        capture_output=True,
        timeout=240,
        # it looks for ninja beside python
        env=os.environ
        | {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    wanted = torch.load(tmp_path / "ds" / "expected.pt")
    assert detect(tmp_path / "ds") == detect(tmp_path / "ds" / "global_step2") == "deepspeed"
    with fa.start(device="cpu"):
        factory = net if precision == "fp32" else lambda: net(nn.LayerNorm)
        found = adopted("local", tmp_path / "ds", factory)
        for name, value in wanted.items():
            here = found.get(f"params/{name}", found.get(f"buffers/{name}"))
            # bf16: the module has the rounded copy of what the optimizer keeps in fp32
            assert torch.allclose(
                here.double(), value.double(), atol=1e-6 if precision == "fp32" else 1e-2
            ), name
        with pytest.raises(CheckpointError, match="pickles of its own classes"):
            fa.interchange.adopt(tmp_path / "ds", like={"a": torch.zeros(1)})


class Gathered:
    """As the converter's lazy tensors: a shape, a dtype, and values on demand."""

    def __init__(self, value):
        self.value = value
        self.shape = value.shape
        self.dtype = value.dtype

    def contiguous(self):
        return self.value


def laid_out(root):
    (root / "global_step7").mkdir(parents=True)
    (root / "latest").write_text("global_step7\n")
    for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (root / "global_step7" / name).write_bytes(b"a pickle")


def recorded(layout, root, broken):
    torch.manual_seed(3)
    wanted = net().state_dict()
    calls = []

    def convert(directory, tag=None, lazy_mode=False):
        print("it talks")
        calls.append((directory, tag, lazy_mode))
        if broken:
            raise KeyError("param_shapes")
        return {name: Gathered(x) if x.dim() == 2 else x for name, x in wanted.items()}

    module = types.ModuleType("deepspeed.utils.zero_to_fp32")
    module.get_fp32_state_dict_from_zero_checkpoint = convert
    names = ("deepspeed", "deepspeed.utils", module.__name__)
    sys.modules |= dict.fromkeys(names[:2], types.ModuleType("deepspeed")) | {names[2]: module}
    try:
        if broken:
            with pytest.raises(CheckpointError, match="can't put this checkpoint together: KeyError"):
                adopted(layout, root)
            return None
        found = adopted(layout, root)
    finally:
        for name in names:
            del sys.modules[name]
    assert calls == [(str(root), "global_step7", True)]
    return [
        name
        for name, value in wanted.items()
        if not torch.equal(found.get(f"params/{name}", found.get(f"buffers/{name}")), value)
    ]


@pytest.mark.parametrize(("layout", "ranks"), [("local", 1), ("fsdp", 2)])
def test_the_call_of_the_converter(pools, tmp_path, layout, ranks):
    laid_out(tmp_path / "ds")
    assert detect(tmp_path / "ds") == "deepspeed"
    if "deepspeed" in sys.modules:
        pytest.skip("the real one is imported: what stands in for it can't be")
    assert pools.run(ranks, recorded, layout, tmp_path / "ds", False) == [[]] * ranks
    pools.run(ranks, recorded, layout, tmp_path / "ds", True)


def test_without_deepspeed(tmp_path, monkeypatch):
    laid_out(tmp_path / "ds")
    with pytest.raises(CheckpointError, match="can run any code"), opened(tmp_path / "ds"):
        pass
    monkeypatch.setitem(sys.modules, "deepspeed.utils.zero_to_fp32", None)
    with (
        pytest.raises(MissingBackendError, match=r"pip install .*\[deepspeed\]"),
        opened(tmp_path / "ds", trust=True),
    ):
        pass
