"""A model of transformers that is bigger than its budget: built empty, placed, loaded from the disk, and run.

python examples/by_feature/big_model.py --budget 8MB
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import transformers

import fnaccel as fa

CONFIG = transformers.LlamaConfig(
    hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8, vocab_size=512
)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--budget", default="8MB", help="how much of the model the CPU may hold")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "llama"  # weights that a hub would have
        whole = transformers.LlamaForCausalLM(CONFIG).eval()
        whole.save_pretrained(checkpoint, max_shard_size="4MB")
        prompt = torch.arange(3, 11)[None]
        settings = {"max_new_tokens": options.tokens, "do_sample": False, "pad_token_id": 0}
        expected = whole.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)

        with fa.big.empty():
            model = transformers.LlamaForCausalLM(CONFIG).eval()
        placed = fa.big.device_map(model, {"cpu": options.budget})
        print(placed)
        run = fa.big.load(model, checkpoint, placed)
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        print("the tokens of the model in memory:", torch.equal(tokens, expected))
        counts = run.counts
        print(f"{counts.fetched} layers fetched, {counts.ahead} of them ahead, {counts.nbytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
