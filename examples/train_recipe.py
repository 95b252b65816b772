"""Train the GPT of train_gpt.py by a recipe: one YAML file holds all choices of a run.

    fnaccel launch -n 2 --cpu --config examples/recipes/fsdp.yaml examples/train_recipe.py
    fnaccel launch -n 2 --config examples/recipes/ddp.yaml --set optimizer.lr=1e-3 examples/train_recipe.py

Model, data and loss are code. The recipe has the rest: strategy, transforms, optimizer, schedule, seed,
length, checkpoints and trackers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch.utils.data import DataLoader
from train_gpt import GPT, Sources, loss_fn

import fnaccel as fa


def defaults(steps: int) -> fa.config.Recipe:
    """The choices that hold if the file leaves them out."""
    return fa.config.Recipe(
        clip_norm=1.0,
        optimizer=fa.config.OptimizerRecipe(
            lr=4e-3,
            schedule="warmup_cosine",
            schedule_options={"warmup": max(1, steps // 20), "total": max(2, steps)},
            groups={"*norm*": {"weight_decay": 0.0}, "*bias": {"weight_decay": 0.0}},
        ),
        run=fa.config.RunRecipe(steps=steps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=16, help="rows in an update, on all ranks")
    parser.add_argument("--json", help="write this process's losses here")
    args = parser.parse_args()
    recipe = fa.config.recipe(defaults(args.steps))  # the file and the options of the launcher go over them
    loader = DataLoader(Sources(), batch_size=args.global_batch, shuffle=True)
    with fa.start() as world:
        shards = fa.shard(loader, **fa.config.shard_options(recipe))
        train_step = fa.config.apply(recipe, loss_fn, GPT, shards=shards)
        world.print(train_step.plan)
        state = fa.resume_or_init(recipe.checkpoint.directory, train_step, seed=recipe.run.seed)
        losses = []
        options = fa.config.scan_options(recipe)
        for state, metrics in fa.scan(train_step, state, shards, progress=True, **options):
            losses.append(metrics["loss"])
        losses = [float(loss) for loss in losses]
        if losses:
            world.print(f"step {state.step}: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
        if world.is_main and args.json:
            Path(args.json).write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
