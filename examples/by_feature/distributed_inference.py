"""Generate text for a list of prompts on several ranks. It takes the place of the scripts in Accelerate's
examples/inference/distributed.

    fnaccel launch -n 2 examples/by_feature/distributed_inference.py

Each rank holds the model and generates for its part of the prompts. The parts may differ in length. Nothing
is trained, so there is no train step. If a model is too large for one rank, shard it by
`fa.train_step(..., optimizer=None)`. Then all ranks must generate for all prompts.
"""

from __future__ import annotations

import argparse

import torch
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, logging

import fnaccel as fa

PROMPTS = ["def read(", "class Node:", "import os", "return self", "for line in"]


def build_model(vocabulary: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)  # yours: from_pretrained, with world.main_first() around a download
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return GPT2LMHeadModel(config).eval()


def generate(model, tokenizer, prompts: list[str], length: int) -> list[str]:
    if not prompts:  # there are more ranks than prompts
        return []
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=length, do_sample=False, pad_token_id=0)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8, help="tokens to generate")
    args = parser.parse_args()
    logging.set_verbosity_error()
    tokenizer = ByT5Tokenizer(padding_side="left")  # bytes: it needs no file
    with fa.start() as world:
        model = build_model(len(tokenizer)).to(world.device)
        texts = generate(model, tokenizer, fa.split_between_processes(PROMPTS), args.length)
        parts = fa.collectives.gather_objects(texts)  # a list for each rank, in the order of the prompts
        world.print("prompts by rank:", [len(part) for part in parts])
        for prompt, text in zip(PROMPTS, [text for part in parts for text in part], strict=True):
            world.print(f"{prompt!r} -> {text!r}")


if __name__ == "__main__":
    main()
