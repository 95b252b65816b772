"""Stop if the held-out loss no longer falls. It takes the place of Accelerate's by_feature/early_stopping.py.

    python examples/by_feature/early_stopping.py --patience 2
    fnaccel launch -n 2 --strategy fsdp examples/by_feature/early_stopping.py

All ranks must stop at the same step. `fa.Evaluation(patience=)` decides by a value that is equal on all.
If only one rank has a reason to stop, `fa.collectives.any_process` tells all: here a file STOP on the machine
of the rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from digits import build_model, loaders, loss_fn, metrics_fn, parser

import fnaccel as fa


def main() -> None:
    arguments = parser(__doc__, epochs=40)
    arguments.add_argument("--patience", type=int, default=2, help="epochs without a lower loss")
    args = arguments.parse_args()
    train_loader, test_loader = loaders()
    with fa.start() as world, tempfile.TemporaryDirectory() as own:
        directory = fa.collectives.broadcast_objects(own)  # ranks save into the one of rank 0
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        state = train_step.init(seed=0)
        held_out = fa.Evaluation(metrics_fn, fa.shard(test_loader), best="loss", patience=args.patience)
        loop = fa.scan(
            train_step,
            state,
            fa.shard(train_loader),
            epochs=args.epochs,
            evaluate=held_out,
            save=fa.Autosave(directory, keep=1),
        )
        for state, metrics in loop:
            if "eval/loss" in metrics:
                world.print(f"epoch {state.data.epoch}: held-out loss {metrics['eval/loss']:.4f}")
                if fa.collectives.any_process(Path("STOP").exists()):
                    break
        stopped = state.data.epoch
        state = fa.restore(fa.checkpoint.best(directory), like=state)  # the best state is live again
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        world.print(f"stopped after epoch {stopped}, back to epoch {state.data.epoch}")
        world.print(f"accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
