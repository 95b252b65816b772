"""Find the micro-batch that fits in memory, and keep the global batch. It takes the place of Accelerate's
by_feature/memory.py and by_feature/automatic_gradient_accumulation.py.

    python examples/by_feature/memory.py --pretend-limit 48
    fnaccel launch -n 2 --strategy fsdp examples/by_feature/memory.py --pretend-limit 48

If memory runs out, the next attempt has smaller micro-batches and more of them. The update stays the same, so
the losses do too. All ranks need batches of one shape, so that memory runs out on all of them. A CPU has
enough memory for this model: `--pretend-limit` raises as a GPU would.
"""

from __future__ import annotations

import torch
from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--global-batch", type=int, default=128, help="rows in an update, on all ranks")
    arguments.add_argument("--pretend-limit", type=int, metavar="ROWS", help="rows that fit in memory")
    args = arguments.parse_args()
    train_loader, test_loader = loaders(args.global_batch)

    def limited_loss(model, batch):
        if args.pretend_limit and len(batch[1]) > args.pretend_limit:
            raise torch.OutOfMemoryError(f"out of memory (pretended, for {len(batch[1])} rows)")
        return loss_fn(model, batch)

    def make(count):
        step = fa.accumulate(limited_loss, count)
        return fa.train_step(step, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))

    with fa.start() as world:
        shards = fa.shard(train_loader, remainder="drop")

        def attempt(rows):
            """Train one step with micro-batches of at most `rows` rows on each rank."""
            count = -(-args.global_batch // (rows * world.size))  # rounded up
            train_step = make(count)
            for _ in fa.scan(train_step, train_step.init(seed=0), shards, steps=1):
                pass
            train_step.close()
            return count

        rows, count = fa.fit_batch_size(attempt, start=args.global_batch // world.size, shrink=0.5)
        world.print(f"{rows} rows fit: {count} micro-batches in an update of {args.global_batch} rows")
        train_step = make(count)
        state = train_step.init(seed=0)
        for state, metrics in fa.scan(train_step, state, shards, epochs=args.epochs):
            pass
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"loss {float(metrics['loss']):.5f}, accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
