"""Preference tuning by DPO (Rafailov et al. 2023), with the reference in three forms of one curve.

    python examples/dpo.py --reference lent
    fnaccel launch -n 2 --strategy fsdp examples/dpo.py --reference frozen --dir runs/dpo

The preferred completion of a prompt is how the file goes on, the other one is from elsewhere: Python's own
standard-library sources, as bytes. The page on preference tuning explains the three forms.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from train_gpt import GPT

import fnaccel as fa

PROMPT, COMPLETION, BETA = 24, 24, 0.5
build = functools.partial(GPT, width=32, layers=2, heads=2)


class Preferences(Dataset):
    """A prompt with its own completion, and with another one: bytes of shape [PROMPT + COMPLETION]."""

    def __init__(self, count: int = 256) -> None:
        file = max(Path(os.__file__).parent.glob("a*.py"))
        text = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        self.windows = text.unfold(0, PROMPT + COMPLETION, PROMPT)[:count]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        own, other = self.windows[index], self.windows[(index * 7 + 5) % len(self.windows)]
        return {"chosen": own, "rejected": torch.cat([own[:PROMPT], other[PROMPT:]])}


def log_likelihood(model, tokens):
    """Of the completion: shape [rows]."""
    found = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return found[:, PROMPT - 1 :].sum(1)


def margin(model, batch):
    """By how much the preferred completion is more likely: shape [rows]."""
    return log_likelihood(model, batch["chosen"]) - log_likelihood(model, batch["rejected"])


def preference(model, batch, reference):
    """The loss, from the margins of a reference."""
    gain = margin(model, batch) - reference
    aux = {"accuracy": fa.Mean((gain > 0).sum(), weight=len(gain))}
    return fa.Mean(-F.logsigmoid(BETA * gain).sum(), weight=len(gain), aux=aux)


def lent(model, batch, given):
    """The reference is the state of another train step, of any strategy."""
    with torch.no_grad():
        reference = margin(given["reference"], batch)
    return preference(model, batch, reference)


def frozen(model, batch):
    """The reference is a second model of this train step, without an optimizer."""
    with torch.no_grad():
        reference = margin(model["reference"], batch)
    return preference(model["policy"], batch, reference)


def computed(model, batch):
    """The margins of the reference are part of the batch."""
    return preference(model, batch, batch["reference"])


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", choices=["lent", "frozen", "computed"], default="lent")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--dir", help="save here, and go on from what is there")
    args = parser.parse_args(argv)
    save = fa.Autosave(args.dir, every=20, keep=2) if args.dir else None
    shards = fa.shard(DataLoader(Preferences(), batch_size=16, shuffle=True))
    with fa.start() as world:
        model, optimizer, options = fa.distribute(build), fa.adamw(1e-3), {}
        if args.reference == "frozen":
            model = fa.distribute({"policy": build, "reference": "policy"})
            optimizer = {"policy": optimizer}
        else:
            first = fa.train_step(margin, model=model, optimizer=None)
            reference = first.init(seed=0)
        if args.reference == "lent":
            options = {"given": {"reference": reference}}
        if args.reference == "computed":

            def with_reference(_, batch):
                return batch.replace({**batch.data, "reference": first.look(reference, margin, batch.data)})

            options = {"before": with_reference}
        step = fa.clip_norm({"lent": lent, "frozen": frozen, "computed": computed}[args.reference], 1.0)
        train_step = fa.train_step(step, model=model, optimizer=optimizer)
        state, losses = fa.resume_or_init(args.dir, train_step, seed=0), []
        for state, metrics in fa.scan(train_step, state, shards, steps=args.steps, save=save, **options):
            losses.append(float(metrics["loss"]))
            if state.data.epoch_ended:
                accuracy = float(metrics["accuracy"])
                world.print(f"epoch {state.data.epoch}: loss {losses[-1]:.3f}, accuracy {accuracy:.2f}")
        return losses, state


if __name__ == "__main__":
    main()
