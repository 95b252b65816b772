"""Metrics that are no means, on several ranks. It takes the place of Accelerate's
by_feature/multi_process_metrics.py.

    fnaccel launch -n 2 --strategy ddp examples/by_feature/multi_process_metrics.py

397 rows do not divide by the ranks. Both ways count every row once: `fa.evaluate` with `fa.Concat`, and a
loop of your own with `fa.gather(..., valid=batch.valid)`. `evaluate.load("f1").compute` takes the results.
"""

from __future__ import annotations

import torch
from digits import build_model, loaders, loss_fn, parser
from sklearn.metrics import f1_score

import fnaccel as fa


def answers(model, batch):
    images, labels = batch
    return {"predictions": fa.Concat(model(images).argmax(dim=1)), "labels": fa.Concat(labels)}


def by_hand(train_step, state, shards):
    """The same with a loop: each rank computes its rows, and all ranks gather them."""
    parts = []
    for batch in shards:
        images, labels = batch.data
        predictions = train_step.look(state, lambda model, x: model(x), images).argmax(dim=1)
        parts.append(fa.gather({"predictions": predictions, "labels": labels}, valid=batch.valid))
    return fa.collectives.concatenate(parts)


def main() -> None:
    args = parser(__doc__).parse_args()
    train_loader, test_loader = loaders()
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(3e-3))
        state = train_step.init(seed=0)
        for state, _ in fa.scan(train_step, state, fa.shard(train_loader), epochs=args.epochs):
            pass
        found = fa.evaluate(train_step, state, answers, fa.shard(test_loader))
        score = f1_score(found["labels"].cpu(), found["predictions"].cpu(), average="macro")
        world.print(f"macro F1 {score:.4f} on {len(found['labels'])} rows")
        gathered = by_hand(train_step, state, fa.shard(test_loader))
        same = all(torch.equal(gathered[name], found[name]) for name in found)
        world.print("a loop by hand gathers the same rows:", same)


if __name__ == "__main__":
    main()
