"""Train on a mixture: code and prose of Python's own standard library, with shares that change in training.

    python examples/by_feature/mixture.py
    fnaccel launch -n 2 --strategy ddp examples/by_feature/mixture.py

Each row knows its source, so the loss counts rows and measures the loss of each source.
"""

from __future__ import annotations

import argparse
import ast
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fnaccel as fa

NAMES = ("code", "prose")
LENGTH = 32


def texts() -> tuple[bytes, bytes]:
    """Statements, and docstrings, of some modules."""
    code, prose = [], []
    for path in sorted(Path(os.__file__).parent.glob("c*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                prose.append(ast.get_docstring(node) or "")
                code += [ast.unparse(part) for part in node.body if not isinstance(part, ast.Expr)]
    return "\n".join(code).encode(), "\n".join(prose).encode()


class Windows(Dataset):
    def __init__(self, text: bytes) -> None:
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.rows[index]}


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 48), nn.Linear(48, 256)
        self.mix = nn.GRU(48, 48, batch_first=True)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0])


def loss_fn(model, batch):
    tokens, source = batch["tokens"], batch["source"]
    logits = model(tokens[:, :-1]).flatten(0, 1)
    nll = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1).mean(1)
    aux = {}
    for number, name in enumerate(NAMES):
        its = source == number
        aux[f"rows/{name}"] = fa.Sum(its.sum())
        aux[f"loss/{name}"] = fa.Mean((nll * its).sum(), weight=its.sum())
    return fa.Mean(nll.sum(), weight=len(nll), aux=aux)


def weights(samples: int) -> dict[str, float]:
    """Code first, then equal shares."""
    return {"code": 1.0, "prose": min(samples / 4000, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    loaders = {
        name: DataLoader(Windows(text), batch_size=64, shuffle=True)
        for name, text in zip(NAMES, texts(), strict=True)
    }
    mixed = fa.data.mix(loaders, weights=weights, stop="last", seed=0, label="source")
    with fa.start() as world:
        train_step = fa.train_step(
            fa.clip_norm(loss_fn, 1.0), model=fa.distribute(Bytes), optimizer=fa.adamw(5e-3)
        )
        state = train_step.init(seed=0)
        for state, metrics in fa.scan(train_step, state, fa.shard(mixed), steps=args.steps):
            if state.step % 20 == 0:
                parts = [
                    f"{name} {float(metrics[f'loss/{name}']):.2f} ({int(metrics[f'rows/{name}'])} rows)"
                    for name in NAMES
                ]
                world.print(f"step {state.step}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
