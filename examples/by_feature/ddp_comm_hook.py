"""Send gradients in fewer bytes. It takes the place of Accelerate's by_feature/ddp_comm_hook.py.

    fnaccel launch -n 2 examples/by_feature/ddp_comm_hook.py --hook bf16
    fnaccel launch -n 2 examples/by_feature/ddp_comm_hook.py --hook powersgd --rank 2
    fnaccel launch -n 2 examples/by_feature/ddp_comm_hook.py --hook own
    fnaccel launch -n 2 --strategy "ddp(hook=powersgd())" examples/by_feature/ddp_comm_hook.py

A hook is an option of the strategy, by name or a function of yours. On one rank nothing is sent, and the hook
does nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from digits import build_model, loaders, loss_fn, metrics_fn, parser, recipe

import fnaccel as fa


def rounded(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of your own: the average of gradients that are rounded to 12 bits after the point."""
    tensor = bucket.buffer().mul_(4096).round_().div_(4096 * group.size())
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--hook", default="bf16", choices=("none", "bf16", "fp16", "powersgd", "own"))
    arguments.add_argument("--rank", type=int, default=2, help="the rank of PowerSGD's matrices")
    args = arguments.parse_args()
    hook = {"none": None, "own": "ddp_comm_hook:rounded"}.get(args.hook, args.hook)
    if hook == "powersgd":
        hook = fa.strategies.powersgd(matrix_approximation_rank=args.rank, start_powerSGD_iter=10)
    chosen = recipe(fa.ddp(hook=hook) if args.strategy == "local" else args.strategy)
    # the weight is known before the backward pass, so that fp16 sends means and no sums
    step = fa.with_weight(loss_fn, lambda batch: len(batch[1]))
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.config.apply(chosen, step, build_model)
        world.print(train_step.plan)
        state = train_step.init(seed=0)
        for state, _ in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs):
            pass
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
