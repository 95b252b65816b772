"""Send gradients in fewer bytes. It takes the place of Accelerate's by_feature/ddp_comm_hook.py.

    fnaccel launch -n 2 examples/by_feature/ddp_comm_hook.py --hook bf16
    fnaccel launch -n 2 examples/by_feature/ddp_comm_hook.py --hook powersgd
    fnaccel launch -n 2 examples/by_feature/ddp_comm_hook.py --hook own
    fnaccel launch -n 2 --strategy "ddp(hook=powersgd())" examples/by_feature/ddp_comm_hook.py

A hook is an option of the strategy, by name or a function of yours. On one rank nothing is sent, and the hook
does nothing. Without `--hook` the launcher chooses the strategy.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


def rounded(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of your own: the average of gradients that are rounded to 12 bits after the point."""
    tensor = bucket.buffer().mul_(4096).round_().div_(4096 * group.size())
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


STRATEGIES = {
    "bf16": fa.ddp(hook="bf16"),
    "fp16": fa.ddp(hook="fp16"),
    "powersgd": fa.ddp(hook=fa.strategies.powersgd(matrix_approximation_rank=2, start_powerSGD_iter=10)),
    "own": fa.ddp(hook=rounded),
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--hook", choices=STRATEGIES)
    args = arguments.parse_args()
    strategy = STRATEGIES.get(args.hook)  # None leaves it open
    # the weight is known before the backward pass, so that fp16 sends means and no sums
    step = fa.with_weight(loss_fn, lambda batch: len(batch[1]))
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.train_step(step, model=fa.distribute(build_model, strategy), optimizer=fa.adamw(3e-3))
        world.print(train_step.plan)
        state = train_step.init(seed=0)
        for state, _ in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs):
            pass
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
