"""Fine-tune with LoRA. It takes the place of peft's peft_lora_clm_accelerate_ds_zero3_offload.py.

    python examples/lora.py
    fnaccel launch -n 2 --strategy fsdp examples/lora.py --dir runs/lora

First the base model is trained on code and exported. In your script it is a model of the Hub. Then an adapter
is trained on prose, saved as a checkpoint, and exported. peft loads it and computes the same logits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import python_sources  # before transformers: nothing is asked for over the network
import torch
from causal_lm import VOCABULARY, build_llama, loss_fn
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, LlamaForCausalLM

import fnaccel as fa


def data(kind: int, batch: int) -> DataLoader:
    """Lines of code (0) or of prose (1), padded to the longest of a batch. Padding has no label."""
    lines = Dataset.from_dict(python_sources.labelled_lines(4000))
    tokenizer = python_sources.tokenizer(lines["text"], VOCABULARY)
    chosen = lines.filter(lambda row: row["label"] == kind).remove_columns("label")
    encoded = chosen.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=48, return_token_type_ids=False),
        batched=True, remove_columns="text",
    )  # fmt: skip
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return DataLoader(encoded, batch_size=batch, shuffle=True, collate_fn=collate)


def train_base(directory: Path, batch: int, steps: int) -> None:
    train_step = fa.train_step(loss_fn, model=fa.distribute(build_llama), optimizer=fa.adamw(3e-3))
    state = train_step.init(seed=0)
    for state, _ in fa.scan(train_step, state, fa.shard(data(0, batch)), steps=steps):
        pass
    fa.interchange.export_hf(directory, state)
    train_step.close()


def logits(model, batch):
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8, help="the rank of the adapter's matrices")
    parser.add_argument("--global-batch", type=int, default=16, help="rows in an update, on all ranks")
    parser.add_argument("--dir", help="for base model, checkpoints and adapter (default: temporary)")
    parser.add_argument("--json", help="write the losses and the largest difference of logits here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    with fa.start() as world, tempfile.TemporaryDirectory() as temporary:
        root = Path(args.dir or fa.collectives.broadcast_objects(temporary))
        if not fa.collectives.broadcast_objects((root / "base").exists()):
            train_base(root / "base", args.global_batch, args.base_steps)

        adapter = LoraConfig(r=args.rank, target_modules=["q_proj", "v_proj", "down_proj"])

        def build_model() -> PeftModel:
            base = LlamaForCausalLM.from_pretrained(root / "base").train()  # it returns it in evaluation mode
            return get_peft_model(base, adapter)

        optimizer = fa.adamw(5e-3, weight_decay=0.0)
        train_step = fa.train_step(loss_fn, model=fa.distribute(build_model), optimizer=optimizer)
        state = fa.resume_or_init(root / "checkpoints", train_step, seed=0)
        trained = sum(value.numel() for name, value in state.params.items() if "lora" in name)
        total = sum(value.numel() for value in state.params.values())
        world.print(f"{trained:,} of {total:,} parameters are trained")
        loader, losses = data(1, args.global_batch), []
        for state, metrics in fa.scan(
            train_step,
            state,
            fa.shard(loader),
            steps=args.steps,
            save=fa.Autosave(root / "checkpoints", keep=1),
        ):
            losses.append(metrics["loss"])
        losses = [float(loss) for loss in losses]
        if losses:
            world.print(f"loss on prose: {losses[0]:.3f} -> {losses[-1]:.3f}")

        # a checkpoint goes into any strategy: see fa.restore. An adapter goes into peft
        state = fa.restore(root / "checkpoints", like=state)
        fa.interchange.export_adapter(root / "adapter", state, overwrite=True)
        batch = loader.collate_fn([loader.dataset[row] for row in range(8)])
        expected = train_step.look(state, logits, batch)
        base = LlamaForCausalLM.from_pretrained(root / "base")
        reloaded = PeftModel.from_pretrained(base, root / "adapter").eval()
        with torch.no_grad():
            difference = float((logits(reloaded, batch) - expected.cpu()).abs().max())
        world.print(f"peft computes the same logits: largest difference {difference:.1e}")
        if world.is_main and args.json:
            Path(args.json).write_text(json.dumps({"losses": losses, "difference": difference}))
        world.barrier()  # before the temporary directory is removed


if __name__ == "__main__":
    main()
