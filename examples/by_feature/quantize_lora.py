"""Train a LoRA adapter on a 4-bit model (QLoRA). It takes the place of Accelerate's guide on quantization.

    python examples/by_feature/quantize_lora.py
    fnaccel launch -n 2 --strategy ddp examples/by_feature/quantize_lora.py --dir runs/qlora --save-every 10

First a small base model is written. In your script it is a model of the Hub. Its weights are quantized while
they are read, so that the full-width model is nowhere in memory. With `--dir` a run that was killed goes on
from its last checkpoint, to the same bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from causal_lm import build_llama, build_tokenizer, data, loss_fn
from peft import LoraConfig, PeftModel, get_peft_model

import fnaccel as fa

CODES = {
    "nf4": fa.big.Nf4(double=True, compute="bf16", block=32),
    "fp4": fa.big.Fp4(compute="bf16", block=32),
    "int8": fa.big.Int8(),
    "int8_weights": fa.big.Int8Weights(),
    "int4_weights": fa.big.Int4Weights(),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codes", default="nf4", choices=CODES)
    parser.add_argument("--base-steps", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--global-batch", type=int, default=16, help="rows in an update, on all ranks")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--dir", help="for the base model, checkpoints and the adapter (default: temporary)")
    return parser.parse_args()


def train_base(directory: Path, loader, steps: int) -> None:
    train_step = fa.train_step(loss_fn, model=fa.distribute(build_llama), optimizer=fa.adamw(3e-3))
    state = train_step.init(seed=0)
    for state, _ in fa.scan(train_step, state, fa.shard(loader), steps=steps):
        pass
    fa.interchange.export_hf(directory, state)
    train_step.close()


def main() -> None:
    args = parse()
    with fa.start() as world, tempfile.TemporaryDirectory() as temporary:
        root = Path(args.dir or fa.collectives.broadcast_objects(temporary))
        loader, _ = data(build_tokenizer(), args.global_batch)
        if not fa.collectives.broadcast_objects((root / "base").exists()):
            train_base(root / "base", loader, args.base_steps)
        record = CODES[args.codes]

        def build_model() -> PeftModel:
            with fa.big.empty():
                model = build_llama()
            run = fa.big.load(model, root / "base", quantization=record)
            run.remove()  # no offloading: take its hooks away
            return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))

        optimizer = fa.adamw(5e-3, weight_decay=0.0)
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=optimizer)
        state = fa.resume_or_init(root / "checkpoints", train_step, seed=0)
        codes = sum(value.nbytes for value in state.buffers.values())
        trained = sum(value.nbytes for name, value in state.params.items() if "lora" in name)
        world.print(
            f"begins at step {state.step}: {codes:,} bytes of {record.name}, {trained:,} of the adapter"
        )
        losses = []
        save = fa.Autosave(root / "checkpoints", every=args.save_every, keep=1)
        for state, metrics in fa.scan(train_step, state, fa.shard(loader), steps=args.steps, save=save):
            losses.append(metrics["loss"])
        if losses:
            world.print(f"loss: {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
        fa.interchange.export_adapter(root / "adapter", state, overwrite=True)
        world.print("adapter:", sorted(path.name for path in (root / "adapter").iterdir()))
        world.barrier()  # before the temporary directory is removed


if __name__ == "__main__":
    main()
