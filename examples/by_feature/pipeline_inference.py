"""Inference on stages: each rank runs some layers of a model, on chunk after chunk of the rows. It takes the
place of the scripts in Accelerate's examples/inference/pippy.

    fnaccel launch -n 2 examples/by_feature/pipeline_inference.py --model llama

GPT-2 and Llama generate, too. T5 has two lists of layers, so `split=` names where its second stage begins: at
the decoder, which gets the encoder's output. Nothing is trained, so there is no train step.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers

import fnaccel as fa

ROWS, LENGTH, VOCABULARY = 8, 32, 512


def build_model(name: str) -> torch.nn.Module:
    torch.manual_seed(
        0
    )  # yours: from_pretrained; or fa.big.empty and fa.big.load, which reads what a rank keeps
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4
        )
        return transformers.T5ForConditionalGeneration(config).eval()
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=128,
            n_embd=64,
            n_layer=4,
            n_head=4,
            bos_token_id=1,
            eos_token_id=1,
        )
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["bert", "gpt2", "llama", "t5"], default="gpt2")
    parser.add_argument("--chunks", type=int, help="parts of a batch, by default as many as there are ranks")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to generate, by gpt2 and llama")
    args = parser.parse_args()
    with fa.start() as world:
        split = ("decoder.block.0",) if args.model == "t5" and world.size > 1 else "even"
        model = fa.big.pipeline(build_model(args.model), chunks=args.chunks, split=split)
        here = sum(param.numel() for param in model.parameters())
        world.print("parameters by rank:", fa.collectives.gather_objects(here))
        ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if args.model == "t5" else {})
        model(**inputs)
        begin = time.perf_counter()
        logits = model(**inputs).logits  # on all ranks. outputs="last" leaves them on the last one
        world.print(f"logits {list(logits.shape)}, mean {float(logits.mean()):.6f}")
        world.print(f"{time.perf_counter() - begin:.3f} s for {ROWS} rows")
        if args.model in ("gpt2", "llama"):
            options = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}
            tokens = model.generate(ids[:2].to(world.device), **options)
            world.print("tokens", tokens[:, LENGTH:].tolist())


if __name__ == "__main__":
    main()
