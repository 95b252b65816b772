"""`examples/nanogpt.py` trains the curve of a plain loop, resumes on other ranks, and takes its options."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fnaccel as fa
from tests.examples.running import killed
from tests.examples.test_ports import batches, example
from tests.tiny_models import whole

SMALL = {
    "eval_interval": 4, "eval_iters": 2, "batch_size": 4, "gradient_accumulation_steps": 2, "block_size": 16, "n_layer": 2,
    "n_head": 2, "n_embd": 16, "max_iters": 8, "warmup_iters": 2, "lr_decay_iters": 8,
}  # fmt: skip


def flags(folder, **options):
    options = {**SMALL, "data_dir": str(folder / "data"), **options}
    return [f"--{name}={value}" if value is not True else f"--{name}" for name, value in options.items()]


def trained(folder, strategy=None, **options):
    module = example("nanogpt")
    with pytest.MonkeyPatch.context() as patch:
        distribute = fa.distribute
        patch.setattr(fa, "distribute", lambda model: distribute(model, strategy))
        losses, state = module.main(flags(folder, **options))
    return losses, {path: whole(value) for path, value in fa.tree.items(state.params)}


def plain_loop(folder):
    """AdamW with decay of matrices, a warm-up and a cosine, clipping, two micro-batches: in plain torch."""
    module = example("nanogpt")
    config = module.Config(**SMALL)
    torch.manual_seed(config.seed)
    model = module.GPT(config)
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    others = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    windows = module.Windows(folder / "data" / "train.bin", 16)
    losses = []
    for step, tokens in enumerate(batches(DataLoader(windows, 8, shuffle=True), 8, seed=config.seed)):
        rate = 3e-3 * step / 2
        if step >= 2:
            rate = 3e-4 + (3e-3 - 3e-4) * (1 + math.cos(math.pi * (step - 2) / 6)) / 2
        total = 0.0
        for part in tokens.chunk(2):
            logits = model(part[:, :-1]).view(-1, 256)
            loss = F.cross_entropy(logits, part[:, 1:].reshape(-1)) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.long_except(r"fsdp")
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_it_trains_as_a_plain_loop(pools, tmp_path, strategy, ranks):
    found = pools.run(ranks, trained, tmp_path, strategy)
    with fa.start():
        losses, params = plain_loop(tmp_path)
    for ours, values in found:
        assert ours == pytest.approx(losses, abs=1e-6)
        assert fa.tree.allclose(values, params, rtol=0, atol=1e-5)


@pytest.mark.long
def test_compiled_and_in_bf16(tmp_path):
    with fa.start():
        losses, params = trained(tmp_path, "local")
        captured, values = trained(tmp_path, "local", compile=True)
        half, _ = trained(tmp_path, "local", dtype="bfloat16")
    assert captured == pytest.approx(losses, abs=1e-4)
    assert half == pytest.approx(losses, abs=3e-2)
    assert fa.tree.allclose(values, params, rtol=0, atol=1e-3)


@pytest.mark.launcher
@pytest.mark.long
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "examples/nanogpt.py", *flags(tmp_path, out_dir=run, max_iters=100_000)]
    steps = killed(command, run) + 6
    with fa.start():
        resumed, values = trained(tmp_path, "local", out_dir=run, max_iters=steps, init_from="resume")
        losses, params = trained(tmp_path, "local", max_iters=steps)
    assert resumed == losses[-6:]
    assert fa.tree.allclose(values, params, rtol=0, atol=0)


def resumed(folder):
    """On two ranks: the rest of a run of one, and what it evaluates."""
    losses, _ = trained(folder, "fsdp", out_dir=folder / "run", init_from="resume", num_samples=1)
    nothing, _ = trained(folder, "ddp", out_dir=folder / "run", init_from="resume", eval_only=True)
    return losses, nothing


@pytest.mark.long
def test_options_of_a_run(pools, tmp_path, capsys):
    with fa.start():
        whole_run, _ = trained(tmp_path, "local")
        first, _ = trained(tmp_path, "local", out_dir=tmp_path / "run", max_iters=4)
    assert "step 4: train 5." in capsys.readouterr().out
    assert fa.checkpoint.best(tmp_path / "run").name == "step-0000000004"
    for losses, nothing in pools.run(2, resumed, tmp_path):
        assert first + losses == pytest.approx(whole_run, abs=1e-5)
        assert nothing == []
