"""A batch size that grows, and a limit of wall time. No script of Accelerate does this.

python examples/by_feature/growing_batches.py --max-seconds 30
fnaccel launch -n 2 --strategy ddp examples/by_feature/growing_batches.py --dir runs/growing
"""

from __future__ import annotations

from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


def batches_in_an_update(step: int) -> int:
    """One batch for 20 updates, then two, then four."""
    return 1 if step < 20 else 2 if step < 40 else 4


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--max-seconds", type=float, default=60.0, help="stop and save after this time")
    arguments.add_argument("--dir", default="runs/growing", help="the directory of the checkpoints")
    args = arguments.parse_args()
    train_loader, test_loader = loaders(batch=32)
    with fa.start() as world:
        # an update may take batches of two epochs
        train_shards = fa.shard(train_loader, window=batches_in_an_update, across_epochs=True)
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        state = fa.resume_or_init(args.dir, train_step, seed=0)
        for state, metrics in fa.scan(
            train_step, state, train_shards, epochs=args.epochs,
            max_seconds=args.max_seconds, save=fa.Autosave(args.dir, keep=1),
        ):  # fmt: skip
            if state.step % 20 == 0:
                world.print(f"step {state.step}: {int(metrics['weight'])} rows in the update")
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"{state.step} updates, {state.data}, accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
