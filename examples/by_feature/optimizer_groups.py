"""Two optimizers for one model, and layers that start to train later. No script of Accelerate does this.

python examples/by_feature/optimizer_groups.py
fnaccel launch -n 2 --strategy fsdp examples/by_feature/optimizer_groups.py
"""

from __future__ import annotations

import torch
from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


def is_matrix(_: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2


def main() -> None:
    args = parser(__doc__).parse_args()
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_shards = fa.shard(train_loader)
        epoch = train_shards.updates_per_epoch()
        total = train_shards.updates_per_epoch(epochs=args.epochs)
        optimizer = fa.optim.optimizer_groups(
            [
                (is_matrix, fa.optim.from_torch(torch.optim.Muon, lr=0.02)),
                # the first convolution stays as it is for one epoch
                ("0.*", fa.optim.starting_at(epoch, fa.adamw(1e-3))),
                ("*", fa.adamw(fa.schedules.one_cycle(3e-3, total=total))),
            ]
        )
        step = fa.clip_norm(loss_fn, 1.0)
        train_step = fa.train_step(step, model=fa.distribute(build_model), optimizer=optimizer)
        state = train_step.init(seed=0)
        for state, metrics in fa.scan(train_step, state, train_shards, epochs=args.epochs):
            if state.data.samples == 0:
                rates = {name: f"{rate:.4f}" for name, rate in metrics.items() if name.startswith("lr/")}
                world.print(f"epoch {state.data.epoch}: {rates}")
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
