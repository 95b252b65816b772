"""A transform of your own: gradient noise that fades (Neelakantan et al. 2015), with its own state.

python examples/own_transform.py
fnaccel launch -n 2 --strategy fsdp examples/own_transform.py
"""

from __future__ import annotations

import torch
from torch import nn

import fnaccel as fa


def add_noise(grads, own, info):
    """GRADS: gradients by name in, gradients by name and the transform's next state out."""
    size = 0.1 / (1 + own["calls"]) ** 0.55
    info.record("noise", size)
    noisy = {name: grad + size * torch.randn_like(grad) for name, grad in grads.items()}
    return noisy, {"calls": own["calls"] + 1}


def gradient_noise(step):
    """A transform is a function `Step -> Step`; this one appends its record."""
    return fa.Transform(
        "gradient_noise", fa.Phase.GRADS, apply=add_noise, init=lambda params: {"calls": 0},
        needs={fa.transforms.Capability.GRADIENTS},
    )(step)  # fmt: skip


def loss_fn(model, batch):
    inputs, targets = batch
    return fa.Mean((model(inputs) - targets).square().sum(), weight=targets.numel())


def main() -> None:
    step = fa.chain(gradient_noise, fa.clip_norm(1.0))(loss_fn)  # written order is execution order
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 3, generator=generator)
    rows = (inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))
    with fa.start() as world:
        batch = tuple(fa.split_between_processes(column) for column in rows)  # this rank's part
        model = fa.distribute(lambda: nn.Linear(3, 1))
        train_step = fa.train_step(step, model=model, optimizer=fa.sgd(0.1))
        world.print(train_step.plan)
        state = train_step.init(seed=0)
        for _ in range(100):
            state, metrics = train_step(state, batch)
        world.print(
            f"loss {float(metrics['loss']):.5f}, noise {metrics['noise']:.4f}, "
            f"calls counted by the transform: {state.transforms['gradient_noise']['calls']}"
        )


if __name__ == "__main__":
    main()
