"""Models whose splits are hard, their losses, and how they are trained on any strategy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from tests.strategies.tensor.models import GPT, VOCABULARY, WIDTH
from tests.tiny_models import whole_params

STEPS, RATE, CLIP = 3, 0.3, 0.5


class TiedGPT(GPT):
    """Its head has the weight of its embedding: the first stage owns it, the last one uses it."""

    def __init__(self, layers=4):
        super().__init__(layers)
        self.head.weight = self.embed.weight


class Residual(nn.Sequential):
    """Adds what its modules compute."""

    def forward(self, x):
        return x + super().forward(x)


class Dropping(nn.Module):
    """Draws in blocks, between blocks, and after them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4))
        self.between = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.between(self.embed(tokens))
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(F.dropout(x, 0.1, self.training))


class Between(Dropping):
    """Draws a mask between two blocks, and uses it after later ones, too."""

    def forward(self, tokens):
        x, kept = self.embed(tokens), None
        for block in self.blocks:
            x = block(x)
            if kept is None:
                kept = torch.rand(WIDTH) < 0.7
            x = x * kept if self.training else x
        return self.head(x)


class Copied(nn.Module):
    """Initial values of layers are copies of those of the first one, as torch's encoder makes them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).layers
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Statistics(nn.Module):
    """A block that stores what has no gradient."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.mean, self.rows = x.detach().mean(), len(x)
        return x + torch.tanh(self.mix(x))


class Reported(nn.Module):
    """Its output has a term of what all blocks stored."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Statistics() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + sum(block.mean * block.rows for block in self.blocks))


class Moving(nn.Module):
    """Batch norms before, in and after the blocks, and a number that every stage has."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            Residual(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.last = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        x = self.first(self.embed(tokens).flatten(0, 1))
        for block in self.blocks:
            x = self.scale * block(x)
        return self.head(self.last(x)).view(*tokens.shape, VOCABULARY)


class Pair(nn.Module):
    """A block that takes and returns two activations, with an in-place operation on one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair):
        x, y = pair
        x, y = x + torch.tanh(self.a(y)), y - torch.tanh(self.b(x))
        x += 0.1
        return x, y


class Reversible(nn.Module):
    """Several activations travel, and operations stand between the blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 2 * WIDTH)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        pair = self.embed(tokens).chunk(2, -1)
        for block in self.blocks:
            x, y = block(pair)
            x.mul_(0.9)
            pair = y, x
        return self.head(pair[0] + pair[1])


class Expert(nn.Module):
    """Stores an auxiliary loss, as routers of experts do, and returns another one beside the activation."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.penalty = torch.zeros(())

    def forward(self, x):
        logits = self.mix(x)
        self.penalty = logits.square().mean()
        return x + torch.tanh(logits), logits.exp().mean()


class Experts(nn.Module):
    """The loss reads what each block stored and returned."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Expert() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x, beside = self.embed(tokens), []
        for block in self.blocks:
            x, other = block(x)
            beside.append(other)
        stored = sum(block.penalty for block in self.blocks)
        return self.head(x), 0.1 * stored + 0.01 * torch.stack(beside).sum()


class Frozen(GPT):
    """The first half takes no gradient, or the blocks in the middle don't."""

    def __init__(self, where="first"):
        super().__init__(4)
        frozen = {"first": ("embed", "position", "blocks.0", "blocks.1"), "middle": ("blocks.1", "blocks.2")}[
            where
        ]
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith(frozen))


def frozen_middle():
    return Frozen("middle")


def deep_gpt():
    return GPT(4)


def loss_fn(model, tokens):
    output, beside = model(tokens[:, :-1]), 0.0
    if isinstance(output, tuple):
        output, beside = output
    labels = tokens[:, 1:]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return fa.Mean(
        total + beside * labels.numel(), weight=labels.numel(), aux={"tokens": fa.Sum(labels.numel())}
    )


def rows_of(step, rank, rows=None):
    """Rows of one rank: ragged micro-batches, in numbers that differ between ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (rows or 7 + 4 * rank, 9), generator=generator)


def trained(strategy, model, micro_batches=3, transform=None, optimizer=None):
    """Losses, norms and whole parameters of some steps, as each rank sees them."""
    step = fa.clip_norm(fa.accumulate(loss_fn, micro_batches), CLIP)
    if transform is not None:
        step = transform(step)
    train_step = fa.train_step(
        step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.sgd(RATE)
    )
    state = train_step.init(seed=0)
    losses, norms = [], []
    for number in range(STEPS):
        state, metrics = train_step(state, rows_of(number, train_step.mesh.batch_rank))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    buffers = {name: fa.tree.whole(value).clone() for name, value in state.buffers.items()}
    score = float(fa.tree.norm(state.params))
    return losses, norms, whole_params(state), buffers, score, int(metrics["tokens"])
