"""A program for DeepSpeed's ranks: trains a small net under ZeRO and saves it. `STAGE PRECISION DIRECTORY`."""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
from torch import nn


def main(stage: int, precision: str, directory: str) -> None:
    torch.manual_seed(11)
    norm = nn.BatchNorm1d if precision == "fp32" else nn.LayerNorm  # the first takes no bf16 here
    net = nn.Sequential(nn.Linear(7, 5), norm(5), nn.Linear(5, 3, bias=False))
    net[0].bias.requires_grad_(False)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for _ in range(2):
        loss = engine(torch.randn(4, 7, dtype=dtype)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(directory, tag="global_step2")
    engine.save_checkpoint(directory, tag="global_step2")
    with deepspeed.zero.GatheredParameters(list(net.parameters())) if stage == 3 else torch.no_grad():
        whole = {name: value.detach().float().clone() for name, value in net.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        torch.save(whole, f"{directory}/expected.pt")
    # its threads make an orderly end hang or abort now and then (0.19.8 on CPU); all files are written
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    chosen = [argument for argument in sys.argv[1:] if not argument.startswith("--local")]
    main(int(chosen[0]), chosen[1], chosen[2])
