"""What nanoGPT's scripts do, option for option: train a GPT, evaluate, keep the best, resume, sample.

    python examples/nanogpt.py --max_iters 100
    fnaccel launch -n 2 --strategy fsdp examples/nanogpt.py --dtype bfloat16 --out_dir runs/nano
    python examples/nanogpt.py --init_from resume --out_dir runs/nano --max_iters 300

Options have nanoGPT's names. The launcher chooses the strategy. The text is that of Python's own standard
library, as bytes. A run that was killed goes on with `--init_from resume`, on any number of ranks.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fnaccel as fa


@attrs.frozen
class Config:
    out_dir: str = ""  # save here, if it is given
    eval_interval: int = 50
    log_interval: int = 10
    eval_iters: int = 10
    eval_only: bool = False
    always_save_checkpoint: bool = True
    init_from: str = "scratch"  # or "resume", or the directory of a GPT-2 of transformers
    wandb_log: bool = False
    data_dir: str = "runs/python_bytes"
    gradient_accumulation_steps: int = 2
    batch_size: int = 8  # rows of a micro-batch, on all ranks
    block_size: int = 64
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 96
    dropout: float = 0.0
    bias: bool = False
    learning_rate: float = 3e-3
    max_iters: int = 200
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    decay_lr: bool = True
    warmup_iters: int = 10
    lr_decay_iters: int = 200
    min_lr: float = 3e-4
    dtype: str = "float32"  # or "bfloat16", "float16"
    compile: bool = False
    num_samples: int = 0
    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 1337


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.dropout = c.n_head, c.dropout
        self.norm1, self.norm2 = nn.LayerNorm(c.n_embd, bias=c.bias), nn.LayerNorm(c.n_embd, bias=c.bias)
        self.qkv = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.out = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.up = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.down = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Embedding and head share their weight. Layers that write to the residual begin smaller with depth."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.head = nn.Linear(c.n_embd, 256, bias=False)
        self.head.weight, self.dropout = self.tokens.weight, c.dropout
        for name, param in self.named_parameters():
            if param.dim() == 2:
                small = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * c.n_layer) if small else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Windows(Dataset):
    """Every window of a file of bytes. A shuffled epoch draws each offset once, so a run resumes exactly."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self.count = path.stat().st_size - length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, start: int) -> torch.Tensor:
        data = np.memmap(self.path, dtype=np.uint8, mode="r")  # opened anew: a kept one grows
        return torch.from_numpy(data[start : start + self.length + 1].astype(np.int64))


def prepare(folder: Path) -> None:
    """Write the text in two files: nine tenths to train on, and the rest to evaluate."""
    folder.mkdir(parents=True, exist_ok=True)
    text = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    cut = len(text) * 9 // 10
    (folder / "train.bin").write_bytes(text[:cut])
    (folder / "val.bin").write_bytes(text[cut:])


def build(c: Config) -> nn.Module:
    if c.init_from in ("scratch", "resume"):
        return GPT(c)
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(c.init_from)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits).flatten(0, 1).float()
    return fa.Mean(F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), weight=len(logits))


def generate(model, c: Config, key):
    """Bytes after a line feed. Every rank draws the same."""
    tokens = torch.full((1, 1), 10, device=next(model.parameters()).device)
    for place in range(c.max_new_tokens):
        logits = model(tokens[:, -c.block_size :])
        logits = getattr(logits, "logits", logits)[0, -1].float() / c.temperature
        logits[logits < logits.topk(c.top_k).values[-1]] = -torch.inf
        noise = fa.random.uniform(key.fold_in(place), logits.shape, low=1e-9).to(logits.device)
        tokens = torch.cat([tokens, (logits - (-noise.log()).log()).argmax()[None, None]], 1)
    return bytes(tokens[0].tolist())


def is_matrix(_: str, param: torch.Tensor) -> bool:
    return param.dim() >= 2


def make_step(c: Config, ranks: int):
    """The loss under its transforms, and the optimizer."""
    step = loss_fn
    if c.dtype != "float32":
        step = fa.with_precision(step, {"bfloat16": "bf16", "float16": "fp16"}[c.dtype])
    step = fa.accumulate(step, max(1, c.gradient_accumulation_steps // ranks))
    if c.grad_clip:
        step = fa.clip_norm(step, c.grad_clip)
    step = fa.compile(step) if c.compile else step
    rate = c.learning_rate
    if c.decay_lr:
        rate = fa.warmup_cosine(rate, warmup=c.warmup_iters, total=c.lr_decay_iters, end=c.min_lr)
    optimizer = fa.adamw(
        rate,
        betas=(c.beta1, c.beta2),
        weight_decay=0.0,
        groups=[(is_matrix, {"weight_decay": c.weight_decay})],
    )
    return step, optimizer


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in attrs.fields(Config):
        flag = (
            {"action": argparse.BooleanOptionalAction}
            if field.type == "bool"
            else {"type": type(field.default)}
        )
        parser.add_argument(f"--{field.name}", default=field.default, **flag)
    c = Config(**vars(parser.parse_args(argv)))
    with fa.start() as world:
        folder = Path(c.data_dir)
        with world.main_first():
            if not (folder / "val.bin").exists():
                prepare(folder)
        rows = c.batch_size * c.gradient_accumulation_steps
        train, val = (
            fa.shard(
                DataLoader(Windows(folder / f"{part}.bin", c.block_size), rows, shuffle=True), seed=c.seed
            )
            for part in ("train", "val")
        )
        step, optimizer = make_step(c, world.size)
        model = fa.distribute(functools.partial(build, c))
        train_step = fa.train_step(step, model=model, optimizer=optimizer)
        state = fa.resume_or_init(c.out_dir if c.init_from == "resume" else None, train_step, seed=c.seed)
        held_out = fa.Evaluation(
            loss_fn, val, name="val", every=c.eval_interval, limit=c.eval_iters, best="loss", first=True
        )
        seen = fa.Evaluation(
            loss_fn, train, name="train", every=c.eval_interval, limit=c.eval_iters, first=True
        )
        if c.eval_only:
            loss = fa.evaluate(train_step, state, loss_fn, val, limit=c.eval_iters)
            world.print(f"val loss {float(loss):.4f}")
            return [], state
        losses = []
        save_each = c.eval_interval if c.always_save_checkpoint else None
        for state, metrics in fa.scan(
            train_step,
            state,
            train,
            steps=c.max_iters,
            evaluate=[held_out, seen],
            save=fa.Autosave(c.out_dir, every=save_each, keep=1) if c.out_dir else None,
            track=fa.Tracking(*["wandb"] * c.wandb_log, every=c.log_interval, config=attrs.asdict(c)),
            watch=fa.Watch(throughput=True),
            progress=True,
        ):
            losses.append(metrics["loss"])
            if "val/loss" in metrics:
                both = f"train {metrics['train/loss']:.4f}, val {metrics['val/loss']:.4f}"
                world.print(f"step {state.step}: {both}")
        for number in range(c.num_samples):
            text = train_step.look(state, generate, c, fa.random.key(c.seed + number))
            world.print(text.decode("utf-8", "replace"))
        return [float(loss) for loss in losses], state


if __name__ == "__main__":
    main()
