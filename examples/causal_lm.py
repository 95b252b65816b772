"""Train a causal language model. It takes the place of transformers' run_clm_no_trainer.py.

    python examples/causal_lm.py --sample 40
    python examples/causal_lm.py --model llama --export runs/llama
    fnaccel launch -n 2 --strategy fsdp examples/causal_lm.py --dir runs/clm --save-every 50

If a run with `--dir` is stopped or killed, the same command goes on from its last checkpoint, on any number
of ranks. `--export` writes a directory for `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import python_sources  # before transformers: nothing is asked for over the network
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, default_data_collator

import fnaccel as fa

VOCABULARY, CONTEXT = 1000, 64


def build_tokenizer():
    return python_sources.tokenizer(python_sources.files(40), VOCABULARY)


def data(tokenizer, batch: int, files: int = 40) -> tuple[DataLoader, DataLoader]:
    """Blocks of CONTEXT tokens: a loader to train on and one to evaluate on."""

    def blocks(rows):
        tokens = [token for text in tokenizer(rows["text"])["input_ids"] for token in text]
        pieces = [tokens[i : i + CONTEXT] for i in range(0, len(tokens) - CONTEXT + 1, CONTEXT)]
        return {"input_ids": pieces, "labels": pieces}

    texts = Dataset.from_dict({"text": python_sources.files(files)})
    parts = texts.map(blocks, batched=True, remove_columns="text").train_test_split(test_size=0.05, seed=0)
    return (
        DataLoader(parts["train"], batch_size=batch, shuffle=True, collate_fn=default_data_collator),
        DataLoader(parts["test"], batch_size=batch, collate_fn=default_data_collator),
    )


def build_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * CONTEXT, n_embd=96, n_layer=2, n_head=4,
        bos_token_id=5, eos_token_id=5,
        # without dropout the losses are equal on any number of ranks
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def build_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=2 * CONTEXT, hidden_size=96, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, bos_token_id=5, eos_token_id=5, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt2": build_gpt2, "llama": build_llama}
# biases and norms have no weight decay. Each pattern must match a parameter of the model
NO_DECAY = {"gpt2": ("*bias", "*ln_*"), "llama": ("*norm*",)}


def loss_fn(model, batch):
    outputs = model(**batch)
    return fa.Mean.of_tokens(outputs.loss, batch["labels"])  # the model's loss is a mean over tokens


def sample(model, tokenizer, prompt: str, length: int) -> str:
    """Continue a prompt. Every rank draws the same tokens, since all of them set the same seed."""
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    lengths = {"max_new_tokens": length, "min_new_tokens": length}
    tokens = model.generate(**inputs, **lengths, do_sample=True, temperature=0.8, pad_token_id=0)
    return tokenizer.decode(tokens[0])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2", choices=MODELS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch", type=int, default=16, help="rows in an update, on all ranks")
    parser.add_argument("--dir", help="save here, and go on from the newest checkpoint in it")
    parser.add_argument("--save-every", type=int, metavar="STEPS")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="TOKENS", help="generate text every 100 steps"
    )
    parser.add_argument("--export", metavar="DIR", help="write the model and the tokenizer for transformers")
    parser.add_argument("--json", help="write the losses and the perplexity here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    step = fa.clip_norm(loss_fn, 1.0)
    optimizer = fa.adamw(
        fa.warmup_cosine(3e-3, warmup=max(1, args.steps // 20), total=max(2, args.steps)),
        weight_decay=0.1,
        groups={pattern: {"weight_decay": 0.0} for pattern in NO_DECAY[args.model]},
    )
    tokenizer = build_tokenizer()
    train_loader, test_loader = data(tokenizer, args.global_batch)
    with fa.start() as world:
        train_step = fa.train_step(step, model=fa.distribute(MODELS[args.model]), optimizer=optimizer)
        state = fa.resume_or_init(args.dir, train_step, seed=0)
        first, losses = state.step + 1, []
        save = fa.Autosave(args.dir, every=args.save_every) if args.dir else None
        for state, metrics in fa.scan(train_step, state, fa.shard(train_loader), steps=args.steps, save=save):
            losses.append(metrics["loss"])
            if args.sample and state.step % 100 == 0:
                world.print(train_step.look(state, sample, tokenizer, "def ", args.sample))
        nats = fa.evaluate(train_step, state, loss_fn, fa.shard(test_loader))
        perplexity = math.exp(float(nats))
        losses = [float(loss) for loss in losses]
        if losses:
            world.print(f"steps {first} to {state.step}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        world.print(f"perplexity {perplexity:.2f} on held-out text")
        if args.export:
            fa.interchange.export_hf(args.export, state, overwrite=True)
            world.on_main(tokenizer.save_pretrained)(args.export)
            world.print(f"exported to {args.export}")
        if world.is_main and args.json:
            result = {"first": first, "losses": losses, "perplexity": perplexity}
            Path(args.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
