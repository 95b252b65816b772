"""Measure the memory of each rank under FSDP. It takes the place of Accelerate's
by_feature/fsdp_with_peak_mem_tracking.py.

    fnaccel launch -n 2 --strategy fsdp examples/by_feature/fsdp_with_peak_memory.py
    fnaccel launch -n 2 --strategy ddp examples/by_feature/fsdp_with_peak_memory.py

Under `fsdp` each of two ranks holds half of the parameters and of the optimizer's moments. Under `ddp` it
holds all of them. The peak is that of the accelerator's allocator, or on a CPU the size of the process.
"""

from __future__ import annotations

import resource

import torch
from digits import loaders, loss_fn, metrics_fn, parser
from torch import nn

import fnaccel as fa

MIB = 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.inner(x)


def build_model() -> nn.Module:
    """Wide enough that its parameters can be seen in the memory: 6 MiB."""
    blocks = nn.Sequential(*(Block(256) for _ in range(3)))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), blocks, nn.Linear(256, 10))


def bytes_here(tree) -> int:
    """The bytes of a tree of tensors that this rank holds."""
    return sum(
        part.numel() * part.element_size()
        for value in fa.tree.leaves(tree)
        if isinstance(value, torch.Tensor)
        for part in [value.to_local() if hasattr(value, "to_local") else value]
    )


def peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def main() -> None:
    args = parser(__doc__, epochs=2).parse_args()
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        state = train_step.init(seed=0)
        for epoch in range(1, args.epochs + 1):
            for state, metrics in fa.scan(train_step, state, fa.shard(train_loader), epochs=epoch):
                pass
            sizes = {
                "parameters": bytes_here(state.params) / MIB,
                "moments": bytes_here(state.opt) / MIB,
                "peak": peak_bytes(world.device) / MIB,
            }
            ranks = fa.gather({name: torch.tensor(size) for name, size in sizes.items()})
            for name, values in ranks.items():
                world.print(f"epoch {epoch}: {name} in MiB by rank: {[round(float(v), 1) for v in values]}")
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"loss {float(metrics['loss']):.4f}, accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
