"""A training loop of your own, and code for some of the ranks.

It takes the place of Accelerate's guide on deferred execution.

    python examples/by_feature/process_control.py
    fnaccel launch -n 2 --strategy ddp examples/by_feature/process_control.py --weights runs/digits.pt
"""

from __future__ import annotations

import random
from pathlib import Path

from digits import build_model, loaders, parser
from torch.nn import functional as F

import fnaccel as fa


def loss_fn(model, batch):
    images, labels = batch
    # cross_entropy divides by the rows by itself: `of` takes such a mean and the number of rows in it
    return fa.Mean.of(F.cross_entropy(model(images), labels), weight=len(labels))


def main() -> None:
    arguments = parser(__doc__, epochs=2)
    arguments.add_argument("--weights", default="runs/digits.pt", help="the file for the weights")
    args = arguments.parse_args()
    train_loader, _ = loaders()
    with fa.start() as world:
        fa.set_seed(1)  # for code around the step: Python, NumPy and torch
        world.print("a random number of your own:", random.randint(0, 99))

        @world.on_local_process(0)
        def make_folder():  # once on each machine
            Path(args.weights).parent.mkdir(parents=True, exist_ok=True)

        make_folder()
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        state = train_step.init(seed=0)
        shards = fa.shard(train_loader).on(train_step.mesh)
        world.print(f"{len(shards)} batches in an epoch")
        rows = 0
        for epoch in range(args.epochs):
            for batch in fa.progress(shards.at(fa.state.Position(epoch)), unit="batch"):
                state, metrics = train_step(state, batch)
                rows += batch.valid
        fa.print_in_order(f"{rows} rows, and {'the' if world.is_last else 'not the'} last rank")

        @world.on_last
        def farewell():
            print(f"loss {float(metrics['loss']):.4f}, says rank {world.rank}")

        farewell()
        weights = fa.interchange.gather_state_dict(state)  # on rank 0, None on the others
        path = fa.checkpoint.save_on_main(weights, args.weights)
        world.print(f"{len(weights or ())} tensors in {path}")


if __name__ == "__main__":
    main()
