"""Train a byte-level GPT on Python's own standard-library sources.

    python examples/train_gpt.py --steps 200 --report report.html --sample 400
    fnaccel launch -n 2 --strategy fsdp --precision bf16 examples/train_gpt.py --steps 200

The launcher chooses what the step leaves open: strategy, precision, accumulation, compiling. The loss curve
is the same for the same global batch. A run with `--dir` that was stopped or killed goes on from its last
checkpoint, on any number of ranks:

    fnaccel launch -n 2 --strategy ddp --max-restarts 3 examples/train_gpt.py --dir runs/gpt --save-every 50

`compare_scopes.py` measures which scope of `fa.compile` serves it here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fnaccel as fa

CONTEXT = 128


class Sources(Dataset):
    """Windows of the standard library's source files, as bytes."""

    def __init__(self, limit: int | None = None) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = bytearray(b"\n".join(file.read_bytes() for file in files))[:limit]
        self.tokens = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        # positions are data, since fa.context gives each rank a part of every row
        return {"tokens": piece[:-1], "labels": piece[1:], "positions": torch.arange(CONTEXT)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    tp_plan: ClassVar = {  # how fa.tensor cuts it
        "embed": "vocab",
        "blocks.*.qkv": "packed_colwise:3",
        "blocks.*.heads": "/",
        "blocks.*.project": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather",
    }

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.08)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    logits = model(batch["tokens"], batch["positions"]).flatten(0, 1)
    nll = F.cross_entropy(logits.float(), batch["labels"].flatten(), reduction="sum")
    return fa.Mean(nll, weight=batch["labels"].numel())


def example_batch(rows: int = 16) -> dict[str, torch.Tensor]:
    """What `compare_scopes.py` trains on."""
    return next(iter(DataLoader(Sources(), batch_size=rows)))


def sample(model, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
    """Continue `prompt`; every rank draws the same bytes."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[0, -1].float().cpu()
        drawn = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn[None].to(tokens.device)], dim=1)
    return bytes(tokens[0].tolist())


def digest(state: fa.TrainState) -> str:
    """One number for all parameters, whatever their layout."""
    found = hashlib.sha256()
    for name, value in sorted(state.params.items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + whole.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=16, help="rows in an update, on all ranks")
    parser.add_argument("--compile-cache", metavar="DIR", help="keep compiled code here, for the next start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", help="save here, and go on from what is there")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="save so often, not at the end only")
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N checkpoints")
    parser.add_argument("--background", action="store_true", help="train on while a checkpoint is written")
    parser.add_argument("--trackers", nargs="*", default=[], help="such as jsonl tensorboard wandb, or all")
    parser.add_argument("--json", help="write this process's losses and a digest of the parameters here")
    parser.add_argument("--report", metavar="FILE", help="write an HTML page about the run here")
    parser.add_argument("--sample", type=int, default=0, help="bytes of text to draw at the end")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> None:
    args = parse()
    loader = DataLoader(Sources(), batch_size=args.global_batch, shuffle=True)
    step = fa.clip_norm(loss_fn, 1.0)  # --accumulate 2 of the launcher makes it fa.accumulate(step, 2)
    optimizer = fa.adamw(
        fa.warmup_cosine(4e-3, warmup=max(1, args.steps // 20), total=max(2, args.steps)),
        groups={"*norm*": {"weight_decay": 0.0}, "*bias": {"weight_decay": 0.0}},
    )
    with fa.start(compile_cache=args.compile_cache) as world:
        train_step = fa.train_step(step, model=fa.distribute(GPT), optimizer=optimizer)
        world.print(train_step.plan)
        state = fa.resume_or_init(args.dir, train_step, seed=args.seed)
        first, losses = state.step + 1, []
        save = None
        if args.dir:
            save = fa.Autosave(args.dir, every=args.save_every, keep=args.keep, background=args.background)
        for state, metrics in fa.scan(
            train_step, state, fa.shard(loader, seed=args.seed), steps=args.steps, progress=not args.quiet,
            save=save, track=fa.Tracking(*args.trackers, config=vars(args), report=args.report),
            watch=fa.Watch(throughput=bool(args.report), memory=bool(args.report)),
        ):  # fmt: skip
            losses.append(metrics["loss"])
        losses = [float(loss) for loss in losses]
        if train_step.compilation:
            world.print(train_step.compilation)
        if losses:
            late = losses[-20:]
            mean = sum(late) / len(late)
            world.print(f"loss: {losses[0]:.3f} -> {mean:.3f} nats per byte (mean of the last {len(late)})")
        else:
            world.print(f"finished already, at step {state.step}")
        if args.dir:
            world.print(f"saved {fa.checkpoint.latest(args.dir)}")
        if args.sample:
            text = train_step.look(state, sample, b"def ", args.sample)
            world.print("sample:\n" + text.decode("utf-8", "replace"))
        mark = digest(state)
        if world.is_main and args.json:
            Path(args.json).write_text(json.dumps({"first": first, "losses": losses, "digest": mark}))
        if args.report and losses:
            world.print(f"report: {args.report}")


if __name__ == "__main__":
    main()
