"""A policy learns from its own samples by GRPO (Shao et al. 2024): here to write even numbers.

    python examples/grpo.py
    fnaccel launch -n 2 --strategy fsdp examples/grpo.py --dir runs/grpo

A rollout is made before the two updates on it. Rewards and losses do not depend on the number of ranks: each
row samples by a key of its own.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa

VOCABULARY, LENGTH, GROUP = 16, 8, 8  # GROUP samples of each prompt are compared with each other


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.mix = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0])


def log_probabilities(model, tokens):
    """Of each token after the first: shape [rows, LENGTH]."""
    return model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def sample(model, prompts, info):
    """Tokens of shape [rows * GROUP, LENGTH + 1]. Each row draws from a key of its own."""
    rows = info.rows[:, None] * GROUP + torch.arange(GROUP, device=prompts.device)
    keys = info.key.fold_in(rows.flatten())
    tokens = prompts.repeat_interleave(GROUP)[:, None]
    for place in range(LENGTH):
        noise = fa.random.uniform(keys.fold_in(place), (VOCABULARY,), low=1e-9)
        scores = model(tokens)[:, -1] - (-noise.log()).log()  # Gumbel: the argmax is a sample
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
    return tokens


def judged(tokens):
    """Rewards, and each sample's advantage over the others of its prompt: shapes [rows]."""
    reward = (tokens[:, 1:] % 2 == 0).float().mean(1).view(-1, GROUP)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    return reward.flatten(), advantage.flatten()


def loss_fn(model, batch, given):
    """The clipped objective, and a divergence from the policy at the start. One token weighs 1."""
    new = log_probabilities(model, batch["tokens"])
    ratio, advantage = (new - batch["old"]).exp(), batch["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    with torch.no_grad():
        reference = log_probabilities(given["reference"], batch["tokens"])
    away = reference - new
    divergence = away.exp() - away - 1
    rows = len(new)
    aux = {
        "reward": fa.Mean(batch["reward"].sum(), weight=rows),
        "largest_ratio": fa.Max(ratio.detach().max()),
    }
    return fa.Mean((given["beta"] * divergence - gain).sum(), weight=new.numel(), aux=aux)


def beta(update):
    return 0.05 * 0.99**update


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dir", help="save here, and go on from what is there")
    args = parser.parse_args(argv)
    save = fa.Autosave(args.dir, every=20, keep=2) if args.dir else None
    prompts = DataLoader(torch.arange(VOCABULARY), batch_size=8, shuffle=True)
    with fa.start() as world:
        policy = fa.distribute(Policy)
        train_step = fa.train_step(fa.clip_norm(loss_fn, 1.0), model=policy, optimizer=fa.adamw(3e-3))
        reference = fa.train_step(log_probabilities, model=policy, optimizer=None)

        def rollout(state, batch):
            """What the updates of this batch are made of."""
            tokens = train_step.look(state, sample, batch.data, train_step.loss_info(state, batch))
            old = train_step.look(state, log_probabilities, tokens)
            reward, advantage = judged(tokens)
            return batch.replace({"tokens": tokens, "old": old, "advantage": advantage, "reward": reward})

        state, losses = fa.resume_or_init(args.dir, train_step, seed=0), []
        for state, metrics in fa.scan(
            train_step,
            state,
            fa.shard(prompts, rows_per_sample=GROUP),
            steps=args.steps,
            given={"reference": reference.init(seed=0), "beta": beta},
            before=rollout,
            updates_per_batch=2,
            save=save,
        ):
            losses.append(float(metrics["loss"]))
            if state.step % 20 == 0:
                world.print(f"step {state.step}: reward {float(metrics['reward']):.2f}")
        return losses, state


if __name__ == "__main__":
    main()
