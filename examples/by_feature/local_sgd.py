"""Replicas that train apart, and average after some steps: local SGD, or DiLoCo.

It takes the place of Accelerate's local_sgd.py. Sends 1/16 of the bytes of ddp.

    fnaccel launch -n 2 examples/by_feature/local_sgd.py
    fnaccel launch -n 2 examples/by_feature/local_sgd.py --outer "sgd(0.7, momentum=0.9, nesterov=True)"
"""

from __future__ import annotations

from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


def main() -> None:
    arguments = parser(__doc__, epochs=4)
    arguments.add_argument("--every", type=int, default=16, help="steps between two averages")
    arguments.add_argument("--outer", help="the outer optimizer of DiLoCo. Without it, local SGD")
    arguments.add_argument("--dir", default="runs/local_sgd", help="the directory of the checkpoints")
    args = arguments.parse_args()
    train_loader, test_loader = loaders()
    if args.outer is None:
        strategy = fa.local_sgd(every=args.every)
    else:
        strategy = fa.diloco(every=args.every, outer=args.outer)
    with fa.start() as world:
        train_shards, test_shards = fa.shard(train_loader), fa.shard(test_loader)
        model = fa.distribute(build_model, strategy)
        train_step = fa.train_step(fa.clip_norm(loss_fn, 1.0), model=model, optimizer=fa.adamw(3e-3))
        state = fa.resume_or_init(args.dir, train_step, seed=0)
        # whole intervals: after each, all replicas are equal, and can be evaluated
        steps = args.epochs * len(train_loader) // args.every * args.every
        save = fa.Autosave(args.dir, every=args.every, keep=1)
        for state, metrics in fa.scan(train_step, state, train_shards, steps=steps, save=save):
            if state.step % args.every == 0:
                scores = fa.evaluate(train_step, state, metrics_fn, test_shards)
                world.print(
                    f"step {state.step}: loss {float(metrics['loss']):.4f}, "
                    f"accuracy {float(scores['accuracy']):.4f}"
                )


if __name__ == "__main__":
    main()
