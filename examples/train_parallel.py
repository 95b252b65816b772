"""Train the byte-level GPT under a product of axes, and go on under another one.

    fnaccel launch -n 4 --strategy "fsdp(2) * tensor(2)" examples/train_parallel.py --dir runs/parallel
    python examples/train_parallel.py --dir runs/parallel --steps 40

The loss is that of one process, for any product. The second command restores the checkpoint of four ranks
on one, and goes on with the next batch.
"""

from __future__ import annotations

import argparse

from torch.utils.data import DataLoader
from train_gpt import GPT, Sources, digest, loss_fn

import fnaccel as fa


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dir", help="save here, and go on from what is there")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> None:
    args = parse()
    loader = DataLoader(Sources(), batch_size=16, shuffle=True)
    with fa.start() as world:
        step = fa.clip_norm(loss_fn, 1.0)
        train_step = fa.train_step(step, model=fa.distribute(GPT), optimizer=fa.adamw(3e-3))
        world.print(train_step.plan)
        state = fa.resume_or_init(args.dir, train_step)
        shards = fa.shard(loader, seed=0)
        for state, metrics in fa.scan(
            train_step, state, shards, steps=args.steps, progress=not args.quiet, save=args.dir
        ):
            world.print(f"step {state.step}: {float(metrics['loss']):.4f} nats per byte")
        mark = digest(state)  # every rank gathers
        world.print(f"parameters: {mark}")


if __name__ == "__main__":
    main()
