"""Train on k folds, and average the predictions. It takes the place of Accelerate's
by_feature/cross_validation.py.

    python examples/by_feature/cross_validation.py --folds 3
    fnaccel launch -n 2 --strategy ddp examples/by_feature/cross_validation.py

One train step serves all folds: `init` makes a new model for each. The predictions of a fold come back in the
order of the rows on every rank, so they can be added up.
"""

from __future__ import annotations

import torch
from digits import build_model, loss_fn, metrics_fn, parser, tensors
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Subset, TensorDataset

import fnaccel as fa


def predict(model, batch):
    images, _ = batch
    return fa.Concat(model(images).softmax(dim=1))


def main() -> None:
    arguments = parser(__doc__, epochs=4)
    arguments.add_argument("--folds", type=int, default=3)
    args = arguments.parse_args()
    images, labels = tensors()
    known = TensorDataset(images[:1400], labels[:1400])
    test_shards = fa.shard(DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=64))
    folds = StratifiedKFold(args.folds, shuffle=True, random_state=0).split(images[:1400], labels[:1400])
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        total = torch.zeros(len(labels) - 1400, 10)
        for number, (train, validation) in enumerate(folds):
            train_shards = fa.shard(DataLoader(Subset(known, train.tolist()), batch_size=64, shuffle=True))
            validation_shards = fa.shard(DataLoader(Subset(known, validation.tolist()), batch_size=64))
            state = train_step.init(seed=number)
            for state, _ in fa.scan(train_step, state, train_shards, epochs=args.epochs):
                pass
            scores = fa.evaluate(train_step, state, metrics_fn, validation_shards)
            total += fa.evaluate(train_step, state, predict, test_shards).cpu()
            world.print(f"fold {number}: accuracy {float(scores['accuracy']):.4f}")
        right = (total.argmax(dim=1) == labels[1400:]).float().mean()
        world.print(f"average of {args.folds} models: accuracy {float(right):.4f}")


if __name__ == "__main__":
    main()
