"""Train a masked language model. It takes the place of transformers' run_mlm_no_trainer.py.

    python examples/masked_lm.py
    fnaccel launch -n 2 --strategy fsdp --precision bf16 examples/masked_lm.py

The collator masks other tokens each time, so batches and ranks differ in the number of labels.
`fa.Mean.of_tokens` counts them. The held-out text is masked once, so that its loss can be compared.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import python_sources  # before transformers: nothing is asked for over the network
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, default_data_collator

import fnaccel as fa

VOCABULARY, CONTEXT = 1000, 64


def data(batch: int, files: int = 40) -> tuple[DataLoader, DataLoader]:
    """A loader to train on and one to evaluate on. `batch` is the number of rows on all ranks together."""
    texts = python_sources.files(files)
    tokenizer = python_sources.tokenizer(texts, VOCABULARY)

    def blocks(rows):
        tokens = [token for text in tokenizer(rows["text"])["input_ids"] for token in text]
        return {"input_ids": [tokens[i : i + CONTEXT] for i in range(0, len(tokens) - CONTEXT + 1, CONTEXT)]}

    def mask(rows):
        collate_once = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
        masked = collate_once([{"input_ids": tokens} for tokens in rows["input_ids"]])
        return {"input_ids": masked["input_ids"].tolist(), "labels": masked["labels"].tolist()}

    pieces = Dataset.from_dict({"text": texts}).map(blocks, batched=True, remove_columns="text")
    parts = pieces.train_test_split(test_size=0.05, seed=0)
    held_out = parts["test"].map(mask, batched=True)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    return (
        DataLoader(parts["train"], batch_size=batch, shuffle=True, collate_fn=collate),
        DataLoader(held_out, batch_size=batch, collate_fn=default_data_collator),
    )


def build_model() -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=96, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=CONTEXT, pad_token_id=0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def loss_fn(model, batch):
    outputs = model(**batch)
    return fa.Mean.of_tokens(outputs.loss, batch["labels"], shift=False)  # labels are not shifted, as in GPT


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch", type=int, default=16, help="rows in an update, on all ranks")
    parser.add_argument("--json", help="write the losses on held-out text here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    step = fa.clip_norm(loss_fn, 1.0)
    optimizer = fa.adamw(
        fa.schedules.warmup_linear(3e-3, warmup=max(1, args.steps // 20), total=max(2, args.steps)),
        groups={"*bias": {"weight_decay": 0.0}, "*LayerNorm*": {"weight_decay": 0.0}},
    )
    train_loader, test_loader = data(args.global_batch)
    with fa.start() as world:
        train_step = fa.train_step(step, model=fa.distribute(build_model), optimizer=optimizer)
        state, held_out = train_step.init(seed=0), []

        def evaluate(state):
            nats = float(fa.evaluate(train_step, state, loss_fn, fa.shard(test_loader)))
            held_out.append(nats)
            world.print(f"step {state.step}: perplexity {math.exp(nats):.1f} on held-out text")

        evaluate(state)
        for state, _ in fa.scan(train_step, state, fa.shard(train_loader), steps=args.steps):
            if state.step % 100 == 0 or state.step == args.steps:
                evaluate(state)
        if world.is_main and args.json:
            Path(args.json).write_text(json.dumps({"held_out": held_out}))


if __name__ == "__main__":
    main()
