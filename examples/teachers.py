"""Self-distillation as in DINO (Caron et al. 2021): the teacher is a moving average of the student.

    python examples/teachers.py
    fnaccel launch -n 2 --strategy fsdp examples/teachers.py --dir runs/dino

The teacher sees one view of a digit, the student another. The teacher's answers are centred by their running
mean, which is part of the state, and its momentum follows a schedule. `distill.py` has a teacher that was
trained before.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa

CLASSES = 64


def data() -> tuple[TensorDataset, TensorDataset]:
    """Digits of shape [64] and their labels: 1,500 to train on without labels, and 297."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


class Net(nn.Module):
    """An answer for each of CLASSES: the cosine of an embedding and the class, which is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
        self.head = nn.Linear(64, 32)
        self.classes = nn.Linear(32, CLASSES, bias=False)

    def forward(self, x):
        return F.linear(
            F.normalize(self.head(self.body(x)), dim=-1), F.normalize(self.classes.weight, dim=-1)
        )


def views(x, keys):
    """Two views of each digit, shape [rows, 2, 64]: pixels are left out at random, by the key of the row."""
    kept = [fa.random.uniform(keys.fold_in(view), (64,)) > 0.3 for view in range(2)]
    return torch.stack([x * mask for mask in kept], 1)


def loss_fn(model, batch, given, *, info):
    """Each view of the teacher against the other view of the student."""
    both = batch["views"].transpose(0, 1)
    with torch.no_grad():
        answers = [model["teacher"](view) for view in both]
        targets = [
            F.softmax((answer - info.extras["centre"]) / given["temperature"], -1) for answer in answers
        ]
    guesses = [F.log_softmax(model["student"](view) / 0.1, -1) for view in both]
    total = -(targets[0] * guesses[1] + targets[1] * guesses[0]).sum() / 2
    rows = len(batch["views"])
    centre = fa.Mean(torch.stack(answers).mean(0).sum(0), weight=rows)
    return fa.Mean(total, weight=rows, aux={"centre": centre})


def move_centre(state, metrics, _):
    """The running mean of the teacher's answers, of all rows on all ranks."""
    return state.with_extras({"centre": 0.9 * state.extras["centre"] + 0.1 * metrics["centre"].cpu()})


def answer(model, batch):
    """The teacher's class of each row, and its digit."""
    x, y = batch
    return {"class": fa.Concat(model["teacher"](x).argmax(-1)), "digit": fa.Concat(y)}


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dir", help="save here, and go on from what is there")
    args = parser.parse_args(argv)
    save = fa.Autosave(args.dir, every=20, keep=2) if args.dir else None
    train, test = data()
    shards = fa.shard(DataLoader(train, batch_size=128, shuffle=True))
    momentum = fa.schedules.cosine(0.95, total=300, end=1.0)
    step = fa.transforms.momentum_teacher(loss_fn, teacher="teacher", student="student", decay=momentum)
    with fa.start() as world:
        model = fa.distribute({"student": Net, "teacher": "student"})
        train_step = fa.train_step(step, model=model, optimizer={"student": fa.adamw(3e-3)})
        state = fa.resume_or_init(args.dir, train_step, seed=0, extras={"centre": torch.zeros(CLASSES)})
        losses = []

        def two_views(state, batch):
            info = train_step.loss_info(state, batch)
            return batch.replace({"views": views(batch.data[0], info.key.fold_in(info.rows))})

        for state, metrics in fa.scan(
            train_step,
            state,
            shards,
            steps=args.steps,
            given={"temperature": fa.schedules.linear(0.03, 0.04, total=100)},
            before=two_views,
            after=move_centre,
            save=save,
        ):
            losses.append(float(metrics["loss"]))
        found = fa.evaluate(train_step, state, answer, fa.shard(DataLoader(test, batch_size=100)))
        digits = [found["digit"][found["class"] == number] for number in found["class"].unique()]
        most = sum(int(one.bincount().max()) for one in digits)
        share = most / len(test)
        world.print(
            f"loss {losses[-1]:.2f}, {len(digits)} classes, each mostly of one digit: {share:.2f} of 297"
        )
        return losses, state


if __name__ == "__main__":
    main()
