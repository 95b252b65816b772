"""An optimizer that needs no schedule, of another package. It takes the place of Accelerate's
by_feature/schedule_free.py.

    python examples/by_feature/schedule_free.py
    fnaccel launch -n 2 --strategy fsdp examples/by_feature/schedule_free.py

`fa.optim.from_torch` takes any class that follows the rules of torch's optimizers, under any strategy. A
schedule-free one (Defazio et al. 2024) trains at one point and evaluates at another, an average of all steps.
`fa.evaluate` goes there by itself, so no `optimizer.train()` and `optimizer.eval()` stand in the loop.
"""

from __future__ import annotations

from digits import build_model, loaders, loss_fn, metrics_fn, parser
from schedulefree import AdamWScheduleFree

import fnaccel as fa


def main() -> None:
    arguments = parser(__doc__, epochs=8)
    arguments.add_argument("--lr", type=float, default=0.01)
    args = arguments.parse_args()
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.train_step(
            loss_fn,
            model=fa.distribute(build_model),
            optimizer=fa.optim.from_torch(AdamWScheduleFree, lr=args.lr, warmup_steps=20),
        )
        state = train_step.init(seed=0)
        for state, metrics in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs):
            pass
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"loss {float(metrics['loss']):.4f}, accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
