"""Teacher and student under different strategies: the teacher is sharded, the student replicated.

    python examples/distill.py
    fnaccel launch -n 2 --strategy ddp examples/distill.py
    fnaccel launch -n 2 examples/distill.py --teacher fsdp --student ddp

It takes the place of Accelerate's by_feature/deepspeed_knowledge_distillation.py, under any strategies.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from train_digits import CNN, data, loss_fn, metrics_fn

import fnaccel as fa


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def distillation_loss(student, batch, given):
    """Match the teacher's softened answers (Hinton et al. 2015)."""
    images, labels = batch
    with torch.no_grad():
        answers = F.softmax(given["teacher"](images) / 2.0, dim=1)
    logits = student(images)
    soft = -(answers * F.log_softmax(logits / 2.0, dim=1)).sum() * 4.0
    hard = F.cross_entropy(logits, labels, reduction="sum")
    return fa.Mean(0.7 * soft + 0.3 * hard, weight=len(labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", help="the teacher's strategy (default: that of the launcher)")
    parser.add_argument("--student", help="the student's strategy (default: that of the launcher)")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    train, test = data()
    shards = fa.shard(DataLoader(train, batch_size=64, shuffle=True))
    held_out = fa.shard(DataLoader(test, batch_size=50))
    with fa.start() as world:
        teach = fa.train_step(loss_fn, model=fa.distribute(CNN, args.teacher), optimizer=fa.adamw(3e-3))
        teacher = teach.init(seed=0)
        for teacher, _ in fa.scan(teach, teacher, shards, epochs=args.epochs):
            pass
        learn = fa.train_step(
            distillation_loss, model=fa.distribute(Small, args.student), optimizer=fa.adamw(3e-3)
        )
        student = learn.init(seed=1)
        while student.data.epoch < args.epochs:
            for batch in shards.at(student.data):
                student, _ = learn(student, batch, given={"teacher": teacher})
        for name, program, state in (("teacher", teach, teacher), ("student", learn, student)):
            scores = fa.evaluate(program, state, metrics_fn, held_out)
            world.print(f"{name}: accuracy {float(scores['accuracy']):.4f}")


if __name__ == "__main__":
    main()
