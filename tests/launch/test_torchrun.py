"""A job under torchrun: its ranks are processes that did not fork from one another, so they share no address."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.launch.conftest import LIMIT, buffered

pytestmark = [pytest.mark.long, pytest.mark.launcher]

TRAIN = """
    import functools
    import torch, fnaccel as fa
    from torch.utils.data import DataLoader, TensorDataset

    class Warmup:
        def __init__(self, peak): self.peak = peak
        def __call__(self, updates): return self.peak * (updates + 1) / 10

    def rate(updates, peak=0.1): return peak * (updates + 1) / 10

    def weight(batch): return len(batch[0])

    def is_layer(name, module): return isinstance(module, torch.nn.Linear)

    def is_bias(name, parameter): return parameter.ndim == 1

    def loss(m, b, power): return fa.Mean((m(b[0]) - b[1]).abs().pow(power).sum(), weight=len(b[0]))

    def halve(grads, state, info): return grads, state

    class Halve:
        def __call__(self, grads, state, info): return grads, state

    def model(): return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))

    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    groups = [(is_bias, {"lr": rate}), ("0.*", {"lr": functools.partial(rate, peak=0.2)})]
    step = functools.partial(loss, power=2)
    step = fa.remat(fa.with_weight(step, weight), units=is_layer)
    for name, change in [("own", halve), ("owns", Halve()), ("owned", functools.partial(halve))]:
        step = fa.Transform(name, fa.Phase.GRADS, apply=change)(step)
    with fa.start(device="cpu"):
        # sets of names are printed in another order by each process
        for strategy in (fa.fsdp(units={"Linear", "LayerNorm"}), fa.fsdp(units=is_layer)):
            train_step = fa.train_step(
                step, model=fa.distribute(model, strategy), optimizer=fa.adamw(Warmup(0.1), groups=groups)
            )
            state = train_step.init(seed=0)
            for state, metrics in fa.scan(train_step, state, fa.shard(loader), steps=3):
                pass
            assert state.step == 3
    print("trained", flush=True)
"""


def test_a_job_whose_options_are_functions(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAIN))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, "script.py"],
        capture_output=True, text=True, cwd=tmp_path, env=buffered(), check=False, timeout=LIMIT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == 2
