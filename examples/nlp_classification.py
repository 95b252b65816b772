"""Classify sentences with BERT. It takes the place of Accelerate's examples/nlp_example.py.

    python examples/nlp_classification.py
    fnaccel launch -n 2 --strategy fsdp examples/nlp_classification.py

A row is one line of Python's standard library, and its label says if it is prose (from a docstring) or code.
The model is a small BERT from a config. `from_pretrained` in its place fine-tunes a model of the Hub.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import python_sources  # before transformers: nothing is asked for over the network
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

import fnaccel as fa

VOCABULARY = 1000


def data(rows: int, batch: int) -> tuple[DataLoader, DataLoader]:
    """A loader to train on and one to evaluate on. `batch` is the number of rows on all ranks together."""
    lines = Dataset.from_dict(python_sources.labelled_lines(rows))
    tokenizer = python_sources.tokenizer(lines["text"], VOCABULARY)

    def encode(row):
        return tokenizer(row["text"], truncation=True, max_length=48)

    encoded = lines.map(encode, batched=True, remove_columns="text")
    parts = encoded.train_test_split(test_size=0.2, seed=0)
    collate = DataCollatorWithPadding(tokenizer)
    return (
        DataLoader(parts["train"], batch_size=batch, shuffle=True, collate_fn=collate),
        DataLoader(parts["test"], batch_size=2 * batch, collate_fn=collate),
    )


def build_model() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=48, pad_token_id=0, num_labels=2,
        # without dropout the losses are equal on any number of ranks
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def loss_fn(model, batch):
    outputs = model(**batch)
    return fa.Mean.of(outputs.loss, weight=len(batch["labels"]))  # the model's loss is a mean over rows


def metrics_fn(model, batch):
    predictions = model(**batch).logits.argmax(dim=-1)
    right = (predictions == batch["labels"]).sum()
    return {"accuracy": fa.Mean(right, weight=len(predictions)), "rows": fa.Sum(len(predictions))}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--global-batch", type=int, default=32, help="rows in an update, on all ranks")
    parser.add_argument("--json", help="write the losses and the accuracy here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    train_loader, test_loader = data(args.rows, args.global_batch)
    total = args.epochs * len(train_loader)
    rate = fa.schedules.warmup_linear(1e-3, warmup=max(1, total // 10), total=max(2, total))
    with fa.start() as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=fa.adamw(rate))
        world.print(train_step.plan)
        state = train_step.init(seed=0)
        train_shards, test_shards = fa.shard(train_loader), fa.shard(test_loader)
        losses = []
        for epoch in range(1, args.epochs + 1):
            for state, metrics in fa.scan(train_step, state, train_shards, epochs=epoch):
                losses.append(metrics["loss"])
            scores = fa.evaluate(train_step, state, metrics_fn, test_shards)
            accuracy = float(scores["accuracy"])
            world.print(
                f"epoch {epoch}: loss {float(losses[-1]):.4f}, "
                f"accuracy {accuracy:.4f} on {int(scores['rows'])} held-out lines"
            )
        if world.is_main and args.json:
            result = {"losses": [float(loss) for loss in losses], "accuracy": accuracy}
            Path(args.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
