"""An optimizer of your own that needs no schedule. It takes the place of Accelerate's
by_feature/schedule_free.py.

    python examples/by_feature/schedule_free.py
    fnaccel launch -n 2 --strategy fsdp examples/by_feature/schedule_free.py

`fa.optim.from_torch` takes any class that follows the rules of torch's optimizers, under any strategy. This
one is schedule-free SGD (Defazio et al. 2024). It trains at one point and evaluates at another: `x`, an
average of all steps. `x` is in `state.opt`, and `train_step.adopt` puts it into the model.
"""

from __future__ import annotations

import attrs
import torch
from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


class ScheduleFreeSGD(torch.optim.Optimizer):
    """The parameters are y, between the fast point z and the average x."""

    def __init__(self, params, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for y in group["params"]:
                if y.grad is None:
                    continue
                slots = self.state[y]
                if not slots:
                    slots["step"] = torch.tensor(0.0)
                    slots["z"], slots["x"] = y.clone(), y.clone()
                slots["step"] += 1
                slots["z"].add_(y.grad, alpha=-group["lr"])
                slots["x"].lerp_(slots["z"], 1 / float(slots["step"]))
                y.copy_(slots["z"].lerp(slots["x"], group["beta"]))


def main() -> None:
    arguments = parser(__doc__, epochs=8)
    arguments.add_argument("--lr", type=float, default=1.0)
    args = arguments.parse_args()
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.train_step(
            loss_fn,
            model=fa.distribute(build_model),
            optimizer=fa.optim.from_torch(ScheduleFreeSGD, lr=args.lr, beta=0.9),
        )
        state = train_step.init(seed=0)
        for state, metrics in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs):
            pass
        trained = fa.snapshot(state)  # train_step.adopt(trained) goes on with the training
        averages = {name: slots["x"] for name, slots in trained.opt.items()}
        state = train_step.adopt(attrs.evolve(trained, params=averages))
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"loss {float(metrics['loss']):.4f}, accuracy {float(scores['accuracy']):.4f} at x")


if __name__ == "__main__":
    main()
