"""Classify images with a vision transformer. It takes the place of Accelerate's examples/cv_example.py.

    python examples/vision.py
    fnaccel launch -n 2 --strategy fsdp examples/vision.py

The images are scikit-learn's digits, 8 x 8 pixels. The model is a small ViT from a config. For your pictures
use `datasets.load_dataset("imagefolder", data_dir=...)` and `from_pretrained` instead.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: nothing is asked for over the network

from datasets import Dataset
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

import fnaccel as fa


def data(batch: int) -> tuple[DataLoader, DataLoader]:
    """A loader to train on and one to evaluate on. `batch` is the number of rows on all ranks together."""
    digits = load_digits()
    pixels = (digits.images[:, None] / 8.0 - 1.0).astype("float32")  # [rows, channel, height, width], -1 to 1
    images = Dataset.from_dict({"pixel_values": pixels, "labels": digits.target}).with_format("torch")
    parts = images.train_test_split(test_size=397, seed=0)
    return (
        DataLoader(parts["train"], batch_size=batch, shuffle=True),
        DataLoader(parts["test"], batch_size=batch),
    )


def build_model() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10,
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    )  # fmt: skip
    return ViTForImageClassification(config)


def loss_fn(model, batch):
    outputs = model(**batch)
    return fa.Mean.of(outputs.loss, weight=len(batch["labels"]))  # the model's loss is a mean over rows


def metrics_fn(model, batch):
    right = (model(batch["pixel_values"]).logits.argmax(dim=1) == batch["labels"]).sum()
    return {"accuracy": fa.Mean(right, weight=len(batch["labels"])), "rows": fa.Sum(len(batch["labels"]))}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="rows in an update, on all ranks")
    parser.add_argument("--json", help="write the losses and the accuracy here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    train_loader, test_loader = data(args.global_batch)
    step = fa.clip_norm(loss_fn, 1.0)
    rate = fa.schedules.one_cycle(3e-3, total=args.epochs * len(train_loader))
    with fa.start() as world:
        train_step = fa.train_step(step, model=fa.distribute(build_model), optimizer=fa.adamw(rate))
        state = train_step.init(seed=0)
        shards, losses = fa.shard(train_loader), []
        for state, metrics in fa.scan(train_step, state, shards, epochs=args.epochs, progress=True):
            losses.append(metrics["loss"])
        scores = fa.evaluate(train_step, state, metrics_fn, fa.shard(test_loader))
        accuracy = float(scores["accuracy"])
        world.print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
        world.print(f"accuracy {accuracy:.4f} on {int(scores['rows'])} held-out digits")
        if world.is_main and args.json:
            result = {"losses": [float(loss) for loss in losses], "accuracy": accuracy}
            Path(args.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
