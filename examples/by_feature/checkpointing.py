"""Save, stop and go on at the same sample. It takes the place of Accelerate's by_feature/checkpointing.py.

    python examples/by_feature/checkpointing.py --dir runs/digits --save-every 10 --stop-at 35
    fnaccel launch -n 2 --strategy fsdp examples/by_feature/checkpointing.py --dir runs/digits

The second command goes on from step 35, in the middle of an epoch, on other ranks under another strategy.
"""

from __future__ import annotations

from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--dir", default="runs/digits", help="the directory of the checkpoints")
    arguments.add_argument("--save-every", type=int, default=22, metavar="STEPS")
    arguments.add_argument("--stop-at", type=int, metavar="STEP", help="end here")
    args = arguments.parse_args()
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        # extras are values of yours that a checkpoint keeps too
        state = fa.resume_or_init(args.dir, train_step, seed=0, extras={"best": 0.0})
        world.print(f"begins at step {state.step}, {state.data}, best {state.extras['best']:.4f}")
        train_shards, test_shards = fa.shard(train_loader), fa.shard(test_loader)
        save = fa.Autosave(args.dir, every=args.save_every, keep=2)
        for state, _ in fa.scan(train_step, state, train_shards, epochs=args.epochs, save=save):
            if state.data.samples == 0:  # an epoch is complete
                scores = fa.evaluate(train_step, state, metrics_fn, test_shards)
                state.extras["best"] = max(state.extras["best"], float(scores["accuracy"]))
            if state.step == args.stop_at:
                break  # this step is saved too
        world.print(f"ends at step {state.step}, best accuracy {state.extras['best']:.4f}")
        world.print("checkpoints:", [checkpoint.step for checkpoint in fa.checkpoint.checkpoints(args.dir)])


if __name__ == "__main__":
    main()
